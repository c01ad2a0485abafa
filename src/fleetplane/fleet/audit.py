"""The audit log: its entries in the resource API, and `POST /v1/fleet/audit/verify`.

Verifying recomputes the chain under the server's key, in a thread, one request at a time. The result is the
server's own statement: what finds a server that lies is a checkpoint that was kept elsewhere, checked with
files of a backup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from fleetplane.fleet.resources.common import (
    NoStatus,
    as_stored,
    at_root,
    made_up,
)
from fleetplane.fleet.resources.declaration import (
    Column,
    ObservedPart,
    PublicResource,
    ResourceShape,
)
from fleetplane.kernel.access import EVERYWHERE, Permission, who
from fleetplane.kernel.audit.chain import ChainEntry, ChainVerdict
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import Needs
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.routes import Answer, Call, Route, RouteGroup

AUDIT = Permission("audit.read")
AUDIT_CHANGES_SHOWN = 100


class AuditParts(Protocol):
    """The part of the running domain that reads the audit log."""

    async def audit_entries(self, before: int | None, limit: int) -> Sequence[ChainEntry]: ...

    @property
    def audit_length(self) -> int: ...


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


async def audit_entries(domain: AuditParts, before: int | None, limit: int) -> Sequence[AnyResource]:
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


_ROUTES = RouteGroup("Audit")

PATH = "/audit/verify"
RETRY_SECONDS = 10.0

Verification = Callable[[Sequence[bytes], bool], ChainVerdict]
"""Checks the log against checkpoints that were kept elsewhere, as lines; blocks."""


class VerifyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    anchors: list[str] = []
    """Checkpoints that were kept elsewhere, as they were sent."""
    archived_elsewhere: bool = False
    """Begin after the archived entries, on the word of the signed checkpoint at the cut."""


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    intact: bool
    entries: int
    """How many entries were found good."""
    revision: int
    """Of the last good entry."""
    broken_entry: int | None
    """The first that is not as it was written; null if intact, or if no entry is at fault."""
    message: str
    notes: Sequence[str]


class AuditRoutes:
    def __init__(self, gate: RoleGate[OperatorCaller], verify: Verification) -> None:
        self._gate = gate
        self._verify = verify
        self._verifying = asyncio.Lock()  # guards: one verification reads the whole database

    def routes(self) -> Iterator[Route]:
        yield _ROUTES.post(PATH, self.verify, AUDIT, body=VerifyBody, needs=Needs.ACTIVE)

    async def verify(self, call: Call[OperatorCaller]) -> Answer[AuditVerdict]:
        """Check that the audit log, and what the database holds, are as they were written."""
        body: VerifyBody = call.body
        self._gate.check(call.caller, AUDIT, EVERYWHERE)  # the log is the installation's
        if self._verifying.locked():
            raise ResourceExhausted(
                "the audit log is being verified already", retry_after_seconds=RETRY_SECONDS
            )
        lines = [one.encode() for one in body.anchors]
        async with self._verifying:
            found = await asyncio.to_thread(self._verify, lines, body.archived_elsewhere)
        return Answer(
            content=AuditVerdict(
                intact=found.intact,
                entries=found.entries,
                revision=found.revision,
                broken_entry=found.broken_seq,
                message=str(found),
                notes=found.notes,
            )
        )
