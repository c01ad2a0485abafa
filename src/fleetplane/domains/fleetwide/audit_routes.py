"""`POST /v1/fleet/audit/verify`: have the server check its audit log, as `fleetplane audit verify` does.

The chain is recomputed under the server's key, in a thread, one question at a time. It is the server's own
word: what finds a server that lies is a checkpoint that was kept elsewhere, checked with files of a backup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from fleetplane.domains.fleetwide.resources import AUDIT
from fleetplane.kernel.access import EVERYWHERE
from fleetplane.kernel.audit.chain import ChainVerdict
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.rpc import Needs
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.routes import Answer, Call, Route, RouteGroup

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
