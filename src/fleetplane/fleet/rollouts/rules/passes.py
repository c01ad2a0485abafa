"""One pass over a rollout: from its records, the facts and the time to a decision. Pure.

A pass first records what the facts say of each target, in every phase, and then acts if the phase allows it:
it starts waves, or halts, rolls back and aborts. Nothing is asked of a target unless its record says so
first: the driver makes the records durable and then steers every target to what its record says, which can
be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fleetplane.fleet import selectors
from fleetplane.fleet.rollouts.rules import amounts
from fleetplane.fleet.rollouts.rules.pass_state import (
    Decision,
    OutcomeObserving,
    P,
    T,
    example,
    last_reason,
    with_fields,
)
from fleetplane.fleet.rollouts.rules.policy import LABEL, REST, OnHalt, Policy, opens_at_ns
from fleetplane.fleet.rollouts.rules.states import (
    ACTOR,
    ENDED,
    RolloutFacts,
    RolloutStanding,
    Select,
    TargetFact,
    TargetRecord,
    breach,
    changed,
    has_data,
)
from fleetplane.kernel.values.times import NS, spelled


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


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a wave's selector means a target with these labels."""
    return selectors.parse(selector, field="waves").matches(labels)


def members(
    wave: str,
    unassigned: Iterable[str],
    labels: Mapping[str, Mapping[str, str]],
    *,
    total: int,
    select: Select,
) -> list[str]:
    """The targets of a wave out of those that no earlier wave has, in their order.

    `total` is the number of all targets, of which percentages are taken.
    """
    if wave == REST:
        return list(unassigned)
    if wave.startswith(LABEL):
        selector = wave.removeprefix(LABEL).strip()
        return [name for name in unassigned if select(selector, labels.get(name, {}))]
    return list(unassigned)[: amounts.room(wave, total)]


def preview(
    waves: Iterable[str], targets: Mapping[str, Mapping[str, str]], *, select: Select
) -> list[list[str]]:
    """The waves as they would be if all started now, from each target's labels."""
    left = list(targets)
    found = []
    for wave in waves:
        chosen = members(wave, left, targets, total=len(targets), select=select)
        found.append(chosen)
        taken = set(chosen)
        left = [name for name in left if name not in taken]
    return found


__all__ = ["ACTOR", "Decision", "decide"]

GATE_SECONDS = 5.0
"""How often gates are measured while a wave soaks."""


def decide(
    policy: Policy,
    to: str,
    status: RolloutStanding,
    targets: Mapping[str, TargetRecord],
    facts: RolloutFacts,
    now_ns: int,
    *,
    select: Select,
) -> Decision:
    """What should happen to a rollout to the version `to`."""
    if status.phase in ENDED:
        return Decision(status=status, changes={})
    work = _Pass(policy, to, status, dict(targets), facts, now_ns, select)
    work.observe()
    if facts.frozen:
        work.status = msgspec.structs.replace(work.status, last_frozen_ns=now_ns)
        work.wait("FROZEN", facts.frozen)
    else:
        work.act()
    return work.decision(targets)


class _Pass(Retreating):
    """A whole pass: what the facts say, and then what the phase lets it do."""

    __slots__ = ()

    def act(self) -> None:
        match self.status.phase:
            case P.PAUSED:
                self.wait("PAUSED", last_reason(self.status))
            case P.HALTED:
                self.halted()
            case P.ROLLING_BACK:
                self.roll_back()
            case P.ABORTING:
                self.abort()
            case _:
                self._forward()

    def _forward(self) -> None:
        if self.status.phase is P.PLANNED:
            self.enter(P.WAITING, "planned")
        while True:
            phase = self.status.phase
            match phase:
                case P.WAITING:
                    self._next_wave()
                case P.MOVING:
                    self._move()
                case P.SOAKING:
                    self._soak()
                case P.HALTED:
                    self.halted()
                    return
                case _:
                    return
            if self.status.phase is phase and (phase is not P.WAITING or self.reasons):
                return

    def _next_wave(self) -> None:
        """Start the next wave, or say what that waits for."""
        if self.halts():
            return
        number = self.status.wave + 1
        if number > len(self.policy.waves):
            self.finish(P.DONE, "every wave has passed")
            return
        unassigned = [
            name for name in self.order() if self.targets[name].wave == 0 and self.is_in(name, T.PENDING)
        ]
        wave = self.policy.waves[number - 1]
        if number < len(self.policy.waves):  # late-comers join the last
            unassigned = [name for name in unassigned if not self.targets[name].late]
        labels = {name: fact.labels for name, fact in self.facts.targets.items()}
        chosen = members(wave, unassigned, labels, total=len(self.targets), select=self.select)
        if not chosen and number < len(self.policy.waves):
            self.set(wave=number)  # nobody is left for it: it is over
            return
        if not chosen and not self.any_in(T.PENDING, T.MOVING):
            self.set(wave=number)
            self.finish(P.DONE, "every target has its outcome")
            return
        if not self._may_start(number):
            return
        for name in chosen:
            self.targets[name] = with_fields(self.targets[name], wave=number, turn_at_ns=self.now_ns)
        self.set(wave=number, wave_started_at_ns=self.now_ns, soak_started_at_ns=0, soak_since_ns=0)
        self.enter(P.MOVING, f"wave {number} ({wave}) started with {len(chosen)} targets")

    def _may_start(self, number: int) -> bool:
        opens_ns = opens_at_ns(self.policy.windows, self.now_ns)
        if opens_ns is None:
            self.wait("WINDOW", "none of the windows opens again")
        elif opens_ns > self.now_ns:
            message = f"wave {number} waits for its window, which opens at {spelled(opens_ns)}"
            self.wait("WINDOW", message, until_ns=opens_ns)
        if number in self.policy.approvals and number not in {one.wave for one in self.status.approvals}:
            self.wait("APPROVAL", f"wave {number} waits for an approval")
        return not self.reasons

    def _move(self) -> None:
        if self.halts():
            return
        number = self.status.wave
        wave = [name for name in self.order() if self.targets[name].wave == number]
        self._ask_more(len(wave))
        if self._wave_is_complete(wave):
            self.set(soak_started_at_ns=self.now_ns, soak_since_ns=0)
            self.enter(P.SOAKING, f"every target of wave {number} that can be reached has its outcome")

    def _ask_more(self, wave_size: int) -> None:
        """Ask those whose wave has started and who are connected, as many as may be in flight."""
        in_flight = sum(one.state is T.MOVING for one in self.targets.values())
        room = amounts.room(self.policy.max_in_flight, wave_size) - in_flight
        for name in self.order():
            if room <= 0:
                break
            record, fact = self.targets[name], self.facts.targets.get(name)
            if record.wave and record.state is T.PENDING and fact is not None and fact.online:
                self._ask(name, record, fact)
                room -= 1

    def _ask(self, name: str, record: TargetRecord, fact: TargetFact) -> None:
        self.targets[name] = changed(
            record,
            T.MOVING,
            moved=True,
            asked_at_ns=self.now_ns,
            reachable_since_ns=self.now_ns,
            was_healthy=fact.healthy,
            attempts=record.attempts + 1,
            error="",
            forgiven=False,
        )
        self.asked.append(name)
        self.look_at_ns(self.now_ns + round(self.policy.confirm_seconds * NS))

    def _wave_is_complete(self, wave: list[str]) -> bool:
        """Whether the soak can begin; else what the wave waits for, or why it halts."""
        number = self.status.wave
        considered = self.targets if self.is_last_wave else wave
        open_names = [name for name in considered if self.is_in(name, T.PENDING, T.MOVING)]
        away = [name for name in open_names if not self.online(name)]
        if len(away) < len(open_names):
            left = len(open_names) - len(away)
            self.wait("MOVING", f"{left} targets of wave {number} have not confirmed yet")
            return False
        lost = [
            name for name in wave if self.is_in(name, T.NOT_DELIVERED) and not self.targets[name].forgiven
        ]
        if self.is_last_wave:
            if away:
                self.wait("OFFLINE", f"{len(away)} targets are not connected")
            return not away
        missing = len(away) + len(lost)
        confirmed = any(self.is_in(name, T.CONFIRMED) for name in wave)
        unforgiven = any(self.is_in(name, T.FAILED) and not self.targets[name].forgiven for name in wave)
        if amounts.exceeds(missing, self.policy.max_offline, len(wave)):
            why = (
                f"{missing} of {len(wave)} targets of wave {number} are not connected or were not reached; "
                f"it may go on without {self.policy.max_offline}"
            )
        elif not confirmed and (missing or unforgiven):
            why = f"no target of wave {number} has confirmed"
        else:
            return True
        if away:
            self.wait("OFFLINE", why)
        else:
            self.halt("NOT_DELIVERED" if missing else "NONE_CONFIRMED", why)
        return False

    def _soak(self) -> None:
        if self.halts():
            return
        self._ask_more(sum(one.wave == self.status.wave for one in self.targets.values()))
        broken = self._broken()
        end_ns = self.status.soak_started_at_ns + round(self.policy.max_soak_seconds * NS)
        if broken:
            if self.status.soak_since_ns:
                self.set(soak_since_ns=0)
            at_once = [text for text, halts in broken if halts]
            if at_once or end_ns <= self.now_ns:
                for text in at_once or [text for text, _ in broken]:
                    self.halt("GATE", text)
                return
            for text, _ in broken:
                self.wait("SOAKING", text, until_ns=min(end_ns, self._poll_ns()))
            return
        if not self.status.soak_since_ns:
            self.set(soak_since_ns=self.now_ns)
        done_ns = self.status.soak_since_ns + round(self.policy.soak_seconds * NS)
        if done_ns > self.now_ns:
            message = f"wave {self.status.wave} soaks until {spelled(done_ns)}"
            self.wait(
                "SOAKING", message, until_ns=min(done_ns, self._poll_ns()) if self.policy.gates else done_ns
            )
        elif self.is_last_wave:
            self.finish(P.DONE, "every wave has passed")
        else:
            self.enter(P.WAITING, f"wave {self.status.wave} has passed")

    def _poll_ns(self) -> int:
        return self.now_ns + round(GATE_SECONDS * NS)

    def _broken(self) -> list[tuple[str, bool]]:
        """What does not hold now, each with whether it halts at once."""
        ill = sum(one.unhealthy_since_ns > 0 for one in self.targets.values() if one.state is T.CONFIRMED)
        found = [(f"{ill} targets that have moved are unhealthy", False)] if ill else []
        wave = [name for name, one in self.targets.items() if one.wave == self.status.wave]
        away = sum(self.is_in(name, T.CONFIRMED) and not self.online(name) for name in wave)
        if amounts.exceeds(away, self.policy.max_offline, len(wave)):
            found.append(
                (f"{away} targets of wave {self.status.wave} that have moved are not connected", False)
            )
        for gate in self.policy.gates:
            reading = self.facts.gates.get(gate.name)
            if text := breach(gate, reading):
                found.append((text, gate.halts and has_data(gate, reading)))
        return found
