"""Who we are to the server: the token that enrolled us, and the id it gave us. A file of ours alone."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetplane.kernel.durable import write_durably
from fleetplane.kernel.errors import SettingsError


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    agent_id: str = ""
    """Empty before the first registration."""

    def __repr__(self) -> str:
        return f"<Credential of {self.agent_id or 'nobody yet'}>"


class CredentialFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<CredentialFile {self._path}>"

    def load(self, given_token: str) -> Credential:
        """A token that is given counts before one that is kept: somebody wants us enrolled anew."""
        kept = self._read()
        if given_token and (kept is None or kept.token != given_token):
            return Credential(token=given_token)
        if kept is None:
            raise SettingsError(
                "there is no registration token",
                hint="give one with --token-file; it is kept after first use",
            )
        return kept

    def _read(self) -> Credential | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Credential)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{self._path} is damaged: {error}", hint="remove it and enrol anew"
            ) from error

    def store(self, credential: Credential) -> None:
        write_durably(self._path, msgspec.json.encode(credential), mode=0o600)
