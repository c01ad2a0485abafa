"""`fleetplane.fleet.v1.FleetAdmin`: explain and freeze, for the owner of the server's socket."""

from __future__ import annotations

from fleetplane.fleet.explain import Explained, FleetExplanations
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.gen.fleetplane.fleet.v1 import fleet_pb2 as pb
from fleetplane.kernel.freeze import Freeze
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext


class FleetService:
    def __init__(self, explanations: FleetExplanations, switch: FreezeSwitch) -> None:
        self._explanations = explanations
        self._switch = switch

    async def Explain(self, request: pb.ExplainRequest, _context: CallContext) -> pb.Explained:
        found = self._explanations.for_owner(request.domain, request.kind, request.name, scope=request.scope)
        return _explained(found)

    async def Describe(self, _request: pb.DescribeRequest, _context: CallContext) -> pb.DescribeResponse:
        answer = pb.DescribeResponse()
        freezable = self._switch.freezable
        for name in sorted({*self._explanations.domains, *freezable}):
            entry = answer.domains.add(name=name)
            explained = self._explanations.domains.get(name)
            for word, (kind, _) in sorted(explained.kinds.items() if explained is not None else ()):
                entry.kinds.add(name=word, summary=kind.summary)
            if name in freezable:
                entry.freeze_stops = freezable[name].stops
                entry.freeze_scopes.extend(freezable[name].scopes)
        return answer

    async def Freeze(self, request: pb.FreezeRequest, context: CallContext) -> pb.ListFreezesResponse:
        made = await self._switch.freeze(
            request.scope,
            domains=request.domains,
            reason=request.reason,
            actor=context.principal.name,
            expires_at_ns=request.expires_at.ToNanoseconds() if request.HasField("expires_at") else None,
        )
        return pb.ListFreezesResponse(freezes=[_freeze(one) for one in made])

    async def Lift(self, request: pb.LiftRequest, context: CallContext) -> pb.LiftResponse:
        done = await self._switch.lift(request.scope, domains=request.domains, actor=context.principal.name)
        return pb.LiftResponse(lifted=done)

    async def ListFreezes(
        self, _request: pb.ListFreezesRequest, _context: CallContext
    ) -> pb.ListFreezesResponse:
        return pb.ListFreezesResponse(freezes=[_freeze(one) for one in self._switch.freezes.listed()])


def _explained(found: Explained) -> pb.Explained:
    answer = pb.Explained(domain=found.domain, kind=found.kind, scope=found.scope, name=found.name)
    if found.frozen is not None:
        answer.frozen.CopyFrom(_freeze(found.frozen))
    answer.findings.extend(_finding(one) for one in found.findings)
    return answer


def _finding(found: Finding) -> pb.Finding:
    explanation = found.explanation
    return pb.Finding(
        controller=found.controller,
        at=timestamp(explanation.at_ns),
        next_due=timestamp(explanation.next_due_ns),
        failures=explanation.failures,
        last_error=explanation.last_error,
        reasons=[
            pb.Reason(code=one.code, message=one.message, subject=one.subject) for one in explanation.reasons
        ],
    )


def _freeze(found: Freeze) -> pb.FreezeEntry:
    spec = found.spec
    return pb.FreezeEntry(
        scope=found.scope,
        domains=spec.domains,
        reason=spec.reason,
        actor=spec.actor,
        frozen_at=timestamp(spec.frozen_at_ns),
        expires_at=timestamp(spec.expires_at_ns),
    )
