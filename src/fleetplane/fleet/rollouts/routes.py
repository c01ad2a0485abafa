"""REST: rollouts of every domain, for operators with a token of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec

from fleetplane.fleet.resources.common import VIEW
from fleetplane.fleet.rollouts import views
from fleetplane.fleet.rollouts.records import PolicySpec, Rollout
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.kernel.access import Permission, covers
from fleetplane.kernel.errors import NotFound
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.routes import Answer, Call, Query, Route, RouteGroup

ROLL_OUT = Permission("fleet.roll_out")
_ROUTES = RouteGroup("Rollouts")
_ONE = "/rollouts/{rollout_id}"
_SCOPE = Query(name="scope", summary="At or below which; everywhere that the caller may see when not given")


class StartBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    subject: str
    scope: str
    to: str = "newest"
    policy: Policy | None = None
    """That of the scope when not given."""
    reason: str = ""
    supersede: bool = False
    """End a rollout of the same subject and scope that is under way."""


class OrderBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    reason: str = ""
    targets: list[str] = []
    """For retry and skip, by id or name."""
    wave: int = 0
    """For approve; the next one when 0."""


class PolicyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    subject: str
    scope: str
    policy: Policy
    manual: bool = False
    """Whether a new version waits until somebody starts its rollout."""
    supersedes: bool = False


class ObjectNamed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kind: str
    scope: str
    name: str


class HoldersBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    objects: Annotated[list[ObjectNamed], msgspec.Meta(max_length=10_000)]


RolloutCall = Call[OperatorCaller]


class RolloutRoutes:
    def __init__(self, rollouts: Rollouts, gate: RoleGate[OperatorCaller]) -> None:
        self._rollouts = rollouts
        self._gate = gate

    def routes(self) -> Sequence[Route]:
        """Every route of rollouts."""
        return (*self._reading(), *self._starting(), *self._policies())

    def _reading(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/rollout-subjects", self.subjects, VIEW),
            _ROUTES.get(
                "/rollouts",
                self.list,
                VIEW,
                query=(_SCOPE, Query(name="subject", summary="Only those of one subject")),
            ),
            _ROUTES.get(_ONE, self.get, VIEW),
        )

    def _starting(self) -> Sequence[Route]:
        return (
            _ROUTES.post(
                "/rollouts", self.start, ROLL_OUT, body=StartBody, status=201, recheck=self._check_body
            ),
            _ROUTES.post("/rollout-plans", self.plan, ROLL_OUT, body=StartBody, recheck=self._check_body),
            *(
                _ROUTES.post(
                    f"{_ONE}/{verb}",
                    getattr(self, verb),
                    ROLL_OUT,
                    summary=summary,
                    body=OrderBody,
                    body_optional=True,
                    answer=views.RolloutView,
                    recheck=self._check_order,
                )
                for verb, summary in VERBS.items()
            ),
        )

    def _policies(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/rollout-policies", self.policies, VIEW),
            _ROUTES.put("/rollout-policies", self.set_policy, ROLL_OUT, body=PolicyBody),
            _ROUTES.post("/rollout-holders", self.holders, VIEW, body=HoldersBody),
            _ROUTES.delete(
                "/rollout-policies",
                self.remove_policy,
                ROLL_OUT,
                status=204,
                query=(
                    Query(name="subject", summary="Whose policy"),
                    Query(name="scope", summary="The policy's own scope; everywhere when not given"),
                ),
            ),
        )

    # Reading.

    async def subjects(self, _call: RolloutCall) -> Answer[views.RolloutSubjects]:
        """List what can be rolled out here, and what gates can ask for."""
        found = [views.subject(one) for _, one in sorted(self._rollouts.subjects.items())]
        return Answer(content=views.RolloutSubjects(subjects=found))

    async def list(self, call: RolloutCall) -> Answer[views.RolloutList]:
        """List rollouts, newest first."""
        within = call.query.get("scope", "")
        if within:
            self._gate.check(call.caller, VIEW, within)
        seen = self._gate.scopes(call.caller, VIEW)
        found = [
            one
            for one in self._rollouts.book.list(within, call.query.get("subject", ""))
            if any(covers(at, one.scope) for at in seen)
        ]
        return Answer(content=views.RolloutList(rollouts=[views.brief(one) for one in found]))

    async def get(self, call: RolloutCall) -> Answer[views.RolloutView]:
        """Get a rollout with its targets, its history and what it waits for."""
        return Answer(content=views.whole(self._rollouts, self._named(call)))

    def _named(self, call: RolloutCall) -> Rollout:
        """Of those that the caller may see: a beginning of an id must not find another tenant's."""
        return self._rollouts.book.get(call.path["rollout_id"], self._gate.scopes(call.caller, VIEW))

    # Starting and ordering.

    def _check_body(self, call: RolloutCall) -> None:
        """Rights at the scope that is meant, however it was written."""
        self._meant(call, self._rollouts.subject(call.body.subject).scope, call.body.scope)

    def _meant(self, call: RolloutCall, resolve: Callable[[str], str], text: str) -> str:
        """The scope that a caller means and may roll out at; what is there elsewhere is not told."""
        try:
            scope = resolve(text)
        except NotFound:
            self._gate.check(call.caller, ROLL_OUT, text)
            raise
        self._gate.check(call.caller, ROLL_OUT, scope)
        return scope

    def _check_order(self, call: RolloutCall) -> None:
        self._gate.check(call.caller, ROLL_OUT, self._named(call).scope)

    def _wanted(self, call: RolloutCall) -> Start:
        body: StartBody = call.body
        self._check_body(call)
        return Start(
            subject=body.subject,
            scope=body.scope,
            to=body.to,
            policy=body.policy,
            actor=call.signed(call.caller.name),
            reason=body.reason,
            supersede=body.supersede,
        )

    async def start(self, call: RolloutCall) -> Answer[views.RolloutView]:
        """Start a rollout."""
        wanted = self._wanted(call)
        view = call.answering(lambda made: Answer(content=views.brief(made)))
        return view(await self._rollouts.start(wanted))

    async def plan(self, call: RolloutCall) -> Answer[views.RolloutPlan]:
        """Tell which targets would be in which wave, without starting anything."""
        return Answer(content=views.planned(await self._rollouts.plan(self._wanted(call))))

    async def pause(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "pause")

    async def resume(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "resume")

    async def retry(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "retry")

    async def skip(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "skip")

    async def abort(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "abort")

    async def undo(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "undo")

    async def approve(self, call: RolloutCall) -> Answer[views.RolloutView]:
        return await self._order(call, "approve")

    async def _order(self, call: RolloutCall, verb: str) -> Answer[views.RolloutView]:
        body: OrderBody = call.body if isinstance(call.body, OrderBody) else OrderBody()
        rollout = self._named(call)
        self._check_order(call)
        view = call.answering(lambda made: Answer(content=views.brief(made)))
        ordered = RolloutVerb(
            verb=verb,
            actor=call.signed(call.caller.name),
            reason=body.reason,
            targets=body.targets,
            wave=body.wave,
        )
        return view(await self._rollouts.order(rollout, ordered))

    # Policies.

    async def policies(self, call: RolloutCall) -> Answer[views.RolloutPolicies]:
        """List policies that make every new version a rollout."""
        seen = self._gate.scopes(call.caller, VIEW)
        found = [
            views.policy(one)
            for one in self._rollouts.policies()
            if any(covers(at, one.scope) for at in seen)
        ]
        return Answer(content=views.RolloutPolicies(policies=found))

    async def holders(self, call: RolloutCall) -> Answer[views.RolloutHolders]:
        """Find the subjects and scopes of which objects of the resource API are part."""
        body: HoldersBody = call.body
        seen = self._gate.scopes(call.caller, VIEW)
        found = list(self._rollouts.holders((one.kind, one.scope, one.name) for one in body.objects))
        shown = [
            views.RolloutHolder(subject=subject, scope=scope)
            for subject, scope in found
            if any(covers(at, scope) for at in seen)
        ]
        return Answer(content=views.RolloutHolders(holders=shown, hidden=len(found) - len(shown)))

    async def set_policy(self, call: RolloutCall) -> Answer[views.RolloutPolicyView]:
        """Make every new version at and below a scope a rollout."""
        body: PolicyBody = call.body
        scope = self._meant(call, partial(self._rollouts.policy_scope, body.subject), body.scope)
        spec = PolicySpec(
            policy=body.policy,
            automatic=not body.manual,
            supersedes=body.supersedes,
            actor=call.caller.name,
        )
        made = await self._rollouts.set_policy(body.subject, scope, spec, actor=call.caller.name)
        return Answer(content=views.policy(made))

    async def remove_policy(self, call: RolloutCall) -> Answer[None]:
        """Let new versions go to everyone at once again."""
        scope = call.query.get("scope", "")
        self._gate.check(call.caller, ROLL_OUT, scope)
        await self._rollouts.remove_policy(call.query.get("subject", ""), scope, actor=call.caller.name)
        return Answer(content=None)


VERBS = {
    "pause": "Start nothing more until it is resumed",
    "resume": "Go on after a pause, or after a halt in spite of what has failed",
    "retry": "Ask targets that failed, or were not reached, once more",
    "skip": "Leave targets out",
    "abort": "End it: what has moved stays, the rest is never started",
    "undo": "Bring everything that has moved back to the version that it had",
    "approve": "Let a wave start that needs an approval",
}
