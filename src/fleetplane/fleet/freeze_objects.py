"""Freezes in the resource API.

A freeze is called by where it holds and what it stops, such as `tenant.acme:instances`, and lies at that
tenant: who may freeze there writes it, and nobody writes one that holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import FREEZE as FREEZE_PERMISSION
from fleetplane.fleet.resources.common import (
    VIEW,
)
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import FREEZE, Freeze, put_freeze
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest import bodies as times


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


class FreezeParts(Protocol):
    """What of the running domain writes."""

    @property
    def switch(self) -> FreezeSwitch: ...


def find_freeze(_domain: object, draft: Draft, scope: str, name: str) -> Freeze | None:
    """By where it holds and what it stops."""
    for found in draft.list(FREEZE):
        if freeze_place(found, draft) == scope and freeze_name(found, draft) == name:
            return found
    return None


def put_freeze_object(call: WriteCall) -> Freeze:
    """Stop controllers, or say another reason or end."""
    domain: FreezeParts = call.domain
    given: FreezeSpecView = call.spec
    if len(given.domains) != 1:
        raise InvalidArgument("a freeze names one domain, or * for all", field="domains")
    expires_at_ns = None
    if given.expires_at is not None:
        expires_at_ns = times.parsed(given.expires_at, field="expiresAt")
    stored: Freeze | None = call.stored
    if stored is not None and stored.scope == given.at and stored.spec.domains == given.domains:
        ends = spelled_or_null(stored.spec.expires_at_ns)
        if (stored.spec.reason, ends) == (given.reason, spelled_or_null(expires_at_ns)):
            return stored  # who says the same again has not frozen it
    domain.switch.check(given.at, domains=given.domains, expires_at_ns=expires_at_ns, at=call.draft)
    return put_freeze(
        call.draft,
        given.at,
        given.domains[0],
        reason=given.reason,
        actor=call.actor,
        expires_at_ns=expires_at_ns,
    )


def delete_freeze(call: WriteCall) -> None:
    """Let controllers go on."""
    assert call.stored is not None
    call.draft.delete(FREEZE, call.stored.scope, call.stored.name)


def disturbs(before: AnyResource | None, after: AnyResource | None, _reading: ViewReader) -> Sequence[str]:
    """Whose controllers stop, or go on."""
    if before is not None and after is not None:
        return ()
    found = after or before
    assert found is not None
    what = "stop" if after is not None else "go on"
    return (f"controllers of {'+'.join(found.spec.domains)} {what} at {found.scope or 'every scope'}",)


WRITERS: Mapping[str, Writable] = {
    "freeze": Writable(
        anywhere=True,
        permission=FREEZE_PERMISSION,
        find=find_freeze,
        put=put_freeze_object,
        delete=delete_freeze,
        rank=5,  # before what it keeps controllers from
        exported=lambda stored: not stored.scope or stored.scope.startswith("tenant/"),
        disturbs=disturbs,
    )
}
