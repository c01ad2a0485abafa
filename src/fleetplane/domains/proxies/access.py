"""Which role of an organisation may do what, and who belongs to which organisation.

The one place where a request of this domain is allowed or refused. A role is held in one
organisation; elsewhere its holder is a stranger, and a stranger is told "not found" about
everything, so that nobody can learn what another organisation has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    API_TOKEN,
    CERTIFICATE,
    DNS_ZONE,
    ID_CLAIM,
    MEMBERSHIP,
    ORGANIZATION,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    organization_scope,
)
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role, built_in_grants
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store

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
    return table | built_in_grants(
        viewer=(READ,), operator=(OPERATE,), admin=(RAW, ADMINISTER), owner=(OWN, SYSTEM)
    )


OPERATOR_ROLES = tuple(grants())


def outranks(one: OrganizationRole, other: OrganizationRole) -> bool:
    ranks = list(OrganizationRole)
    return ranks.index(one) > ranks.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyCaller:
    """A user, a program with an API token of one organisation, or a principal with roles at scopes."""

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
    principal: Principal | None = None
    """One whom another family of tokens vouches for, with the roles that it holds at scopes."""


# Which kind a path's parameter names. The most specific one decides where a request happens.
_NAMES: tuple[tuple[str, AnyKind], ...] = (
    ("agent_id", AGENT),
    ("virtual_host_id", VIRTUAL_HOST),
    ("upstream_id", UPSTREAM),
    ("access_list_id", ACCESS_LIST),
    ("dns_zone_id", DNS_ZONE),
    ("stream_id", STREAM),
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

    def role_in(
        self, caller: ProxyCaller, organization: str, *, draft: Draft | None = None
    ) -> OrganizationRole | None:
        """`draft`: as it is inside the transaction that is being written."""
        bound = self._bound_role(caller, organization)
        if not caller.user:
            return caller.role if caller.role and caller.organization == organization else bound
        membership = (draft or self._store).get(MEMBERSHIP, organization_scope(organization), caller.user)
        own = membership.spec.role if membership is not None and membership.spec.accepted else None
        return bound if own is None or (bound is not None and outranks(bound, own)) else own

    def _bound_role(self, caller: ProxyCaller, organization: str) -> OrganizationRole | None:
        """The highest role whose rights a principal has in the whole of an organisation."""
        if caller.principal is None:
            return None
        scope = organization_scope(organization)
        for role, added in reversed(_LADDER):
            if all(self._table.allows(caller.principal, permission, scope) for permission in added):
                return role
        return None

    def is_system_admin(self, principal: Principal) -> bool:
        """Whether a principal administers all users and organisations."""
        return self._table.allows(principal, SYSTEM)

    def _allows(
        self, caller: ProxyCaller, role: OrganizationRole | None, permission: Permission, scope: str
    ) -> bool:
        if role is not None and self._table.allows(_principal(caller, role, scope), permission, scope):
            return True
        return caller.principal is not None and self._table.allows(caller.principal, permission, scope)

    def may(self, caller: ProxyCaller, permission: Permission, scope: str) -> bool:
        return self._allows(caller, self.role_in(caller, organization_of(scope)), permission, scope)

    def check(self, caller: ProxyCaller, permission: Permission, scope: str, *, missing: str) -> None:
        """Raise unless the caller has the permission; `missing` names it for those who may not know it."""
        role = self.role_in(caller, organization_of(scope))
        if role is None and not self._allows(caller, role, READ, scope):
            raise NotFound(f"{missing} not found")
        if not self._allows(caller, role, permission, scope):
            who = caller.name if role is None else f"a {role} of this organization"
            raise PermissionDenied(f"{who} may not do this", details={"permission": permission})

    def raw_right(self, caller: ProxyCaller, scope: str) -> RawRight:
        """The right to touch raw NGINX text, decided where the change is written."""

        def decide(draft: Draft, reason: str) -> None:
            role = self.role_in(caller, organization_of(scope), draft=draft)
            if role is None and not self._allows(caller, role, READ, scope):
                raise NotFound("workspace not found")
            if not self._allows(caller, role, RAW, scope):
                who = caller.name if role is None else f"a {role} of this organization"
                raise PermissionDenied(
                    f"{who} may not do this: {reason}",
                    hint="ask an administrator of the organization",
                    details={"permission": RAW},
                )

        return decide

    def admit(self, caller: ProxyCaller, permission: Permission | None, path: Mapping[str, str]) -> str:
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


def _principal(caller: ProxyCaller, role: OrganizationRole, scope: str) -> Principal:
    return Principal(
        name=caller.name,
        roles=frozenset({role_name(role)}),
        scope=organization_scope(organization_of(scope)),
    )
