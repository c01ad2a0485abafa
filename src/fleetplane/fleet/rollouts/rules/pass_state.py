"""The state of one pass over a rollout, and how facts about targets change their records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from fleetplane.fleet.rollouts.rules import amounts
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import (
    ACTOR,
    FORWARD,
    TEXT_LIMIT,
    RolloutFacts,
    RolloutPhase,
    RolloutStanding,
    Select,
    TargetFact,
    TargetRecord,
    TargetState,
    changed,
    counted,
)
from fleetplane.kernel.reconcile.explanation import Reason
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


RETURN_SECONDS = 60.0
"""How long agents have to come back to a server that was started."""


class OutcomeObserving(PassState):
    """The part of a pass that writes down what became of targets."""

    __slots__ = ()

    def observe(self) -> None:
        self._admit_latecomers()
        facts = self.facts.targets
        for name, record in self.targets.items():
            fact = facts.get(name)
            if fact is None:
                if record.state in (T.PENDING, T.MOVING, T.RETURNING):
                    self.targets[name] = changed(record, T.SKIPPED, error="the target is gone")
                continue
            match record.state:
                case T.MOVING | T.RETURNING:
                    self.targets[name] = self._asked_target(record, fact)
                case T.CONFIRMED:
                    self.targets[name] = self._confirmed_target(record, fact)
                case T.PENDING if record.wave and not fact.online:
                    self._undelivered(name, record)
                case _:
                    pass

    def _admit_latecomers(self) -> None:
        phase = self.status.resume_to if self.status.phase is P.PAUSED else self.status.phase
        if phase not in FORWARD or (self.is_last_wave and phase is P.SOAKING):
            return  # those who come now get what everybody has when it ends
        for name, fact in self.facts.targets.items():
            if name not in self.targets and fact.version != self.to:
                wave = self.status.wave if self.is_last_wave else 0
                self.targets[name] = TargetRecord(
                    before=fact.version, late=True, wave=wave, turn_at_ns=self.now_ns
                )

    def _base_ns(self, record: TargetRecord) -> int:
        """Since when a target has had the chance to do what it was asked."""
        return max(
            record.asked_at_ns,
            record.reachable_since_ns,
            self.status.last_frozen_ns,
            self.facts.observing_since_ns,
        )

    def _deliver_by_ns(self, since_ns: int) -> int:
        """Until when a target that is not connected is waited for.

        After a start of the server nobody is connected yet: then a while longer.
        """
        due_ns = max(since_ns, self.status.last_frozen_ns) + round(self.policy.deliver_seconds * NS)
        return max(due_ns, self.facts.observing_since_ns + round(RETURN_SECONDS * NS))

    def _asked_target(self, record: TargetRecord, fact: TargetFact) -> TargetRecord:
        back = record.state is T.RETURNING
        wanted = record.before if back else self.to
        if fact.version == wanted or (back and not wanted and fact.version != self.to):
            return changed(
                record, T.ROLLED_BACK if back else T.CONFIRMED, reachable_since_ns=0, unhealthy_since_ns=0
            )
        concerns = fact.error_version in ("", wanted) and fact.error_at_ns >= record.asked_at_ns
        if fact.error and concerns:
            return self._failed(record, fact.error)
        if not fact.online:
            due_ns = self._deliver_by_ns(record.asked_at_ns)
            if due_ns <= self.now_ns and not self.facts.frozen:
                return changed(record, T.NOT_DELIVERED, error="not connected", stuck=back)
            self.look_at_ns(due_ns)
            return with_fields(record, reachable_since_ns=0)
        if not record.reachable_since_ns:
            record = with_fields(record, reachable_since_ns=self.now_ns)
        due_ns = self._base_ns(record) + round(self.policy.confirm_seconds * NS)
        if due_ns <= self.now_ns and not self.facts.frozen:
            return self._failed(record, f"not confirmed within {self.policy.confirm_seconds:g} s")
        self.look_at_ns(due_ns)
        return record

    def _failed(self, record: TargetRecord, error: str) -> TargetRecord:
        return changed(
            record, T.FAILED, error=error[:TEXT_LIMIT], stuck=record.state is T.RETURNING, forgiven=False
        )

    def _confirmed_target(self, record: TargetRecord, fact: TargetFact) -> TargetRecord:
        if fact.version != self.to and fact.version:
            return self._failed(record, f"it went back to {fact.version} by itself")
        if fact.healthy or not fact.online or not record.was_healthy or self.facts.frozen:
            return with_fields(record, unhealthy_since_ns=0)
        since_ns = record.unhealthy_since_ns or self.now_ns
        due_ns = since_ns + round(self.policy.unhealthy_seconds * NS)
        if due_ns <= self.now_ns:
            return self._failed(record, "unhealthy after it had confirmed")
        self.look_at_ns(due_ns)
        return with_fields(record, unhealthy_since_ns=since_ns)

    def _undelivered(self, name: str, record: TargetRecord) -> None:
        due_ns = self._deliver_by_ns(record.turn_at_ns)
        if due_ns <= self.now_ns and not self.facts.frozen and self.status.phase in FORWARD:
            self.targets[name] = changed(record, T.NOT_DELIVERED, error="not connected")
        else:
            self.look_at_ns(max(due_ns, self.now_ns + NS))
