"""Freezes as objects that people write through the resource API.

A freeze is called by where it holds and what it stops, such as `tenant.acme:instances`, and lies at that
tenant: who may freeze there writes it, and nobody writes one that holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fleetplane.domains.fleetwide.resources import FreezeSpecView, freeze_name, freeze_place
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources.acting import FREEZE as FREEZE_PERMISSION
from fleetplane.fleet.resources.declaration import ViewReader, Writable, WriteCall
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import FREEZE, Freeze, put_freeze
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft
from fleetplane.kernel.values.times import spelled_or_null
from fleetplane.web import times


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
