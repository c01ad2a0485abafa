"""What every server has, as objects of the resource API: freezes, tokens, accounts, what was done. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from fleetplane.domains.fleetwide.servers import SERVERS
from fleetplane.fleet.people.account_kind import ACCOUNT, FAMILY, Account
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import FREEZE as FREEZE_PERMISSION
from fleetplane.fleet.resources.common import (
    MANAGE_PEOPLE,
    PEOPLE,
    VIEW,
    AccountSpecView,
    AccountStatusView,
    NoStatus,
    account_resource,
    as_stored,
    at_root,
    made_up,
)
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    ObservedPart,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceView,
    Secret,
    ViewReader,
)
from fleetplane.kernel.access import Permission, who
from fleetplane.kernel.audit.chain import ChainEntry
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.freeze import FREEZE, Freeze
from fleetplane.kernel.identity.tokens import TokenRecord
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.values.times import spelled, spelled_or_null

AUDIT = Permission("audit.read")
AUDIT_CHANGES_SHOWN = 100


# Freezes.


class FreezeSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    domains: tuple[str, ...]
    """Whose controllers it stops; `*` for all."""
    reason: str
    expires_at: str | None = None
    """When it ends by itself; null if only by being lifted."""
    at: str = ""
    """The scope that it holds for, as it is stored, such as `tenant/acme/group/web`; empty for everywhere."""


class FreezeStatusView(ResourceShape, frozen=True):
    frozen_at: str
    frozen_by: str
    at: str
    """The scope that it holds for, as it is stored."""


def freeze_view(freeze: Freeze, _reading: ViewReader) -> ResourceView[FreezeSpecView, FreezeStatusView]:
    """What is shown of a freeze."""
    spec = freeze.spec
    return ResourceView(
        spec=FreezeSpecView(
            domains=spec.domains,
            reason=spec.reason,
            expires_at=spelled_or_null(spec.expires_at_ns),
            at=freeze.scope,
        ),
        status=FreezeStatusView(frozen_at=spelled(spec.frozen_at_ns), frozen_by=spec.actor, at=freeze.scope),
    )


def freeze_place(freeze: Freeze, _reading: ViewReader) -> str:
    """The tenant that it holds in, or the installation: its own scope may be any domain's."""
    parts = freeze.scope.split("/")
    return scopes.tenant_path(parts[1]) if parts[0] == "tenant" and len(parts) > 1 else scopes.ROOT


def freeze_name(freeze: Freeze, _reading: ViewReader) -> str:
    """What it stops and where, in one word."""
    where = freeze.scope.replace("/", ".") or "everywhere"
    return f"{where}:{'+'.join(freeze.spec.domains)}"


async def _lift(call: ActionCall) -> Begun | None:
    await call.switch.lift(call.stored.scope, domains=call.stored.spec.domains, actor=call.actor)
    return None


FREEZES = PublicResource(
    name="freeze",
    plural="freezes",
    summary="Controllers that are stopped at and below a scope",
    kind=FREEZE,
    spec=FreezeSpecView,
    status=FreezeStatusView,
    view=freeze_view,
    place=freeze_place,
    permission=VIEW,
    named=freeze_name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DOMAINS", value=".spec.domains"),
        Column(title="AT", value=".status.at"),
        Column(title="BY", value=".status.frozenBy"),
        Column(title="SINCE", value=".status.frozenAt", type="age"),
        Column(title="REASON", value=".spec.reason"),
        Column(title="UNTIL", value=".spec.expiresAt", wide=True),
    ),
    verbs=READING,
    actions=(
        ResourceAction(
            name="lift",
            summary="Let controllers go on",
            permission=FREEZE_PERMISSION,
            run=_lift,
            anywhere=True,
        ),
    ),
)


# Tokens.


class TokenSpecView(ResourceShape, frozen=True):
    roles: Sequence[str]
    scope: str
    """Where they hold."""
    expires_at: str | None
    token: Secret


TOKEN: Kind[TokenSpecView, NoStatus] = Kind("operator-token", TokenSpecView, NoStatus)


class FleetwideParts(Protocol):
    """What of the running domain is needed to tell tokens and what was done."""

    def token_records(self) -> Sequence[TokenRecord]: ...

    async def audit_entries(self, before: int | None, limit: int) -> Sequence[ChainEntry]: ...

    @property
    def audit_length(self) -> int: ...


def tokens(domain: FleetwideParts) -> Iterator[AnyResource]:
    """Every token of an operator or program, without what could be presented."""
    for record in domain.token_records():
        spec = TokenSpecView(
            roles=record.roles,
            scope=scopes.of_stored(record.scope),
            expires_at=spelled_or_null(record.expires_at_ns),
            token=Secret(set=True),
        )
        yield made_up(TOKEN, record.name, spec=spec, scope=record.scope, created_at_ns=record.created_at_ns)


async def _revoke(call: ActionCall) -> Begun | None:
    held = call.domain.permissions_of_token(call.stored.name, call.scope)
    lacking = sorted(permission for permission in held if not call.may(permission))
    if lacking:
        raise PermissionDenied(
            f"{call.actor} may not revoke {call.stored.name!r}: it has {lacking[0]} at {call.scope}",
            hint="a token is revoked by one who has everything that it has",
            details={"permission": lacking[0]},
        )
    if not await call.domain.revoke_token(call.stored.name, actor=call.actor):
        raise NotFound(f"there is no token named {call.stored.name!r}")
    return None


TOKENS = PublicResource(
    name="token",
    plural="tokens",
    summary="With what a program acts on this server",
    kind=TOKEN,
    spec=TokenSpecView,
    status=NoStatus,
    view=as_stored,
    place=lambda token, _reading: scopes.of_stored(token.scope),
    permission=PEOPLE,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="ROLES", value=".spec.roles"),
        Column(title="SCOPE", value=".spec.scope"),
        Column(title="EXPIRES", value=".spec.expiresAt", type="age"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
    actions=(
        ResourceAction(
            name="revoke",
            summary="Refuse it from now on",
            permission=MANAGE_PEOPLE,
            run=_revoke,
            anywhere=True,
        ),
    ),
    computed=tokens,
    observed=ObservedPart(),
)


# The audit log.


class AuditChangeView(ResourceShape, frozen=True):
    operation: str
    kind: str
    scope: str
    name: str


class AuditEntrySpecView(ResourceShape, frozen=True):
    action: str
    actor: str
    at: str
    changes: Sequence[AuditChangeView]
    """The first hundred."""
    changed: int
    """How many there are."""


AUDIT_ENTRY: Kind[AuditEntrySpecView, NoStatus] = Kind("audit-entry", AuditEntrySpecView, NoStatus)


async def audit_entries(domain: FleetwideParts, before: int | None, limit: int) -> Sequence[AnyResource]:
    """So many entries, newest first."""
    return [
        msgspec.structs.replace(
            made_up(
                AUDIT_ENTRY,
                str(entry.seq),
                spec=AuditEntrySpecView(
                    action=entry.action,
                    actor=who(entry.actor).partition("?")[0],
                    at=spelled(entry.at_ns),
                    changes=[
                        AuditChangeView(
                            operation=one.operation, kind=one.kind, scope=one.scope, name=one.name
                        )
                        for one in entry.changes[:AUDIT_CHANGES_SHOWN]
                    ],
                    changed=len(entry.changes),
                ),
                created_at_ns=entry.at_ns,
            ),
            revision=entry.revision,
        )
        for entry in await domain.audit_entries(before, limit)
    ]


AUDIT_ENTRIES = PublicResource(
    name="audit-entry",
    plural="audit-entries",
    short=("audit",),
    summary="What somebody did, as the audit log has it",
    kind=AUDIT_ENTRY,
    spec=AuditEntrySpecView,
    status=NoStatus,
    view=as_stored,
    place=at_root,
    permission=AUDIT,
    columns=(
        Column(title="NUMBER", value=".metadata.name"),
        Column(title="WHEN", value=".spec.at", type="age"),
        Column(title="ACTOR", value=".spec.actor"),
        Column(title="ACTION", value=".spec.action"),
        Column(title="CHANGED", value=".spec.changed", type="number"),
    ),
    latest=audit_entries,
    observed=ObservedPart(version=lambda domain: domain.audit_length),
    search=(".spec.actor", ".spec.action"),
)


# Accounts that no domain's API made.


def account_view(account: Account, _reading: ViewReader) -> ResourceView[AccountSpecView, AccountStatusView]:
    """What is shown of an account of the installation; what is bound to it is not its own."""
    spec = account.spec
    return ResourceView(
        spec=AccountSpecView(
            domain=FAMILY,
            email=spec.email,
            display_name=spec.display_name,
            roles=(),
            active=not spec.disabled,
            password=Secret(set=not spec.subject),
        ),
        status=AccountStatusView(last_login_at=None),
    )


ACCOUNTS = account_resource(
    ACCOUNT,
    view=account_view,
    named=lambda account, _reading: account.name,
    shows=lambda one: not one.spec.home,
)
RESOURCES = (FREEZES, TOKENS, ACCOUNTS, SERVERS, AUDIT_ENTRIES)
