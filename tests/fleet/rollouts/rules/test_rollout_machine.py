"""Whatever happens to a rollout and its targets, in whatever order: what must hold."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleetplane.fleet.rollouts.rules import amounts, orders
from fleetplane.fleet.rollouts.rules.orders import OrderedChange, RolloutOrder
from fleetplane.fleet.rollouts.rules.passes import decide
from fleetplane.fleet.rollouts.rules.policy import Gate, OnHalt, Policy
from fleetplane.fleet.rollouts.rules.states import (
    ENDED,
    OUTCOMES,
    TARGET_TRANSITIONS,
    TRANSITIONS,
    GateMeasurement,
    RolloutFacts,
    RolloutPhase,
    RolloutStanding,
    TargetFact,
    TargetRecord,
    TargetState,
)
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.values.times import NS

OLD, NEW = "1", "2"
T, P = TargetState, RolloutPhase
AMOUNTS = st.sampled_from(["0", "1", "2", "10%", "50%", "100%"])
SOME = st.sampled_from(["1", "2", "30%", "100%"])
GATE = Gate(name="g", query="q", max=0.5)
POLICIES = st.builds(
    Policy,
    waves=st.lists(st.sampled_from(["1", "2", "25%", "label ring=a"]), max_size=3).map(
        lambda found: (*found, "rest")
    ),
    max_in_flight=SOME,
    max_failures=AMOUNTS,
    max_failures_per_wave=st.sampled_from(["100%", "50%", "0"]),
    max_offline=AMOUNTS,
    confirm_seconds=st.just(30.0),
    deliver_seconds=st.just(300.0),
    unhealthy_seconds=st.sampled_from([0.0, 20.0]),
    soak_seconds=st.sampled_from([0.0, 30.0]),
    max_soak_seconds=st.just(120.0),
    gates=st.sampled_from([(), (GATE,), (msgspec.structs.replace(GATE, halts=True),)]),
    approvals=st.sampled_from([(), (1,)]),
    on_halt=st.sampled_from(list(OnHalt)),
    roll_back_in_flight=SOME,
    roll_back_max_failures=st.sampled_from(["100%", "0"]),
)


class RolloutMachine(RuleBasedStateMachine):
    """A fleet that does anything, and people who order anything."""

    @initialize(policy=POLICIES, number=st.integers(1, 8))
    def start(self, policy: Policy, number: int) -> None:
        policy.check()
        self.policy = policy
        self.status = RolloutStanding()
        self.now_ns = 1_800_000_000 * NS
        self.world = {f"t{at}": self.fact(at) for at in range(number)}
        self.records = {name: TargetRecord(before=OLD) for name in self.world}
        self.ever = set(self.records)
        self.gate = GateMeasurement(value=0.0)
        self.frozen = ""
        self.reasons: tuple[object, ...] = ()

    def fact(self, at: int) -> TargetFact:
        return TargetFact(version=OLD, online=True, healthy=True, labels={"ring": "ab"[at % 2]})

    # The world.

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 31.0, 301.0]))
    def look(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS)
        facts = RolloutFacts(targets=dict(self.world), gates={"g": self.gate}, frozen=self.frozen)
        before, phase = self.records, self.status.phase
        found = decide(
            self.policy, NEW, self.status, before, facts, self.now_ns,
            select=lambda selector, labels: labels.get("ring") == selector.partition("=")[2],
        )  # fmt: skip
        for name, record in found.changes.items():
            was = before[name].state if name in before else T.PENDING
            assert record.state is was or self.reachable(was, record.state), (was, record.state)
        self.ever |= set(found.changes)
        after = {**before, **found.changes}
        if found.asked:
            self.check_budget(after)
            assert found.status.phase in (P.MOVING, P.SOAKING, P.WAITING, P.DONE)
            in_flight = [one for one in after.values() if one.state is T.MOVING]
            sizes = Counter(one.wave for one in after.values())
            assert len(in_flight) <= amounts.room(self.policy.max_in_flight, sizes[found.status.wave])
            assert all(self.world[name].online for name in found.asked)
        if self.frozen:
            assert not found.asked
            assert not found.returned
            assert found.status.phase is phase
        if phase in (P.PAUSED, P.HALTED, P.ABORTING, *ENDED):
            assert not found.asked
        assert found.status.phase is phase or found.status.history[-1].at_ns == self.now_ns
        if found.status.phase not in ENDED:
            assert found.reasons, f"a rollout that is {found.status.phase} says what it waits for"
        self.status, self.records, self.reasons = found.status, after, found.reasons

    def reachable(self, was: TargetState, state: TargetState) -> bool:
        """Whether one pass may lead there: it observes and then acts."""
        direct = TARGET_TRANSITIONS[was]
        return state in direct or any(state in TARGET_TRANSITIONS[one] for one in direct)

    def check_budget(self, targets: dict[str, TargetRecord]) -> None:
        failed = [one for one in targets.values() if one.state is T.FAILED and not one.forgiven]
        assert not amounts.exceeds(len(failed), self.policy.max_failures, len(targets))

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        asked = [name for name, one in self.records.items() if one.state is T.MOVING and name in self.world]
        for name in data.draw(st.sets(st.sampled_from(asked))) if asked else ():
            self.change(name, version=NEW)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        going = [n for n, one in self.records.items() if one.state is T.RETURNING and n in self.world]
        for name in data.draw(st.sets(st.sampled_from(going))) if going else ():
            self.change(name, version=OLD)

    @rule(at=st.integers(0, 9), field=st.sampled_from(["online", "healthy"]), value=st.booleans())
    def fluctuate(self, at: int, field: str, value: bool) -> None:
        self.change(f"t{at}", **{field: value})

    @rule(at=st.integers(0, 9))
    def refuse(self, at: int) -> None:
        self.change(f"t{at}", error="refused", error_at_ns=self.now_ns)

    @rule(at=st.integers(0, 9), version=st.sampled_from([OLD, NEW, ""]))
    def surprise(self, at: int, version: str) -> None:
        self.change(f"t{at}", version=version)

    @rule(at=st.integers(0, 9), there=st.booleans())
    def come_and_go(self, at: int, there: bool) -> None:
        if there:
            self.world.setdefault(f"t{at}", self.fact(at))
        else:
            self.world.pop(f"t{at}", None)

    @rule(value=st.sampled_from([None, 0.0, 1.0]))
    def measure(self, value: float | None) -> None:
        self.gate = GateMeasurement(value=value)

    @rule(frozen=st.sampled_from(["", "frozen by bob: incident"]))
    def freeze(self, frozen: str) -> None:
        self.frozen = frozen

    def change(self, name: str, **fields: object) -> None:
        if name in self.world:
            self.world[name] = msgspec.structs.replace(self.world[name], **fields)

    # People.

    @rule(
        what=st.sampled_from(["pause", "resume", "resume", "approve", "retry", "skip", "abort", "undo"]),
        at=st.integers(0, 9),
    )
    def order(self, what: str, at: int) -> None:
        by = RolloutOrder(actor="alice", now_ns=self.now_ns)
        try:
            self.take(self.ordered(what, f"t{at}", by))
        except FleetplaneError:
            return

    def ordered(self, what: str, name: str, by: RolloutOrder) -> OrderedChange:
        status, records = self.status, self.records
        match what:
            case "pause":
                return orders.pause(status, by)
            case "resume":
                return orders.resume(status, records, by)
            case "approve":
                return orders.approve(self.policy, status, 1, by)
            case "retry":
                return orders.retry(status, records, (), by)
            case "skip":
                return orders.skip(status, records, [name], by)
            case "abort":
                return orders.abort(status, by)
            case _:
                return orders.undo(status, by)

    @precondition(lambda self: len(self.status.history) > 12)
    @rule()
    def supersede(self) -> None:
        self.take(orders.supersede(self.status, self.records, RolloutOrder(actor="bob", now_ns=self.now_ns)))

    def take(self, made: OrderedChange) -> None:
        assert set(made.changes) <= set(self.records)
        self.status, self.records = made.status, {**self.records, **made.changes}

    # What always holds.

    @invariant()
    def nobody_is_lost(self) -> None:
        assert set(self.records) == self.ever

    @invariant()
    def everyone_has_one_outcome_in_the_end(self) -> None:
        if self.status.phase in ENDED:
            assert all(one.state in OUTCOMES for one in self.records.values())
            assert sum(self.status.counts.values()) == len(self.records)
            assert self.status.ended_at_ns is not None

    @invariant()
    def every_halt_is_explained(self) -> None:
        if self.status.phase is P.HALTED:
            assert self.status.halt
            assert all(reason.message for reason in self.status.halt)

    @invariant()
    def transitions_are_those_of_the_table_and_have_an_actor_and_a_reason(self) -> None:
        for one in self.status.history:
            assert one.after in TRANSITIONS[one.before]
            assert one.actor
            assert one.reason


TestRolloutMachine = RolloutMachine.TestCase
TestRolloutMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
