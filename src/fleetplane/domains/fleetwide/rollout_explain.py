"""Why a rollout is where it is: what it waits for, why it halted, and which targets failed."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.fleet.explain import from_pass, from_record, placed
from fleetplane.fleet.rollouts.records import status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.reconcile.explanation import Finding, Reason
from fleetplane.kernel.rollout.states import ENDED, RolloutPhase

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
