"""Secrets of provisioning: SSH credentials, a cluster's join token and kubeconfig, and disclosures.

All are stored sealed. SSH credentials are never shown. Showing a cluster's secret is recorded before it is
shown.
"""

from __future__ import annotations

import re

import msgspec

from fleetplane.domains.boards.kinds import CLUSTER, SCOPE, BoardsSpec
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

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


class DisclosureSpec(BoardsSpec, frozen=True):
    cluster_id: int
    what: str
    count: int
    last_by: str
    last_at_ns: int


DISCLOSURE: Kind[DisclosureSpec, Nothing] = Kind("board-disclosure", DisclosureSpec, Nothing)


class Disclosures:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Disclosures {len(self._store.list(DISCLOSURE, SCOPE))}>"

    async def note(self, cluster: int, what: str, *, actor: str) -> None:
        """Every one is an entry of the audit log; the record says how many there were."""
        name = f"{cluster}-{what}"

        def change(draft: Draft) -> None:
            if draft.get(CLUSTER, SCOPE, str(cluster)) is None:
                raise NotFound(f"cluster {cluster} is not known", field="id")
            before = draft.get(DISCLOSURE, SCOPE, name)
            count = before.spec.count if before is not None else 0
            spec = DisclosureSpec(
                cluster_id=cluster, what=what, count=count + 1, last_by=actor, last_at_ns=draft.now_ns
            )
            draft.put(DISCLOSURE, SCOPE, name, spec=spec)

        await self._store.transact(
            change, actor=actor, action=f"boards.reveal_{what}", touches=[DISCLOSURE.key(SCOPE, name)]
        )


PREFIX = "boards/cluster/"


class ClusterSecrets:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    def __repr__(self) -> str:
        return "<ClusterSecrets>"

    async def keep(self, cluster: int, *, token: str, kubeconfig: str, actor: str) -> None:
        for kind, text in (("token", token), ("kubeconfig", kubeconfig)):
            name = f"{PREFIX}{cluster}/{kind}"
            await self._store.put_secret(name, self._master.seal(text.encode(), purpose=name), actor=actor)

    async def token(self, cluster: int | None) -> str:
        """With which workers join; raises where there is none yet."""
        found = await self._get(cluster, "token")
        if found is None:
            raise FailedPrecondition("the cluster has no server yet that a worker could join")
        return found

    async def kubeconfig(self, cluster: int) -> str:
        found = await self._get(cluster, "kubeconfig")
        if found is None:
            raise NotFound(f"cluster {cluster} has no kubeconfig yet")
        return found

    async def forget(self, cluster: int, *, actor: str) -> None:
        for name in await self._store.secret_names(f"{PREFIX}{cluster}/"):
            await self._store.delete_secret(name, actor=actor)

    async def _get(self, cluster: int | None, kind: str) -> str | None:
        if cluster is None:
            return None
        name = f"{PREFIX}{cluster}/{kind}"
        sealed = await self._store.get_secret(name)
        return self._master.open(sealed, purpose=name).decode() if sealed is not None else None
