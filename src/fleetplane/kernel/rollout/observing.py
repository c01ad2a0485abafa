"""What the facts say of each target, whatever the phase of its rollout. Pure."""

from __future__ import annotations

from fleetplane.kernel.rollout.facts import TargetFact
from fleetplane.kernel.rollout.pass_state import PassState, with_fields
from fleetplane.kernel.rollout.states import (
    FORWARD,
    TEXT_LIMIT,
    RolloutPhase,
    TargetRecord,
    TargetState,
    changed,
)
from fleetplane.kernel.values.times import NS

RETURN_SECONDS = 60.0
"""How long agents have to come back to a server that was started."""
P, T = RolloutPhase, TargetState


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
