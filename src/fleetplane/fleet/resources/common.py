"""Declarations that several domains share: accounts, and what is computed instead of stored. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    Secret,
    ViewReader,
)
from fleetplane.kernel.access import Permission
from fleetplane.kernel.resources import AnyKind, AnyResource, Resource

VIEW = Permission("fleet.view")
"""See what belongs to no domain: freezes, rollouts, releases, servers."""
PEOPLE = Permission("people.read")
"""Know who has an account or a token."""
MANAGE_PEOPLE = Permission("people.manage")
"""Take tokens away."""


class NoStatus(ResourceShape, frozen=True):
    """Nothing is known of it beside what it should be."""


class AccountSpecView(ResourceShape, frozen=True):
    domain: str
    """Whose API made it; it logs in everywhere."""
    email: str
    display_name: str
    roles: Sequence[str]
    active: bool
    password: Secret


class AccountStatusView(ResourceShape, frozen=True):
    last_login_at: str | None


ACCOUNT_COLUMNS = (
    Column(title="NAME", value=".metadata.name"),
    Column(title="DOMAIN", value=".spec.domain"),
    Column(title="EMAIL", value=".spec.email"),
    Column(title="ROLES", value=".spec.roles"),
    Column(title="ACTIVE", value=".spec.active"),
    Column(title="LOGIN", value=".status.lastLoginAt", type="age", wide=True),
)


def at_root(_stored: AnyResource, _reading: ViewReader) -> str:
    """What belongs to the installation lies there."""
    return scopes.ROOT


def account_resource(
    kind: AnyKind,
    *,
    view: Callable[[Any, ViewReader], ResourceView[AccountSpecView, AccountStatusView]],
    named: Callable[[Any, ViewReader], str],
    shows: Callable[[Any], bool],
) -> PublicResource[AccountSpecView, AccountStatusView]:
    """The accounts that one domain's API made; each person is shown once, where they come from."""
    return PublicResource(
        name="account",
        plural="accounts",
        short=("user", "users"),
        summary="A person who can log in",
        kind=kind,
        spec=AccountSpecView,
        status=AccountStatusView,
        view=view,
        place=at_root,
        permission=PEOPLE,
        named=named,
        columns=ACCOUNT_COLUMNS,
        search=(".metadata.name", ".spec.email", ".spec.displayName"),
        shows=shows,
    )


def made_up(
    kind: AnyKind,
    name: str,
    *,
    spec: Any,
    status: Any = None,
    scope: str = "",
    labels: Mapping[str, str] | None = None,
    created_at_ns: int = 0,
) -> AnyResource:
    """A resource that is stored nowhere, for a resource of the API that is computed."""
    identity = hashlib.blake2b(f"{kind.name} {scope} {name}".encode(), digest_size=16).hexdigest()
    return Resource(
        kind=kind.name,
        scope=scope,
        name=name,
        uid=identity,
        labels=dict(labels or {}),
        spec=spec,
        status=status,
        conditions=(),
        revision=0,
        created_revision=0,
        generation=1,
        created_at_ns=created_at_ns,
        updated_at_ns=created_at_ns,
    )


def as_stored(stored: AnyResource, _reading: ViewReader) -> ResourceView[Any, Any]:
    """The view of what is computed in the shapes that are shown."""
    return ResourceView(spec=stored.spec, status=stored.status)
