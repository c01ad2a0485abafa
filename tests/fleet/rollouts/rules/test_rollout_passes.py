"""Decisions of a rollout, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from fleetplane.fleet.rollouts.rules import amounts, orders
from fleetplane.fleet.rollouts.rules.orders import RolloutOrder
from fleetplane.fleet.rollouts.rules.passes import Decision, decide, preview
from fleetplane.fleet.rollouts.rules.policy import Gate, OnHalt, Policy, Window
from fleetplane.fleet.rollouts.rules.states import (
    OUTCOMES,
    GateMeasurement,
    RolloutFacts,
    RolloutPhase,
    RolloutStanding,
    TargetFact,
    TargetRecord,
    TargetState,
    breach,
)
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.values.times import NS

OLD, NEW = "1", "2"
T, P = TargetState, RolloutPhase


def select(selector: str, labels: Mapping[str, str]) -> bool:
    key, _, value = selector.partition("=")
    return labels.get(key) == value


class Fleet:
    """A rollout with its facts, stepped by hand."""

    def __init__(self, policy: Policy, names: list[str], **labels: dict[str, str]) -> None:
        policy.check()
        self.policy = policy
        self.status = RolloutStanding()
        self.records = {name: TargetRecord(before=OLD) for name in names}
        self.world = {
            name: TargetFact(version=OLD, online=True, healthy=True, labels=labels.get(name, {}))
            for name in names
        }
        self.gates: dict[str, GateMeasurement] = {}
        self.frozen = ""
        self.now_ns = 1_800_000_000 * NS
        self.last = Decision(status=self.status, changes={})

    def step(self, seconds: float = 0.0) -> Decision:
        self.now_ns += round(seconds * NS)
        facts = RolloutFacts(targets=self.world, gates=self.gates, frozen=self.frozen)
        self.last = decide(self.policy, NEW, self.status, self.records, facts, self.now_ns, select=select)
        self.status = self.last.status
        self.records.update(self.last.changes)
        return self.last

    def set(self, *names: str, **fields: object) -> None:
        for name in names:
            self.world[name] = msgspec.structs.replace(self.world[name], **fields)

    def confirm(self) -> None:
        self.set(*self.named(T.MOVING), version=NEW)

    def refuse(self, *names: str) -> None:
        self.set(*names, error="nginx: [emerg] no", error_at_ns=self.now_ns)

    def named(self, *states: TargetState) -> list[str]:
        return [name for name, record in self.records.items() if record.state in states]

    def order(self, made: orders.OrderedChange) -> None:
        self.status = made.status
        self.records.update(made.changes)

    @property
    def by(self) -> RolloutOrder:
        return RolloutOrder(actor="alice", now_ns=self.now_ns)

    @property
    def codes(self) -> list[str]:
        return [reason.code for reason in self.last.reasons]


def names(number: int) -> list[str]:
    return [f"t{at:02d}" for at in range(number)]


def quick(**fields: object) -> Policy:
    return msgspec.structs.replace(
        Policy(waves=("2", "rest"), soak_seconds=0.0, confirm_seconds=30.0, deliver_seconds=600.0), **fields
    )


def test_waves_take_numbers_percentages_labels_and_the_rest_once_each() -> None:
    labels = {name: {"region": "eu" if at % 2 else "us"} for at, name in enumerate(names(10))}
    found = preview(("1", "15%", "label region=eu", "rest"), labels, select=select)
    assert found == [["t00"], ["t01", "t02"], ["t03", "t05", "t07", "t09"], ["t04", "t06", "t08"]]


@pytest.mark.parametrize(
    ("amount", "of", "rooms"), [("5", 3, 5), ("10%", 5, 1), ("10%", 11, 2), ("0.5%", 10, 1), ("100%", 7, 7)]
)
def test_a_percentage_is_rounded_up_and_is_one_at_least(amount: str, of: int, rooms: int) -> None:
    assert amounts.room(amount, of) == rooms


def test_one_of_ten_does_not_exceed_ten_percent() -> None:
    assert not amounts.exceeds(1, "10%", 10)
    assert amounts.exceeds(2, "10%", 10)
    assert amounts.exceeds(1, "0", 10)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"waves": ("5",)}, "waves[0]"),
        ({"waves": ()}, "waves"),
        ({"waves": ("rest", "rest")}, "waves[0]"),
        ({"waves": ("0", "rest")}, "waves[0]"),
        ({"waves": ("label ", "rest")}, "waves[0]"),
        ({"max_failures": "101%"}, "max_failures"),
        ({"max_in_flight": "0"}, "max_in_flight"),
        ({"max_failures": "-1"}, "max_failures"),
        ({"soak_seconds": float("nan")}, "soak_seconds"),
        ({"soak_seconds": 700.0, "max_soak_seconds": 600.0}, "max_soak_seconds"),
        ({"approvals": (3,)}, "approvals"),
        ({"gates": (Gate(name="a", query="x"),)}, "gates[0]"),
        ({"gates": (Gate(name="", query="x", max=1.0),)}, "gates[0].name"),
        ({"windows": (Window(cron="* * *", duration_seconds=60.0),)}, "windows[0].cron"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_by_its_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        quick(**fields).check()
    assert caught.value.field == field


def test_a_rollout_goes_wave_by_wave_and_everyone_is_confirmed() -> None:
    fleet = Fleet(quick(), names(5))
    assert fleet.step().asked == ("t00", "t01")
    assert fleet.codes == ["MOVING"]
    assert fleet.step().asked == ()
    fleet.confirm()
    assert fleet.step().asked == ("t02", "t03", "t04")
    fleet.confirm()
    assert fleet.step().status.phase is P.DONE
    assert fleet.status.counts == {"confirmed": 5}
    assert [one.after for one in fleet.status.history] == [
        P.WAITING, P.MOVING, P.SOAKING, P.WAITING, P.MOVING, P.SOAKING, P.DONE,
    ]  # fmt: skip


def test_no_more_are_in_flight_than_may_be() -> None:
    fleet = Fleet(quick(waves=("rest",), max_in_flight="2"), names(5))
    assert fleet.step().asked == ("t00", "t01")
    fleet.set("t00", version=NEW)
    assert fleet.step().asked == ("t02",)


def test_failures_within_the_budget_let_it_go_on_and_one_more_halts_it() -> None:
    fleet = Fleet(quick(max_failures="1", waves=("3", "rest")), names(6))
    fleet.step()
    fleet.refuse("t00")
    fleet.set("t01", "t02", version=NEW)
    assert fleet.step().asked == ("t03", "t04", "t05")
    fleet.refuse("t04")
    assert fleet.step().status.phase is P.HALTED
    assert fleet.codes == ["FAILURES", "HALTED"]
    assert "2 of 6 targets failed, 1 may; for example: nginx: [emerg] no" in fleet.last.reasons[0].message
    assert fleet.status.halt[0].code == "FAILURES"


def test_a_wave_has_a_budget_of_its_own() -> None:
    fleet = Fleet(quick(max_failures="50%", max_failures_per_wave="0"), names(6))
    fleet.step()
    fleet.refuse("t00")
    assert fleet.step().status.phase is P.HALTED
    assert fleet.codes[0] == "WAVE_FAILURES"


def test_a_target_that_is_connected_and_does_not_confirm_in_time_has_failed() -> None:
    fleet = Fleet(quick(), names(3))
    assert fleet.step().look_after_seconds == 30.0
    fleet.step(29.9)
    assert fleet.named(T.FAILED) == []
    fleet.step(0.1)
    assert fleet.named(T.FAILED) == ["t00", "t01"]
    assert fleet.status.phase is P.HALTED


def test_nobody_is_late_for_what_no_server_could_see() -> None:
    fleet = Fleet(quick(), names(3))
    fleet.step()
    fleet.now_ns += 3600 * NS
    facts = RolloutFacts(targets=fleet.world, observing_since_ns=fleet.now_ns)
    found = decide(fleet.policy, NEW, fleet.status, fleet.records, facts, fleet.now_ns, select=select)
    assert found.status.phase is P.MOVING


def test_an_offline_target_is_no_failure_and_gets_the_version_when_it_returns() -> None:
    fleet = Fleet(quick(waves=("3", "rest"), max_offline="1"), names(5))
    fleet.set("t01", online=False)
    assert fleet.step().asked == ("t00", "t02")
    fleet.confirm()
    assert fleet.step(60).asked == ("t03", "t04"), "the wave goes on without one"
    fleet.set("t01", online=True)
    assert fleet.step().asked == (), "as many are in flight as may be"
    fleet.confirm()
    assert fleet.step().asked == ("t01",)
    fleet.confirm()
    assert fleet.step().status.phase is P.DONE
    assert fleet.status.counts == {"confirmed": 5}


def test_a_wave_with_more_offline_than_may_be_waits_and_then_halts() -> None:
    fleet = Fleet(quick(waves=("3", "rest"), max_offline="1"), names(5))
    fleet.set("t01", "t02", online=False)
    fleet.step()
    fleet.confirm()
    assert fleet.step().status.phase is P.MOVING
    assert fleet.codes == ["OFFLINE"]
    fleet.step(601)
    assert fleet.status.phase is P.HALTED
    assert fleet.named(T.NOT_DELIVERED) == ["t01", "t02"]
    assert fleet.codes[0] == "NOT_DELIVERED"


def test_a_canary_that_is_offline_lets_nobody_else_move() -> None:
    fleet = Fleet(quick(waves=("1", "rest"), max_offline="100%"), names(5))
    fleet.set("t00", online=False)
    for _ in range(5):
        fleet.step(60)
        assert fleet.codes == ["OFFLINE"]
    assert not any(one.moved for one in fleet.records.values())


def test_offline_targets_of_the_last_wave_end_as_not_delivered_at_their_deadline() -> None:
    fleet = Fleet(quick(waves=("rest",)), names(3))
    fleet.set("t02", online=False)
    fleet.step()
    fleet.confirm()
    assert fleet.step().status.phase is P.MOVING
    fleet.step(600)
    assert fleet.status.phase is P.DONE
    assert fleet.status.counts == {"confirmed": 2, "not_delivered": 1}


def test_a_soak_starts_anew_when_a_target_is_unhealthy_for_a_while() -> None:
    fleet = Fleet(quick(soak_seconds=60.0, unhealthy_seconds=30.0), names(4))
    fleet.step()
    fleet.confirm()
    fleet.step()
    assert (fleet.status.phase, fleet.codes) == (P.SOAKING, ["SOAKING"])
    fleet.set("t00", healthy=False)
    fleet.step(40)
    fleet.set("t00", healthy=True)
    fleet.step(10)
    assert fleet.step(59).status.phase is P.SOAKING
    assert fleet.step(1).asked == ("t02", "t03")


def test_a_target_that_stays_unhealthy_has_failed_unless_it_was_ill_before() -> None:
    fleet = Fleet(quick(soak_seconds=60.0), names(4))
    fleet.set("t01", healthy=False)
    fleet.step()
    fleet.confirm()
    fleet.step(10)
    assert fleet.status.phase is P.SOAKING
    fleet.set("t00", healthy=False)
    fleet.step()
    assert fleet.named(T.FAILED) == ["t00"]
    assert fleet.step().status.phase is P.HALTED


def test_a_target_that_goes_back_by_itself_has_failed() -> None:
    fleet = Fleet(quick(soak_seconds=60.0), names(4))
    fleet.step()
    fleet.confirm()
    fleet.step()
    fleet.set("t01", version=OLD)
    assert fleet.step().status.phase is P.HALTED
    assert fleet.records["t01"].error == "it went back to 1 by itself"


def test_a_gate_without_data_is_not_passed_and_halts_when_the_soak_takes_too_long() -> None:
    gate = Gate(name="errors", query="error_rate", max=0.01)
    fleet = Fleet(quick(gates=(gate,), max_soak_seconds=60.0), names(4))
    fleet.step()
    fleet.confirm()
    fleet.step()
    for _ in range(5):
        fleet.step(10)
        assert fleet.status.phase is P.SOAKING
        assert "no data" in fleet.last.reasons[0].message
    fleet.step(10)
    assert fleet.status.phase is P.HALTED
    assert fleet.status.halt[0].code == "GATE"
    assert len(fleet.named(T.PENDING)) == 2


def test_a_gate_compares_with_before_and_may_halt_at_once() -> None:
    gate = Gate(name="errors", query="error_rate", max_increase=0.05, halts=True)
    assert breach(gate, GateMeasurement(value=0.04)) != ""
    assert breach(gate, GateMeasurement(value=0.04, baseline=0.0)) == ""
    fleet = Fleet(quick(gates=(gate,)), names(4))
    fleet.step()
    fleet.confirm()
    assert fleet.step().status.phase is P.SOAKING, "no data does not halt at once"
    fleet.gates["errors"] = GateMeasurement(value=0.3, baseline=0.1)
    fleet.step()
    assert fleet.status.phase is P.HALTED
    assert "is 0.3, before it was 0.1; it may be at most 0.05 more" in fleet.status.halt[0].message


def test_a_halted_rollout_rolls_back_the_newest_wave_first_after_what_is_in_flight() -> None:
    policy = quick(waves=("1", "2", "rest"), on_halt=OnHalt.ROLL_BACK, roll_back_in_flight="2")
    fleet = Fleet(policy, names(6))
    fleet.step()
    fleet.confirm()
    fleet.step()
    fleet.set("t01", version=NEW)
    fleet.refuse("t02")
    fleet.set("t02", error="")
    fleet.step()
    fleet.refuse("t02")
    fleet.step()
    assert fleet.last.returned == ("t01", "t02")
    fleet.set("t01", version=OLD)
    assert fleet.step().returned == ("t00",)
    fleet.set("t00", version=OLD)
    fleet.step()
    assert fleet.status.phase is P.ROLLED_BACK
    assert fleet.status.counts == {"never_started": 3, "rolled_back": 3}
    assert fleet.records["t02"].error == "nginx: [emerg] no"


def test_what_is_in_flight_ends_before_a_roll_back() -> None:
    fleet = Fleet(quick(on_halt=OnHalt.ROLL_BACK), names(4))
    fleet.step()
    fleet.refuse("t00")
    assert fleet.step().status.phase is P.HALTED
    assert "1 targets in flight end before" in fleet.last.reasons[-1].message
    fleet.confirm()
    assert set(fleet.step().returned) == {"t00", "t01"}


def test_a_roll_back_that_fails_too_often_waits_for_a_person() -> None:
    fleet = Fleet(quick(on_halt=OnHalt.ROLL_BACK, roll_back_max_failures="0"), names(4))
    fleet.step()
    fleet.set("t00", version=NEW)
    fleet.refuse("t01")
    fleet.step()
    fleet.set("t00", error="no", error_at_ns=fleet.now_ns)
    fleet.set("t01", version=OLD)
    fleet.step()
    assert fleet.status.phase is P.HALTED
    assert fleet.status.halt[0].code == "ROLL_BACK_FAILURES"
    fleet.order(orders.resume(fleet.status, fleet.records, fleet.by))
    fleet.step()
    assert fleet.step().status.phase is P.ROLLED_BACK
    assert fleet.status.counts == {"failed": 1, "never_started": 2, "rolled_back": 1}


def test_a_freeze_stops_everything_new_and_costs_nobody_his_time() -> None:
    fleet = Fleet(quick(max_in_flight="1"), names(4))
    fleet.step()
    fleet.frozen = "frozen by bob: incident"
    for _ in range(10):
        found = fleet.step(25)
        assert (found.asked, fleet.codes) == ((), ["FROZEN"])
    fleet.frozen = ""
    fleet.step(25)
    assert fleet.named(T.MOVING) == ["t00"]
    fleet.step(5)
    assert fleet.named(T.FAILED) == ["t00"]


def test_a_wave_waits_for_its_window_and_says_until_when() -> None:
    window = Window(cron="0 2 * * *", duration_seconds=3600.0, time_zone="Europe/Berlin")
    fleet = Fleet(quick(windows=(window,)), names(3))
    fleet.now_ns = 1_800_000_000 * NS  # 2027-01-15T08:00:00Z
    fleet.step()
    assert fleet.status.phase is P.WAITING
    assert fleet.last.reasons[0].message.endswith("opens at 2027-01-16T01:00:00Z")
    assert fleet.last.look_after_seconds == 17 * 3600
    assert fleet.step(17 * 3600).asked == ("t00", "t01")


def test_a_wave_waits_for_its_approval() -> None:
    fleet = Fleet(quick(approvals=(2,)), names(3))
    fleet.step()
    fleet.confirm()
    fleet.step()
    assert (fleet.status.phase, fleet.codes) == (P.WAITING, ["APPROVAL"])
    with pytest.raises(InvalidArgument):
        orders.approve(fleet.policy, fleet.status, 1, fleet.by)
    fleet.order(orders.approve(fleet.policy, fleet.status, 2, fleet.by))
    assert fleet.step().asked == ("t02",)


def test_latecomers_join_the_last_wave() -> None:
    fleet = Fleet(quick(waves=("1", "2", "rest")), names(4))
    fleet.step()
    fleet.world["aa"] = TargetFact(version="", online=True, healthy=True)
    fleet.confirm()
    assert fleet.step().asked == ("t01", "t02")
    fleet.confirm()
    assert fleet.step().asked == ("t03", "aa")
    fleet.world["bb"] = TargetFact(version=OLD, online=True, healthy=True)
    fleet.confirm()
    assert fleet.step().asked == ("bb",)
    fleet.confirm()
    assert fleet.step().status.counts == {"confirmed": 6}


def test_a_target_that_is_gone_is_skipped() -> None:
    fleet = Fleet(quick(), names(3))
    fleet.step()
    del fleet.world["t00"]
    fleet.set("t01", version=NEW)
    fleet.step()
    assert fleet.records["t00"].state is T.SKIPPED
    assert fleet.last.asked == ("t02",)


def test_pause_and_resume() -> None:
    fleet = Fleet(quick(max_in_flight="1"), names(3))
    fleet.step()
    fleet.order(orders.pause(fleet.status, fleet.by))
    fleet.confirm()
    assert fleet.step().asked == ()
    assert (fleet.codes, fleet.named(T.CONFIRMED)) == (["PAUSED"], ["t00"])
    fleet.order(orders.resume(fleet.status, fleet.records, fleet.by))
    assert fleet.step().asked == ("t01",)
    assert [one.actor for one in fleet.status.history][-2:] == ["alice", "alice"]


def test_resuming_after_a_halt_forgives_what_failed_and_not_what_fails_next() -> None:
    fleet = Fleet(quick(waves=("2", "2", "rest")), names(6))
    fleet.step()
    fleet.refuse("t00")
    fleet.set("t01", version=NEW)
    fleet.step()
    assert fleet.status.phase is P.HALTED
    fleet.order(orders.resume(fleet.status, fleet.records, fleet.by))
    assert fleet.step().asked == ("t02", "t03")
    fleet.refuse("t02")
    assert fleet.step().status.phase is P.HALTED


def test_retry_asks_again_and_goes_on() -> None:
    fleet = Fleet(quick(), names(3))
    fleet.step()
    fleet.refuse("t00")
    fleet.set("t01", version=NEW)
    fleet.step(1)
    fleet.order(orders.retry(fleet.status, fleet.records, (), fleet.by))
    fleet.step(1)
    assert fleet.last.asked == ("t00",), "the error of before says nothing of this try"
    assert fleet.records["t00"].attempts == 2
    fleet.confirm()
    assert fleet.step().asked == ("t02",)
    with pytest.raises(FailedPrecondition, match="no target has failed"):
        orders.retry(fleet.status, fleet.records, (), fleet.by)


def test_abort_leaves_what_moved_and_starts_nothing_more() -> None:
    fleet = Fleet(quick(), names(4))
    fleet.step()
    fleet.set("t00", version=NEW)
    fleet.order(orders.abort(fleet.status, fleet.by))
    fleet.step()
    assert (fleet.status.phase, fleet.codes) == (P.ABORTING, ["ABORTING"])
    fleet.set("t01", version=NEW)
    fleet.step()
    assert fleet.status.phase is P.ABORTED
    assert fleet.status.counts == {"confirmed": 2, "never_started": 2}


def test_undo_of_a_rollout_that_is_done_brings_everyone_back() -> None:
    fleet = Fleet(quick(), names(3))
    for _ in range(4):
        fleet.step()
        fleet.confirm()
    assert fleet.status.phase is P.DONE
    fleet.order(orders.undo(fleet.status, fleet.by))
    assert len(fleet.step().returned) == 3
    fleet.set(*fleet.records, version=OLD)
    assert fleet.step().status.phase is P.ROLLED_BACK
    assert fleet.status.counts == {"rolled_back": 3}


def test_a_superseded_rollout_gives_up_what_has_not_moved() -> None:
    fleet = Fleet(quick(), names(4))
    fleet.step()
    fleet.set("t00", version=NEW)
    fleet.step()
    fleet.order(orders.supersede(fleet.status, fleet.records, fleet.by))
    assert fleet.status.phase is P.SUPERSEDED
    assert fleet.status.counts == {"confirmed": 1, "superseded": 3}
    assert {one.state for one in fleet.records.values()} <= set(OUTCOMES)


def test_skip_takes_a_target_out() -> None:
    fleet = Fleet(quick(waves=("rest",)), names(3))
    fleet.step()
    fleet.refuse("t01")
    fleet.step()
    fleet.order(orders.skip(fleet.status, fleet.records, ["t01"], fleet.by))
    fleet.order(orders.resume(fleet.status, fleet.records, fleet.by))
    fleet.confirm()
    assert fleet.step().status.phase is P.DONE
    assert fleet.status.counts == {"confirmed": 2, "skipped": 1}


@pytest.mark.parametrize("phase", [P.DONE, P.ABORTED, P.ROLLED_BACK, P.SUPERSEDED])
def test_a_rollout_that_has_ended_takes_few_orders(phase: RolloutPhase) -> None:
    status, by = RolloutStanding(phase=phase), RolloutOrder(actor="alice", now_ns=1)
    refusals: list[Callable[[], object]] = [
        lambda: orders.pause(status, by),
        lambda: orders.resume(status, {}, by),
        lambda: orders.retry(status, {}, (), by),
        lambda: orders.abort(status, by),
        lambda: orders.skip(status, {}, ["a"], by),
    ]
    for refused in refusals:
        with pytest.raises(FailedPrecondition):
            refused()
