"""`fleetplane.fleet.v1.RolloutAdmin`: rollouts of every domain, for the owner of the server's socket."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from fleetplane.fleet.rollouts import views
from fleetplane.fleet.rollouts.records import PolicySpec
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.gen.fleetplane.fleet.v1 import rollouts_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.rpc import CallContext

M = TypeVar("M", bound=Message)
NEWEST = "newest"


class RolloutService:
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def ListSubjects(
        self, _request: pb.ListSubjectsRequest, _context: CallContext
    ) -> pb.ListSubjectsResponse:
        found = [views.subject(one) for _, one in sorted(self._rollouts.subjects.items())]
        return _told(views.RolloutSubjects(subjects=found), pb.ListSubjectsResponse())

    async def StartRollout(self, request: pb.StartRolloutRequest, context: CallContext) -> pb.RolloutView:
        made = await self._rollouts.start(_start(request, context))
        return _told(views.brief(made), pb.RolloutView())

    async def PlanRollout(self, request: pb.StartRolloutRequest, context: CallContext) -> pb.RolloutPlan:
        found = await self._rollouts.plan(_start(request, context))
        return _told(views.planned(found), pb.RolloutPlan())

    async def GetRollout(self, request: pb.GetRolloutRequest, _context: CallContext) -> pb.RolloutView:
        found = self._rollouts.book.get(request.id)
        return _told(views.whole(self._rollouts, found), pb.RolloutView())

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, _context: CallContext
    ) -> pb.ListRolloutsResponse:
        found = self._rollouts.book.list(request.scope, request.subject)
        return _told(
            views.RolloutList(rollouts=[views.brief(one) for one in found]), pb.ListRolloutsResponse()
        )

    async def OrderRollout(self, request: pb.OrderRolloutRequest, context: CallContext) -> pb.RolloutView:
        rollout = self._rollouts.book.get(request.id)
        verb = RolloutVerb(
            verb=request.verb,
            actor=context.principal.name,
            reason=request.reason,
            targets=tuple(request.targets),
            wave=request.wave,
        )
        return _told(views.brief(await self._rollouts.order(rollout, verb)), pb.RolloutView())

    async def SetRolloutPolicy(
        self, request: pb.SetRolloutPolicyRequest, context: CallContext
    ) -> pb.RolloutPolicyView:
        spec = PolicySpec(
            policy=read_policy(_fields(request.policy)),
            automatic=not request.manual,
            supersedes=request.supersedes,
            actor=context.principal.name,
        )
        made = await self._rollouts.set_policy(
            request.subject, request.scope, spec, actor=context.principal.name
        )
        return _told(views.policy(made), pb.RolloutPolicyView())

    async def RemoveRolloutPolicy(
        self, request: pb.RemoveRolloutPolicyRequest, context: CallContext
    ) -> pb.RemoveRolloutPolicyResponse:
        await self._rollouts.remove_policy(request.subject, request.scope, actor=context.principal.name)
        return pb.RemoveRolloutPolicyResponse()

    async def ListRolloutPolicies(
        self, _request: pb.ListRolloutPoliciesRequest, _context: CallContext
    ) -> pb.ListRolloutPoliciesResponse:
        found = [views.policy(one) for one in self._rollouts.policies()]
        return _told(views.RolloutPolicies(policies=found), pb.ListRolloutPoliciesResponse())


def read_policy(fields: Any) -> Policy:
    """A policy from what a caller sent; what is not given has its default."""
    try:
        return msgspec.convert(fields, Policy)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error), field="policy") from None


def _start(request: pb.StartRolloutRequest, context: CallContext) -> Start:
    return Start(
        subject=request.subject,
        scope=request.scope,
        to=request.to or NEWEST,
        policy=read_policy(_fields(request.policy)) if request.HasField("policy") else None,
        actor=context.principal.name,
        reason=request.reason,
        supersede=request.supersede,
    )


def _fields(message: Message) -> dict[str, Any]:
    """What is set in a message, by the names of its fields."""
    return dict(MessageToDict(message, preserving_proto_field_name=True))


def _told(view: msgspec.Struct, message: M) -> M:
    """A view as the message of the same shape."""
    ParseDict(msgspec.to_builtins(view), message)
    return message
