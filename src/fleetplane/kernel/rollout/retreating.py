"""What a rollout does that has halted: wait for a person, go back, or end as it stands. Pure."""

from __future__ import annotations

from fleetplane.kernel.rollout import amounts
from fleetplane.kernel.rollout.observing import OutcomeObserving
from fleetplane.kernel.rollout.pass_state import example, last_reason
from fleetplane.kernel.rollout.policy import OnHalt
from fleetplane.kernel.rollout.states import RolloutPhase, TargetState, changed
from fleetplane.kernel.values.times import NS

P, T = RolloutPhase, TargetState


class Retreating(OutcomeObserving):
    """The part of a pass over a rollout that goes forward no more."""

    __slots__ = ()

    def halted(self) -> None:
        for reason in self.status.halt:
            self.wait(reason.code, reason.message)
        if self.policy.on_halt is OnHalt.WAIT or self.status.resume_to is P.ROLLING_BACK:
            self.wait("HALTED", "waits for a person: resume, retry, skip, undo or abort")
            return
        if left := self.in_flight():
            self.wait("HALTED", f"{left} targets in flight end before the roll back begins")
            return
        self.reasons.clear()
        self.enter(P.ROLLING_BACK, "; ".join(reason.message for reason in self.status.halt))
        self.roll_back()

    def in_flight(self) -> int:
        asked = (T.MOVING, T.RETURNING)
        return sum(one.state in asked and self.online(name) for name, one in self.targets.items())

    def roll_back(self) -> None:
        """Ask back what has moved, the newest wave first, also what is not connected."""
        going = [one for one in self.targets.values() if one.moved]
        stuck = [one for one in going if one.stuck and not one.forgiven]
        limit = self.policy.roll_back_max_failures
        if amounts.exceeds(len(stuck), limit, len(going)):
            message = f"{len(stuck)} of {len(going)} targets could not go back, {limit} may{example(stuck)}"
            self.halt("ROLL_BACK_FAILURES", message)
            self.halted()
            return
        under_way = sum(one.state is T.RETURNING for one in going)
        room = amounts.room(self.policy.roll_back_in_flight, len(going)) - under_way
        waiting = [name for name in self.order() if self._goes_back(name)]
        for name in sorted(waiting, key=lambda name: -self.targets[name].wave)[: max(0, room)]:
            online = self.online(name)
            self.targets[name] = changed(
                self.targets[name],
                T.RETURNING,
                asked_at_ns=self.now_ns,
                reachable_since_ns=self.now_ns if online else 0,
            )
            self.returned.append(name)
        left = sum(self.is_in(name, T.RETURNING) or self._goes_back(name) for name in self.targets)
        if left:
            self.look_at_ns(self.now_ns + round(self.policy.confirm_seconds * NS))
            self.wait("ROLLING_BACK", f"{left} targets have not gone back yet")
        else:
            self.finish(P.ROLLED_BACK, "every target that had moved went back, or has its outcome")

    def _goes_back(self, name: str) -> bool:
        record = self.targets[name]
        if not record.moved or record.stuck or name not in self.facts.targets:
            return False
        return record.state in (T.MOVING, T.CONFIRMED, T.FAILED, T.NOT_DELIVERED, T.SKIPPED)

    def abort(self) -> None:
        if left := self.in_flight():
            self.wait("ABORTING", f"{left} targets in flight end first")
            return
        for name, record in self.targets.items():
            if record.state in (T.MOVING, T.RETURNING):
                stuck = record.state is T.RETURNING
                self.targets[name] = changed(record, T.NOT_DELIVERED, error="not connected", stuck=stuck)
        self.finish(P.ABORTED, last_reason(self.status))
