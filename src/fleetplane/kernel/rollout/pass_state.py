"""Where one pass over a rollout stands while it is made: changed records, reasons, what is due. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from fleetplane.kernel.reconcile.explanation import Reason
from fleetplane.kernel.rollout import amounts
from fleetplane.kernel.rollout.facts import RolloutFacts, Select
from fleetplane.kernel.rollout.policy import Policy
from fleetplane.kernel.rollout.states import (
    ACTOR,
    TEXT_LIMIT,
    RolloutPhase,
    RolloutStanding,
    TargetRecord,
    TargetState,
    changed,
    counted,
)
from fleetplane.kernel.values.times import NS

P, T = RolloutPhase, TargetState


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a pass came to."""

    status: RolloutStanding
    changes: Mapping[str, TargetRecord]
    """Records of targets that differ from before."""
    asked: tuple[str, ...] = ()
    """Targets that are asked to take the new version from now on."""
    returned: tuple[str, ...] = ()
    """Targets that are asked to go back."""
    reasons: tuple[Reason, ...] = ()
    """What it waits for; empty once it has ended."""
    look_after_seconds: float | None = None
    """When to look again even if nothing happens."""


@dataclass(slots=True)
class PassState:
    """What one pass has come to so far, and what it asks about its targets."""

    policy: Policy
    to: str
    status: RolloutStanding
    targets: dict[str, TargetRecord]
    facts: RolloutFacts
    now_ns: int
    select: Select
    asked: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    due_ns: int | None = None
    """When to look again at the latest."""

    def decision(self, before: Mapping[str, TargetRecord]) -> Decision:
        counts = counted(self.targets.values())
        if counts != self.status.counts:
            self.status = msgspec.structs.replace(self.status, counts=counts)
        changes = {name: one for name, one in self.targets.items() if before.get(name) is not one}
        after = (self.due_ns - self.now_ns) / NS if self.due_ns is not None else None
        return Decision(
            status=self.status,
            changes=changes,
            asked=tuple(self.asked),
            returned=tuple(self.returned),
            reasons=tuple(self.reasons),
            look_after_seconds=after if after is None else max(0.0, after),
        )

    def wait(self, code: str, message: str, *, until_ns: int | None = None) -> None:
        self.reasons.append(Reason(code=code, message=message[:TEXT_LIMIT]))
        if until_ns is not None:
            self.look_at_ns(until_ns)

    def look_at_ns(self, at_ns: int) -> None:
        """Look again at this time, or before."""
        if self.due_ns is None or at_ns < self.due_ns:
            self.due_ns = at_ns

    def enter(self, phase: RolloutPhase, reason: str) -> None:
        self.status = self.status.entered(phase, actor=ACTOR, reason=reason, now_ns=self.now_ns)

    def set(self, **fields: object) -> None:
        self.status = msgspec.structs.replace(self.status, **fields)

    @property
    def is_last_wave(self) -> bool:
        return self.status.wave >= len(self.policy.waves)

    # Halting and ending.

    def halts(self) -> bool:
        """Halt if more has failed than may."""
        failed = [one for one in self.targets.values() if one.state is T.FAILED and not one.forgiven]
        total, limit = len(self.targets), self.policy.max_failures
        if amounts.exceeds(len(failed), limit, total):
            self.halt("FAILURES", f"{len(failed)} of {total} targets failed, {limit} may{example(failed)}")
            return True
        number = self.status.wave
        wave = sum(one.wave == number for one in self.targets.values()) if number else 0
        here = [one for one in failed if one.wave == number]
        limit = self.policy.max_failures_per_wave
        if wave and amounts.exceeds(len(here), limit, wave):
            self.halt(
                "WAVE_FAILURES",
                f"{len(here)} of {wave} targets of wave {number} failed, {limit} may{example(here)}",
            )
            return True
        return False

    def halt(self, code: str, message: str) -> None:
        reason = Reason(code=code, message=message[:TEXT_LIMIT])
        if self.status.phase is P.HALTED:
            self.set(halt=(*self.status.halt, reason))
            return
        self.set(resume_to=self.status.phase, halt=(reason,))
        self.enter(P.HALTED, message)

    def finish(self, phase: RolloutPhase, reason: str) -> None:
        for name, record in self.targets.items():
            if record.state is T.PENDING:
                self.targets[name] = changed(record, T.NEVER_STARTED)
        self.reasons.clear()
        self.due_ns = None
        self.enter(phase, reason)

    # Asking about targets.

    def order(self) -> list[str]:
        """Targets in the order of the facts, then those that are gone."""
        present = [name for name in self.facts.targets if name in self.targets]
        if len(present) == len(self.targets):
            return present
        return [*present, *(name for name in self.targets if name not in self.facts.targets)]

    def is_in(self, name: str, *states: TargetState) -> bool:
        return self.targets[name].state in states

    def any_in(self, *states: TargetState) -> bool:
        return any(one.state in states for one in self.targets.values())

    def online(self, name: str) -> bool:
        fact = self.facts.targets.get(name)
        return fact is not None and fact.online


def with_fields(record: TargetRecord, **fields: object) -> TargetRecord:
    """The same object where nothing differs, so that nothing is written."""
    for name, value in fields.items():
        if getattr(record, name) != value:
            break
    else:
        return record
    return msgspec.structs.replace(record, **fields)


def example(failed: list[TargetRecord]) -> str:
    return next((f"; for example: {one.error}" for one in failed if one.error), "")


def last_reason(status: RolloutStanding) -> str:
    return status.history[-1].reason if status.history else ""
