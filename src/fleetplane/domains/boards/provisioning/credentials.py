"""How boards are logged in to: kept sealed, given a name, never shown again."""

from __future__ import annotations

import re

import msgspec

from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store

SECRETS = "boards/ssh/"
DEFAULT_NAME = "default"
TEXT_LIMIT = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


class SshCredential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user: str = "pi"
    port: int = 22
    private_key: str = ""
    """In PEM or OpenSSH's form."""
    password: str = ""
    known_hosts: str = ""
    """Accepted host keys, as lines of OpenSSH's known_hosts."""

    def __repr__(self) -> str:
        return f"<SshCredential {self.user}>"


class SshCredentials:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    def __repr__(self) -> str:
        return "<Credentials>"

    async def put(self, name: str, credential: SshCredential, *, actor: str) -> None:
        """Keep a credential, in place of one of the same name."""
        check_name(name)
        check(credential)
        secret = SECRETS + name
        sealed = self._master.seal(msgspec.msgpack.encode(credential), purpose=secret)
        await self._store.put_secret(secret, sealed, actor=actor)

    async def get(self, name: str) -> SshCredential:
        name = name or DEFAULT_NAME
        secret = SECRETS + check_name(name)
        sealed = await self._store.get_secret(secret)
        if sealed is None:
            raise NotFound(
                f"there is no SSH credential named {name!r}",
                hint="`fleetplane boards credential set` keeps one",
            )
        return msgspec.msgpack.decode(self._master.open(sealed, purpose=secret), type=SshCredential)

    async def names(self) -> list[str]:
        return [name.removeprefix(SECRETS) for name in await self._store.secret_names(SECRETS)]

    async def delete(self, name: str, *, actor: str) -> None:
        if check_name(name) not in await self.names():
            raise NotFound(f"there is no SSH credential named {name!r}")
        await self._store.delete_secret(SECRETS + name, actor=actor)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "a credential's name has 1 to 64 letters, digits, dots, dashes and underscores",
            field="credential_ref",
        )
    return name


def check(credential: SshCredential) -> None:
    if not _USER.fullmatch(credential.user):
        raise InvalidArgument("is no name of a user", field="username")
    if not 1 <= credential.port <= 65_535:
        raise InvalidArgument("must be 1 to 65535", field="port")
    for field in ("private_key", "password", "known_hosts"):
        if len(getattr(credential, field)) > TEXT_LIMIT:
            raise InvalidArgument(f"has more than {TEXT_LIMIT} characters", field=field)
    if not (credential.private_key or credential.password):
        raise InvalidArgument("a private key or a password is needed", field="private_key")
    if not credential.known_hosts.strip():
        raise InvalidArgument(
            "is required; give the board's host keys as lines of OpenSSH's known_hosts", field="known_hosts"
        )
