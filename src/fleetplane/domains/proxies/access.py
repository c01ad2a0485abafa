"""Which role of an organisation may do what, and who belongs to which organisation.

The one place where a request of this domain is allowed or refused. A role is held in one
organisation; elsewhere its holder is a stranger, and a stranger is told "not found" about
everything, so that nobody can learn what another organisation has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.proxies.kinds import (
    AGENT,
    API_TOKEN,
    CERTIFICATE,
    ID_CLAIM,
    MEMBERSHIP,
    ORGANIZATION,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    organization_scope,
)
from fleetplane.domains.proxies.values import OrganizationRole
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store

READ = Permission("proxies.read")
OPERATE = Permission("proxies.operate")
"""Virtual hosts, upstreams, certificates, agent tokens and labels, commands."""
RAW = Permission("proxies.raw")
"""Raw NGINX text: custom directives and global settings."""
ADMINISTER = Permission("proxies.administer")
"""Workspaces, members, API tokens, the audit log, deleting agents."""
OWN = Permission("proxies.own")
"""Delete the organisation, grant ownership."""
SYSTEM = Permission("proxies.system")
"""Users, and whatever concerns no single organisation."""

_LADDER: tuple[tuple[OrganizationRole, tuple[Permission, ...]], ...] = (
    (OrganizationRole.VIEWER, (READ,)),
    (OrganizationRole.OPERATOR, (OPERATE,)),
    (OrganizationRole.ADMIN, (RAW, ADMINISTER)),
    (OrganizationRole.OWNER, (OWN,)),
)


SYSTEM_ADMIN = Role("proxies.system_admin")


def role_name(role: OrganizationRole) -> Role:
    """As the access table knows it: other domains may have owners too."""
    return Role(f"proxies.{role}")


def grants() -> dict[Role, tuple[Grant, ...]]:
    """Each role has what the ones below it have."""
    table: dict[Role, tuple[Grant, ...]] = {}
    held: tuple[Permission, ...] = ()
    for role, added in _LADDER:
        held += added
        table[role_name(role)] = tuple(Grant(permission=permission) for permission in held)
    table[SYSTEM_ADMIN] = (Grant(permission=SYSTEM),)
    return table


def outranks(one: OrganizationRole, other: OrganizationRole) -> bool:
    ranks = list(OrganizationRole)
    return ranks.index(one) > ranks.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A user, or a program with an API token of one organisation."""

    name: str
    """`user/{id}` or `api-token/{id}`: audited with every write."""
    user: str = ""
    """Empty for programs."""
    session: str = ""
    """The login that the access token stems from."""
    is_system_admin: bool = False
    organization: str = ""
    """The only one that a program may see."""
    role: OrganizationRole | None = None
    """A program's, in that organisation."""


# Which kind a path's parameter names. The most specific one decides where a request happens.
_NAMES: tuple[tuple[str, AnyKind], ...] = (
    ("agent_id", AGENT),
    ("virtual_host_id", VIRTUAL_HOST),
    ("upstream_id", UPSTREAM),
    ("certificate_id", CERTIFICATE),
    ("api_token_id", API_TOKEN),
    ("workspace_id", WORKSPACE),
    ("organization_id", ORGANIZATION),
)
WORDS: Mapping[str, str] = {
    kind.name: kind.name.removeprefix("proxy-").replace("-", " ") for _, kind in _NAMES
}


class Access:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._table = AccessTable(grants())

    def require_complete(self, permissions: Iterable[Permission]) -> None:
        self._table.require_complete(permissions)

    # Where things lie.

    def locate(self, kind: AnyKind, name: str) -> str | None:
        """The scope of the thing with this id."""
        return self._store.claimed_by(kind, "", ID_CLAIM, name) if name else None

    # Who may.

    def role_in(self, caller: Caller, organization: str) -> OrganizationRole | None:
        if not caller.user:
            return caller.role if caller.organization == organization else None
        membership = self._store.get(MEMBERSHIP, organization_scope(organization), caller.user)
        return membership.spec.role if membership is not None else None

    def may(self, caller: Caller, permission: Permission, scope: str) -> bool:
        role = self.role_in(caller, organization_of(scope))
        return role is not None and self._table.allows(_principal(caller, role, scope), permission, scope)

    def check(self, caller: Caller, permission: Permission, scope: str, *, missing: str) -> None:
        """`missing` is what strangers are told is not there."""
        role = self.role_in(caller, organization_of(scope))
        if role is None:
            raise NotFound(f"{missing} not found")
        if not self._table.allows(_principal(caller, role, scope), permission, scope):
            raise PermissionDenied(
                f"a {role} of this organization may not do this", details={"permission": permission}
            )

    def admit(self, caller: Caller, permission: Permission | None, path: Mapping[str, str]) -> str:
        """The scope of what the path names, for one who may."""
        if permission is None:
            return ""
        parameter, kind = next((name, kind) for name, kind in _NAMES if name in path)
        word = WORDS[kind.name]
        scope = self.locate(kind, path[parameter])
        if scope is None:
            raise NotFound(f"{word} not found")
        self.check(caller, permission, scope, missing=word)
        return scope


def organization_of(scope: str) -> str:
    """The organisation that a scope lies in."""
    return scope.split("/")[1] if scope.startswith("org/") else ""


def _principal(caller: Caller, role: OrganizationRole, scope: str) -> Principal:
    return Principal(
        name=caller.name,
        roles=frozenset({role_name(role)}),
        scope=organization_scope(organization_of(scope)),
    )
