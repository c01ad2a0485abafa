"""Rollouts in the resource API, their explanation, and their Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.explain import from_pass, from_record, placed
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.common import VIEW
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
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb
from fleetplane.fleet.rollouts.routes import ROLL_OUT, VERBS, OrderBody
from fleetplane.fleet.rollouts.rules.states import ENDED, OUTCOMES, RolloutPhase
from fleetplane.kernel.access import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.reconcile.explanation import Finding, Reason
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import spelled, spelled_or_null

PREFIX = "fleetplane_rollout"


class RolloutCollector(Collector):
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        found = Counter(status_of(one).phase for one in self._rollouts.book.unfinished())
        gauge = GaugeMetricFamily(
            f"{PREFIX}s_open", "Rollouts that have not ended, by phase", labels=["phase"]
        )
        for phase in RolloutPhase:
            if phase not in ENDED:
                gauge.add_metric([phase], found[phase])
        yield gauge
        outcomes = CounterMetricFamily(
            f"{PREFIX}_targets", "Targets of rollouts that ended, by outcome", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            outcomes.add_metric([outcome], self._rollouts.driver.outcomes[outcome])
        yield outcomes
        halts = CounterMetricFamily(f"{PREFIX}_halts", "Halts of rollouts, by their cause", labels=["cause"])
        for cause, number in sorted(self._rollouts.driver.halts.items()):
            halts.add_metric([cause], number)
        yield halts


TARGETS_LIMIT = 10
"""Targets that are named with what is wrong with them."""
UNSETTLED = ENDED - {RolloutPhase.DONE}


class RolloutExplainer:
    def __init__(self, rollouts: Rollouts, clock: Clock) -> None:
        self._rollouts = rollouts
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        try:
            found = self._rollouts.book.get(name, (within,))
        except NotFound:
            return placed("rollout", name, None, within)
        return found.scope

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        rollout = self._rollouts.book.get(name, (scope,))
        status = status_of(rollout)
        reasons = list(status.halt)
        if status.history and (status.phase in UNSETTLED or status.phase is RolloutPhase.PAUSED):
            last = status.history[-1]
            said = f": {last.reason}" if last.reason else ""
            message = f"it is {status.phase.value}, by {last.actor}{said}"
            reasons.append(Reason(code=status.phase.value.upper(), message=message))
        failing = [
            (one.spec.title or one.name, one.status.error)
            for one in self._rollouts.targets(rollout)
            if one.status is not None and one.status.error
        ]
        for title, error in sorted(failing)[:TARGETS_LIMIT]:
            reasons.append(Reason(code="TARGET", message=f"{title}: {error}", subject=f"target/{title}"))
        if len(failing) > TARGETS_LIMIT:
            more = f"{len(failing) - TARGETS_LIMIT} more targets have errors"
            reasons.append(Reason(code="TARGETS", message=more))
        found = None if status.phase in ENDED else self._rollouts.explain(rollout)
        return (*from_pass("rollouts", found), *from_record(self._clock, rollout.name, reasons))


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
