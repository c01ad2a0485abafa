"""The states of a rollout and of its targets, and the facts that a pass is given. Pure.

    planned -> waiting -> moving -> soaking -> waiting (for the next wave) ... -> done
    any of these -> paused -> back
    any of these -> halted -> rolling_back -> rolled_back, or resumed, or aborting -> aborted

Nothing leaves `done`, `aborted` or `rolled_back` but an undo of the first two; `superseded` is final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from fleetplane.fleet.rollouts.rules.policy import Gate
from fleetplane.kernel.reconcile.explanation import Reason


class TargetFact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One target as its domain knows it now."""

    version: str
    """What it has confirmed; empty if nothing is known."""
    online: bool
    healthy: bool
    labels: Mapping[str, str] = {}
    error: str = ""
    """Why it did not take the version that it was last asked for."""
    error_at_ns: int = 0
    error_version: str = ""
    """The version that the error is about; any if empty."""
    title: str = ""
    """Its name for people, if it has another."""


class GateMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """A gate's measurement; None where there is no data."""

    value: float | None = None
    baseline: float | None = None
    """Of the same targets, before the rollout."""
    problem: str = ""
    """Why there is no data, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    targets: Mapping[str, TargetFact]
    """In the order in which they take their turns."""
    gates: Mapping[str, GateMeasurement] = field(default_factory=dict)
    frozen: str = ""
    """Who froze this and why; empty if nobody did."""
    observing_since_ns: int = 0
    """Since when this server has been looking: nobody is late for what it could not see."""


Select = Callable[[str, Mapping[str, str]], bool]
"""Whether a selector matches labels."""


def has_data(gate: Gate, reading: GateMeasurement | None) -> bool:
    """Whether a gate can be evaluated at all."""
    if reading is None or reading.value is None:
        return False
    return gate.max_increase is None or reading.baseline is not None


def breach(gate: Gate, reading: GateMeasurement | None) -> str:
    """Why a gate is not passed; empty if it is."""
    if reading is None or reading.value is None:
        why = f" ({reading.problem})" if reading is not None and reading.problem else ""
        return f"gate {gate.name}: there is no data for {gate.query[:200]}{why}"
    value = reading.value
    if gate.max is not None and value > gate.max:
        return f"gate {gate.name}: {gate.query} is {value:.4g}, more than {gate.max:g}"
    if gate.min is not None and value < gate.min:
        return f"gate {gate.name}: {gate.query} is {value:.4g}, less than {gate.min:g}"
    if gate.max_increase is not None:
        if reading.baseline is None:
            return f"gate {gate.name}: there is no data for {gate.query} of before the rollout"
        if value - reading.baseline > gate.max_increase:
            return (
                f"gate {gate.name}: {gate.query} is {value:.4g}, before it was {reading.baseline:.4g}; "
                f"it may be at most {gate.max_increase:g} more"
            )
    return ""


ACTOR = "system/rollouts"
"""Who does what rollouts do by themselves."""
HISTORY_LIMIT = 200
"""Transitions kept, the latest ones: those of fifty waves with a pause in each."""
TEXT_LIMIT = 500
"""Characters of an error or a reason that is kept."""


class RolloutPhase(StrEnum):
    PLANNED = "planned"
    WAITING = "waiting"
    """For the window or the approval of the next wave."""
    MOVING = "moving"
    SOAKING = "soaking"
    PAUSED = "paused"
    HALTED = "halted"
    ROLLING_BACK = "rolling_back"
    ABORTING = "aborting"
    """Nothing starts any more; what is in flight ends."""
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


P = RolloutPhase
ENDED = frozenset({P.DONE, P.ROLLED_BACK, P.ABORTED, P.SUPERSEDED})
FORWARD = frozenset({P.PLANNED, P.WAITING, P.MOVING, P.SOAKING})
_STOPPED = frozenset({P.PAUSED, P.HALTED, P.ROLLING_BACK, P.ABORTING, P.SUPERSEDED})
TRANSITIONS: Mapping[RolloutPhase, frozenset[RolloutPhase]] = {
    P.PLANNED: frozenset({P.WAITING}) | _STOPPED,
    P.WAITING: frozenset({P.MOVING, P.DONE}) | _STOPPED,
    P.MOVING: frozenset({P.SOAKING}) | _STOPPED,
    P.SOAKING: frozenset({P.WAITING, P.MOVING, P.DONE}) | _STOPPED,
    P.PAUSED: FORWARD | {P.ROLLING_BACK, P.ABORTING, P.SUPERSEDED},
    P.HALTED: frozenset({P.MOVING, P.SOAKING, P.WAITING, P.ROLLING_BACK, P.ABORTING, P.SUPERSEDED}),
    P.ROLLING_BACK: frozenset({P.ROLLED_BACK, P.PAUSED, P.HALTED, P.ABORTING, P.SUPERSEDED}),
    P.ABORTING: frozenset({P.ABORTED, P.SUPERSEDED}),
    P.DONE: frozenset({P.ROLLING_BACK}),
    P.ABORTED: frozenset({P.ROLLING_BACK}),
    P.ROLLED_BACK: frozenset(),
    P.SUPERSEDED: frozenset(),
}


class TargetState(StrEnum):
    """The last seven are outcomes: at the end of a rollout every target has exactly one."""

    PENDING = "pending"
    MOVING = "moving"
    RETURNING = "returning"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    NOT_DELIVERED = "not_delivered"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    NEVER_STARTED = "never_started"


T = TargetState
OUTCOMES = tuple(T)[3:]
TARGET_TRANSITIONS: Mapping[TargetState, frozenset[TargetState]] = {
    T.PENDING: frozenset({T.MOVING, T.NOT_DELIVERED, T.SKIPPED, T.SUPERSEDED, T.NEVER_STARTED}),
    T.MOVING: frozenset({T.CONFIRMED, T.FAILED, T.NOT_DELIVERED, T.SKIPPED, T.SUPERSEDED, T.RETURNING}),
    T.CONFIRMED: frozenset({T.FAILED, T.RETURNING}),
    T.FAILED: frozenset({T.PENDING, T.SKIPPED, T.RETURNING}),
    T.NOT_DELIVERED: frozenset({T.PENDING, T.SKIPPED, T.RETURNING}),
    T.SKIPPED: frozenset({T.RETURNING}),
    T.RETURNING: frozenset({T.ROLLED_BACK, T.FAILED, T.NOT_DELIVERED, T.SKIPPED, T.SUPERSEDED}),
    T.ROLLED_BACK: frozenset(),
    T.SUPERSEDED: frozenset(),
    T.NEVER_STARTED: frozenset(),
}


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is kept of one target of one rollout."""

    state: TargetState = T.PENDING
    wave: int = 0
    """Counted from 1; 0 before its wave has started."""
    turn_at_ns: int = 0
    """When its wave started."""
    before: str = ""
    """The version that it had, and goes back to; empty if none was known."""
    moved: bool = False
    """Whether it was ever asked to take the new version."""
    asked_at_ns: int = 0
    """When it was last asked, for either version."""
    reachable_since_ns: int = 0
    """Since when it has been connected while it was asked; 0 while it is not."""
    was_healthy: bool = False
    """Before it was asked: what was ill before has not failed because of the rollout."""
    unhealthy_since_ns: int = 0
    error: str = ""
    attempts: int = 0
    late: bool = False
    """Whether it came after the start."""
    forgiven: bool = False
    """Whether somebody resumed the rollout in spite of this failure."""
    stuck: bool = False
    """Whether it was asked to go back and did not."""


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    wave: int
    actor: str
    at_ns: int


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    at_ns: int
    before: RolloutPhase
    after: RolloutPhase
    actor: str
    reason: str


class RolloutStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout stands. With its targets' records this is all of it: any server can go on."""

    phase: RolloutPhase = P.PLANNED
    resume_to: RolloutPhase | None = None
    """Where a pause, or a halt, goes on."""
    wave: int = 0
    """The wave that is under way, counted from 1; 0 before the first."""
    wave_started_at_ns: int = 0
    soak_started_at_ns: int = 0
    """When the wave's soak was entered, for `max_soak_seconds`."""
    soak_since_ns: int = 0
    """Since when everything has held; 0 while something does not."""
    last_frozen_ns: int = 0
    """When a freeze was last seen: targets are given their time anew after it."""
    approvals: tuple[Approval, ...] = ()
    halt: tuple[Reason, ...] = ()
    """Why it halted; kept until it is resumed."""
    counts: dict[str, int] = {}
    """Targets by state."""
    history: tuple[Transition, ...] = ()
    ended_at_ns: int | None = None

    def entered(self, phase: RolloutPhase, *, actor: str, reason: str, now_ns: int) -> RolloutStanding:
        """The status after a transition of the table."""
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        made = Transition(
            at_ns=now_ns, before=self.phase, after=phase, actor=actor, reason=reason[:TEXT_LIMIT]
        )
        return msgspec.structs.replace(
            self,
            phase=phase,
            history=(*self.history, made)[-HISTORY_LIMIT:],
            ended_at_ns=now_ns if phase in ENDED else None,
        )


def counted(targets: Iterable[TargetRecord]) -> dict[str, int]:
    """How many targets are in which state; states without any are left out."""
    return {state.value: number for state, number in sorted(Counter(one.state for one in targets).items())}


def changed(record: TargetRecord, state: TargetState, **fields: object) -> TargetRecord:
    """A target's record after a transition of its table."""
    assert state in TARGET_TRANSITIONS[record.state], f"{record.state} -> {state}"
    return msgspec.structs.replace(record, state=state, **fields)
