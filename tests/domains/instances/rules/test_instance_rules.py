from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetplane.domains.instances.kinds import DrainState as DrainRecord
from fleetplane.domains.instances.kinds import Instance, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules.decide import (
    Create,
    DeleteInstance,
    DrainInstance,
    GroupFacts,
    GroupMember,
    GroupPolicy,
    Provision,
    Purge,
    RemovalCause,
    State,
)
from fleetplane.kernel.resources import Resource

NS = 1_000_000_000
NOW = 1_000_000 * NS
POLICY = GroupPolicy()


def record(
    name: str, *, age: float = 10_000, on_demand: bool = False, infra: str = "h", **status: Any
) -> Instance:
    known = {"provider_id": f"p-{name}", "registered_at_ns": NOW - round(age * NS)}
    spec = InstanceSpec(
        cluster="c", shard="s", group="g", template="t", prefix="knc", on_demand=on_demand, infra_hash=infra
    )
    return Resource(
        kind="instance",
        scope="tenant/t",
        name=name,
        uid="u",
        labels={},
        spec=spec,
        status=InstanceStatus(**{**known, **status}),
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=NOW - round(age * NS),
        updated_at_ns=0,
    )


def healthy(name: str, **fields: Any) -> GroupMember:
    return GroupMember(instance=record(name, **fields), heard_at_ns=NOW)


def draining(
    name: str, *, left: float = 100, acked: bool = False, cause: RemovalCause = RemovalCause.UNHEALTHY
) -> GroupMember:
    drain = DrainRecord(
        reason=cause,
        started_at_ns=NOW,
        delete_at_ns=NOW + round(left * NS),
        acked_at_ns=NOW if acked else None,
    )
    return GroupMember(instance=record(name, drain=drain), heard_at_ns=NOW)


def group(desired: int, **fields: Any) -> GroupFacts:
    return GroupFacts(key="g", desired=desired, infra_hash=fields.pop("infra_hash", "h"), **fields)


def actions(
    facts: GroupFacts, *members: GroupMember, policy: GroupPolicy = POLICY, now: int = NOW
) -> list[rules.Action]:
    return rules.decide(facts, members, policy, now_ns=now).actions


def test_states_follow_from_the_moments_that_have_come() -> None:
    def of(**status: Any) -> State:
        return rules.state(record("i", **status))

    assert of(provider_id="", registered_at_ns=None) is State.PENDING
    assert of(registered_at_ns=None) is State.PROVISIONED
    assert of() is State.REGISTERED
    assert rules.state(draining("i").instance) is State.DRAINING
    assert of(deleting_at_ns=1) is State.DELETING
    assert of(deleting_at_ns=1, deleted_at_ns=1) is State.DELETED


def test_a_group_at_its_size_needs_nothing() -> None:
    assert actions(group(2), healthy("a"), healthy("b")) == []


def test_what_is_missing_is_created() -> None:
    assert actions(group(3), healthy("a")) == [Create(), Create()]


def test_on_demand_instances_do_not_count_towards_the_size() -> None:
    assert actions(group(1), healthy("a", on_demand=True)) == [Create()]


def test_scaling_down_drains_the_oldest_first() -> None:
    [drain] = actions(group(1), healthy("young", age=10), healthy("old", age=100))

    assert drain == DrainInstance(
        name="old", cause=RemovalCause.SCALE_DOWN, delete_at_ns=NOW + 300 * NS, replace=False
    )


def test_scaling_down_without_a_drain_is_a_setting() -> None:
    [drain] = actions(group(0), healthy("a"), policy=GroupPolicy(drain_on_scale_down=False))

    assert isinstance(drain, DrainInstance)
    assert drain.delete_at_ns == NOW


def test_a_deleted_group_drains_to_nothing() -> None:
    drains = actions(group(0, exists=False), healthy("a"), healthy("b"))

    assert {drain.cause for drain in drains if isinstance(drain, DrainInstance)} == {
        RemovalCause.GROUP_DELETED
    }
    assert len(drains) == 2


def test_a_groups_own_drain_timeout_beats_the_default_and_zero_means_at_once() -> None:
    for seconds in (0.0, 7.0):
        [drain] = actions(group(0, drain_timeout_seconds=seconds), healthy("a"))
        assert isinstance(drain, DrainInstance)
        assert drain.delete_at_ns == NOW + round(seconds * NS)


def test_an_instance_that_missed_three_reports_is_drained_and_replaced() -> None:
    silent = GroupMember(instance=record("a"), heard_at_ns=NOW - 180 * NS)
    patient = GroupMember(instance=record("b"), heard_at_ns=NOW - 179 * NS)
    others = [healthy(name) for name in "cd"]

    assert actions(group(4), silent, patient, *others) == [
        DrainInstance(
            name="a",
            cause=RemovalCause.UNHEALTHY,
            delete_at_ns=NOW + 300 * NS,
            replace=True,
            unhealthy_since_ns=NOW,
        ),
        Create(),
    ]


def test_an_unhealthy_on_demand_instance_goes_without_a_replacement() -> None:
    silent = GroupMember(instance=record("a", on_demand=True), heard_at_ns=NOW - 999 * NS)

    [drain] = actions(group(1), silent, healthy("b"))
    assert isinstance(drain, DrainInstance)
    assert (drain.cause, drain.replace) == (RemovalCause.UNHEALTHY, False)


def test_what_the_provider_lost_is_deleted_without_a_drain_and_made_anew() -> None:
    lost = GroupMember(instance=record("a"), heard_at_ns=NOW, lost=True)

    assert actions(group(1), lost) == [DeleteInstance(name="a", cause=RemovalCause.PROVIDER_LOST), Create()]


@pytest.mark.parametrize("drain_timeout_seconds", [0.0, 5.0, 300.0])
def test_a_spot_notice_drains_at_once_and_until_the_clouds_deadline(drain_timeout_seconds: float) -> None:
    noticed = GroupMember(instance=record("a"), heard_at_ns=NOW, spot_deadline_ns=NOW + 60 * NS)

    assert actions(group(1, drain_timeout_seconds=drain_timeout_seconds), noticed) == [
        DrainInstance(name="a", cause=RemovalCause.SPOT, delete_at_ns=NOW + 60 * NS, replace=True),
        Create(),
    ]


def test_repeated_spot_notices_ask_for_one_replacement_only() -> None:
    noticed = draining("a", cause=RemovalCause.SPOT)
    told_again = GroupMember(instance=noticed.instance, heard_at_ns=NOW, spot_deadline_ns=NOW + 60 * NS)

    assert actions(group(1), told_again, healthy("replacement", age=1)) == []


def test_a_drain_ends_with_its_acknowledgement_or_its_time() -> None:
    assert actions(group(0), draining("a")) == []
    assert actions(group(0), draining("a", acked=True)) == [
        DeleteInstance(name="a", cause=RemovalCause.UNHEALTHY)
    ]
    assert actions(group(0), draining("a", left=0)) == [
        DeleteInstance(name="a", cause=RemovalCause.UNHEALTHY)
    ]


def test_while_instances_leave_there_is_at_most_one_above_the_size() -> None:
    leaving = [draining(name) for name in "abc"]

    assert actions(group(3), *leaving) == [Create()]
    assert actions(group(3), *leaving, healthy("d", age=1)) == []


def test_a_deletion_that_was_begun_is_tried_until_it_is_done() -> None:
    begun = GroupMember(instance=record("a", deleting_at_ns=NOW - NS))

    assert actions(group(0), begun) == [DeleteInstance(name="a", cause=RemovalCause.REQUESTED)]


def test_a_record_is_purged_some_time_after_the_instance_is_gone() -> None:
    gone = GroupMember(instance=record("a", deleted_at_ns=NOW - 1800 * NS))
    fresh = GroupMember(instance=record("b", deleted_at_ns=NOW - 1799 * NS))

    assert actions(group(0), gone, fresh) == [Purge(name="a")]


def test_a_recorded_instance_is_asked_of_the_provider_again_until_it_is_there() -> None:
    pending = GroupMember(instance=record("a", age=1, provider_id="", registered_at_ns=None))

    assert actions(group(1), pending) == [Provision(name="a")]


def test_an_instance_that_never_registers_is_given_up() -> None:
    never = GroupMember(instance=record("a", age=300, registered_at_ns=None))

    assert actions(group(1), never) == [
        DeleteInstance(name="a", cause=RemovalCause.NEVER_REGISTERED),
        Create(),
    ]


def test_drift_is_mended_one_at_a_time_oldest_first_and_never_while_another_drains() -> None:
    drifted = [healthy("a", age=3, infra="old"), healthy("b", age=9, infra="old")]

    [drain, create] = actions(group(2), *drifted)
    assert isinstance(drain, DrainInstance)
    assert (drain.name, drain.cause, create) == ("b", RemovalCause.DRIFT, Create())
    assert actions(group(2), draining("b"), *drifted) == []


def test_forced_expiry_does_not_wait_for_other_drains_but_eligible_expiry_does() -> None:
    policy = GroupPolicy(eligible_age_seconds=50, forced_age_seconds=100)

    [forced] = actions(group(2), draining("x"), healthy("a", age=100), healthy("b", age=1), policy=policy)[:1]
    assert isinstance(forced, DrainInstance)
    assert forced.cause is RemovalCause.FORCED_EXPIRY
    assert actions(group(1), draining("x"), healthy("a", age=60), policy=policy) == []
    [eligible, _] = actions(group(1), healthy("a", age=60), policy=policy)
    assert isinstance(eligible, DrainInstance)
    assert eligible.cause is RemovalCause.ELIGIBLE_EXPIRY


def test_an_on_demand_instance_ends_at_its_own_age() -> None:
    policy = GroupPolicy(on_demand_age_seconds=50)

    [drain] = actions(group(0), healthy("a", age=50, on_demand=True), policy=policy)
    assert isinstance(drain, DrainInstance)
    assert (drain.cause, drain.replace) == (RemovalCause.ON_DEMAND_EXPIRY, False)
    assert actions(group(0), healthy("a", age=49, on_demand=True), policy=policy) == []


def test_a_freeze_stops_everything_and_says_so() -> None:
    lost = GroupMember(instance=record("a"), lost=True)
    plan = rules.decide(group(3, frozen="by ops: migration"), [lost], POLICY, now_ns=NOW)

    assert plan.actions == []
    assert plan.waiting == ["automation is frozen: by ops: migration"]


def test_a_plan_says_when_to_look_again() -> None:
    plan = rules.decide(group(1), [healthy("a")], POLICY, now_ns=NOW)
    assert plan.due_ns == NOW + 180 * NS

    plan = rules.decide(group(0), [draining("a", left=5)], POLICY, now_ns=NOW)
    assert plan.due_ns == NOW + 5 * NS
    assert plan.waiting == ["a drains (unhealthy): no acknowledgement yet, 5 s left"]


names = st.uuids().map(str)
members = st.lists(
    st.one_of(
        st.builds(
            healthy,
            names,
            age=st.integers(1, 500),
            on_demand=st.booleans(),
            infra=st.sampled_from(["h", "old"]),
        ),
        st.builds(draining, names, left=st.integers(0, 50), acked=st.booleans()),
        names.map(lambda name: GroupMember(instance=record(name, provider_id="", registered_at_ns=None))),
        names.map(lambda name: GroupMember(instance=record(name), lost=True)),
    ),
    max_size=8,
)


@given(members, st.integers(0, 6))
@settings(max_examples=300)
def test_no_pass_exceeds_the_cap_or_names_an_instance_twice(present: list[GroupMember], desired: int) -> None:
    plan = rules.decide(group(desired), present, POLICY, now_ns=NOW)
    named = [action.name for action in plan.actions if not isinstance(action, Create)]
    creates = sum(isinstance(action, Create) for action in plan.actions)
    deletes = {action.name for action in plan.actions if isinstance(action, DeleteInstance | Purge)}
    left = [m for m in present if m.instance.name not in deletes and not m.instance.spec.on_demand]

    assert len(named) == len(set(named))
    if creates:
        assert len(left) + creates <= desired + 1


@given(members, st.integers(0, 6))
@settings(max_examples=300)
def test_nothing_that_serves_is_deleted_without_a_drain(present: list[GroupMember], desired: int) -> None:
    serving = {m.instance.name for m in present if rules.state(m.instance) is State.REGISTERED and not m.lost}
    plan = rules.decide(group(desired), present, POLICY, now_ns=NOW)

    assert not serving & {
        action.name for action in plan.actions if isinstance(action, DeleteInstance | Purge)
    }
