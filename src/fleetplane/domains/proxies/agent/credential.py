"""Who we are to the server, in a file of ours alone: the key that we made, its certificate, and our id.

Before the registration token is exchanged, and where the server exchanges none, the token is here too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from fleetplane.kernel.errors import SettingsError
from fleetplane.node.identity import PrivateFolder


class Credential(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    token: str = ""
    """Empty once it was exchanged for a certificate: it is good for nothing then."""
    agent_id: str = ""
    """Empty before the first registration."""
    key_pem: str = ""
    certificate_pem: str = ""
    """Of the key, with its authority's; empty before the exchange."""
    exchanged: str = ""
    """The digest of the token that was exchanged, so that it is known again."""

    def __repr__(self) -> str:
        return f"<Credential of {self.agent_id or 'nobody yet'}>"

    def came_from(self, token: str) -> bool:
        return token == self.token or self.exchanged == token_digest(token)


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class CredentialFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = PrivateFolder(path.parent)

    def __repr__(self) -> str:
        return f"<CredentialFile {self._path}>"

    def load(self, given_token: str) -> Credential:
        """A token that is given counts before one that is kept: somebody wants us enrolled anew."""
        kept = self._read()
        if given_token and (kept is None or not kept.came_from(given_token)):
            return Credential(token=given_token)
        if kept is None:
            raise SettingsError(
                "there is no registration token",
                hint="give one with --token-file; it is not needed again after its first use",
            )
        return kept

    def _read(self) -> Credential | None:
        raw = self._folder.read(self._path)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Credential)
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{self._path} is damaged: {error}", hint="remove it and enrol anew"
            ) from error

    def store(self, credential: Credential) -> None:
        self._folder.write(self._path, msgspec.json.encode(credential))
