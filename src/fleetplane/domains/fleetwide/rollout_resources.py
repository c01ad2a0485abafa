"""Rollouts as objects of the resource API. Pure, but for what the actions call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetplane.domains.fleetwide.rollout_routes import ROLL_OUT, VERBS, OrderBody
from fleetplane.domains.fleetwide.servers import VIEW
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.fleet.rollouts.records import ROLLOUT, Rollout, status_of
from fleetplane.fleet.rollouts.rollouts import RolloutVerb
from fleetplane.kernel.access import who
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import spelled, spelled_or_null


class RolloutSpecShape(ResourceShape, frozen=True):
    subject: str
    """What is rolled out, such as `proxies.config`."""
    at: str
    """The scope whose targets are moved, as it is stored."""
    to: str
    """The version that targets are moved to."""
    waves: Sequence[str]
    max_failures: str
    on_halt: str
    started_by: str
    reason: str
    supersedes: str | None
    """The rollout that this one ended."""
    automatic: bool
    """Whether a policy started it."""


class RolloutStatusShape(ResourceShape, frozen=True):
    phase: str
    wave: int
    """Counted from 1; 0 before the first has started."""
    targets: int
    counts: Mapping[str, int]
    """Targets by state; at the end each has exactly one outcome."""
    halted: Sequence[str]
    """Why it halted."""
    started_at: str
    ended_at: str | None


def rollout_view(
    rollout: Rollout, _reading: ViewReader
) -> ResourceView[RolloutSpecShape, RolloutStatusShape]:
    """What is shown of a rollout; its targets and history are in `GET /v1/fleet/rollouts/{id}`."""
    spec, status = rollout.spec, status_of(rollout)
    return ResourceView(
        spec=RolloutSpecShape(
            subject=spec.subject,
            at=rollout.scope,
            to=spec.to,
            waves=spec.policy.waves,
            max_failures=spec.policy.max_failures,
            on_halt=spec.policy.on_halt,
            started_by=who(spec.actor),
            reason=spec.reason,
            supersedes=spec.supersedes or None,
            automatic=spec.automatic,
        ),
        status=RolloutStatusShape(
            phase=status.phase,
            wave=status.wave,
            targets=sum(status.counts.values()),
            counts=status.counts,
            halted=[reason.message for reason in status.halt],
            started_at=spelled(spec.started_at_ns),
            ended_at=spelled_or_null(status.ended_at_ns),
        ),
    )


def rollout_place(rollout: AnyResource, _reading: ViewReader) -> str:
    """The tenant that it is in, or the installation: its own scope may be any domain's."""
    parts = rollout.scope.split("/")
    return scopes.tenant_path(parts[1]) if parts[0] == "tenant" and len(parts) > 1 else scopes.ROOT


def _action(verb: str, summary: str) -> ResourceAction:
    async def run(call: ActionCall) -> Begun | None:
        body: OrderBody = call.body if isinstance(call.body, OrderBody) else OrderBody()
        order = RolloutVerb(
            verb=verb,
            actor=call.promise(lambda _: None),
            reason=body.reason,
            targets=tuple(body.targets),
            wave=body.wave,
        )
        rollouts: Any = call.domain.rollouts
        await rollouts.order(call.stored, order)
        return None

    return ResourceAction(
        name=verb, summary=summary, permission=ROLL_OUT, run=run, body=OrderBody, anywhere=True
    )


ROLLOUTS = PublicResource(
    name="rollout",
    plural="rollouts",
    summary="A change of many targets in waves",
    kind=ROLLOUT,
    spec=RolloutSpecShape,
    status=RolloutStatusShape,
    view=rollout_view,
    place=rollout_place,
    permission=VIEW,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SUBJECT", value=".spec.subject"),
        Column(title="TO", value=".spec.to"),
        Column(title="PHASE", value=".status.phase"),
        Column(title="WAVE", value=".status.wave", type="number"),
        Column(title="TARGETS", value=".status.targets", type="number"),
        Column(title="STARTED", value=".status.startedAt", type="age"),
        Column(title="AT", value=".spec.at", wide=True),
        Column(title="BY", value=".spec.startedBy", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN},
    explain="rollout",
    actions=tuple(_action(verb, summary) for verb, summary in VERBS.items()),
    search=(".metadata.name", ".spec.subject", ".spec.startedBy"),
)
