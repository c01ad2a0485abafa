"""Tokens, and accounts that no domain made, in the resource API. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fleetplane.fleet.people.account_kind import ACCOUNT, FAMILY, Account
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.common import (
    MANAGE_PEOPLE,
    PEOPLE,
    AccountSpecView,
    AccountStatusView,
    NoStatus,
    account_resource,
    as_stored,
    made_up,
)
from fleetplane.fleet.resources.declaration import (
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
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.identity.tokens import TokenRecord
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.values.times import spelled_or_null


class TokenSpecView(ResourceShape, frozen=True):
    roles: Sequence[str]
    scope: str
    """Where they hold."""
    expires_at: str | None
    token: Secret


TOKEN: Kind[TokenSpecView, NoStatus] = Kind("operator-token", TokenSpecView, NoStatus)


class TokenParts(Protocol):
    """The part of the running domain that lists tokens."""

    def token_records(self) -> Sequence[TokenRecord]: ...


def tokens(domain: TokenParts) -> Iterator[AnyResource]:
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
