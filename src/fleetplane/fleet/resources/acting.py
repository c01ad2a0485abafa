"""Actions on objects, and explanations of them: what the routes do beside reading.

An action is the domain's own function. Who may ask for it is checked at the scope of the object, which the
caller must be able to read. Freezing is an action of every object at which something can be frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fleetplane.fleet.explain import Explained, FleetExplanations
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import FoundObject
from fleetplane.fleet.resources.declaration import ActionCall, Begun, ResourceAction, ResourceShape
from fleetplane.fleet.resources.objects import ObjectReference
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import Freeze
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest import bodies
from fleetplane.web.rest.routes import Answer, Call

FREEZE = Permission("fleet.freeze")


class ActionAnswer(ResourceShape, frozen=True):
    """What an action did."""

    kind: str
    action: str
    object: ObjectReference
    begun: ObjectReference | None
    """What to watch until it is done; null if it is done."""


class ExplainedReason(ResourceShape, frozen=True):
    code: str
    message: str
    subject: str


class ExplainedFinding(ResourceShape, frozen=True):
    """What one controller found the last time it looked."""

    controller: str
    """Who noted it; `record` for what follows from the record and the open connection."""
    since: str
    next_due: str | None
    """When it looks again."""
    failures: int
    last_error: str
    reasons: Sequence[ExplainedReason]


class ExplainedFreeze(ResourceShape, frozen=True):
    scope: str
    reason: str
    frozen_by: str
    frozen_at: str
    expires_at: str | None


class ObjectExplanation(ResourceShape, frozen=True):
    """Why an object is as it is."""

    kind: str
    object: ObjectReference
    frozen: ExplainedFreeze | None
    findings: Sequence[ExplainedFinding]
    """Empty if nothing is known to be in the way."""


def reference(found: FoundObject) -> ObjectReference:
    """Which object was found."""
    return ObjectReference(
        resource=found.member.resource.plural,
        name=found.called.name,
        scope=found.called.scope,
        uid=found.stored.uid,
    )


async def act(
    name: str,
    found: FoundObject,
    body: msgspec.Struct | None,
    *,
    request: Call[Any],
    sight: Sight,
    switch: FreezeSwitch,
) -> Answer[ActionAnswer]:
    """Carry an action out; raises `NotFound`, `PermissionDenied`, or what the domain says."""
    scope = found.called.scope
    action = next((one for one in found.member.resource.actions if one.name == name), None)
    if action is None:
        raise NotFound(f"{found.called.name} has no action {name!r}")
    sight.check_do(action.permission, scope)

    def answer(begun: Begun | None) -> Answer[ActionAnswer]:
        to_watch = None
        if begun is not None:
            to_watch = ObjectReference(resource=begun.resource, name=begun.name, scope=begun.scope)
        return Answer(
            content=ActionAnswer(kind="action", action=name, object=reference(found), begun=to_watch)
        )

    def promise(begins: Callable[[Any], Begun | None]) -> str:
        request.answering(lambda value: answer(begins(value)))
        return request.signed(sight.caller_name)

    call = ActionCall(
        domain=found.member.running,
        stored=found.stored,
        scope=scope,
        body=body,
        actor=sight.caller_name,
        may=lambda permission: sight.may(permission, scope),
        switch=switch,
        promise=promise,
    )
    return answer(await action.run(call))


def explained(found: FoundObject, explanations: FleetExplanations) -> ObjectExplanation:
    """Why an object that the caller may read is as it is."""
    member, stored = found.member, found.stored
    told = explanations.for_owner(member.domain, member.resource.explain, stored.name, scope=stored.scope)
    return _shown(found, told)


def _shown(found: FoundObject, told: Explained) -> ObjectExplanation:
    return ObjectExplanation(
        kind="explanation",
        object=reference(found),
        frozen=None if told.frozen is None else _freeze(told.frozen),
        findings=[_finding(one) for one in told.findings],
    )


def _finding(found: Finding) -> ExplainedFinding:
    explanation = found.explanation
    return ExplainedFinding(
        controller=found.controller,
        since=spelled(explanation.at_ns),
        next_due=spelled_or_null(explanation.next_due_ns),
        failures=explanation.failures,
        last_error=explanation.last_error,
        reasons=[
            ExplainedReason(code=one.code, message=one.message, subject=one.subject)
            for one in explanation.reasons
        ],
    )


def _freeze(found: Freeze) -> ExplainedFreeze:
    spec = found.spec
    return ExplainedFreeze(
        scope=found.scope,
        reason=spec.reason,
        frozen_by=spec.actor,
        frozen_at=spelled(spec.frozen_at_ns),
        expires_at=spelled_or_null(spec.expires_at_ns),
    )


# Freezing.


class FreezeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    reason: str
    expires_at: str | None = None
    """When it ends by itself; null: only by being lifted."""


def freeze_actions(domain: str, at: Callable[[AnyResource], str]) -> tuple[ResourceAction, ResourceAction]:
    """Freeze and lift what a domain does by itself at and below an object; `at` is its stored scope."""

    async def freeze(call: ActionCall) -> Begun | None:
        body: FreezeBody = call.body
        expires_at_ns = None
        if body.expires_at is not None:
            expires_at_ns = bodies.parsed(body.expires_at, field="expiresAt")
        await call.switch.freeze(
            at(call.stored),
            domains=(domain,),
            reason=body.reason,
            actor=call.actor,
            expires_at_ns=expires_at_ns,
        )
        return None

    async def lift(call: ActionCall) -> Begun | None:
        if not await call.switch.lift(at(call.stored), domains=(domain,), actor=call.actor):
            raise NotFound("there is no freeze of this very object")
        return None

    return (
        ResourceAction(
            name="freeze",
            summary="Stop what controllers do to it by themselves",
            permission=FREEZE,
            run=freeze,
            body=FreezeBody,
            anywhere=True,
        ),
        ResourceAction(
            name="lift", summary="Let controllers go on", permission=FREEZE, run=lift, anywhere=True
        ),
    )
