from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instances.configuration_samples import configuration, example

from fleetplane.domains.instances.configuration import InstancesDocument, merge
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.kinds import GroupOverride
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, InvalidArgument, NotFound

POOLS = {"workers": ["subnet-1", "subnet-2"], "ingress": ["subnet-3"], "secure": ["subnet-4"]}

json_objects = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers() | st.lists(st.integers(), max_size=2), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def fleet(**changes: Any) -> InstancesDocument:
    return configuration(
        **{
            "shard__subnet_pools": POOLS,
            "shard__dynamic_subnet_pools": ["workers", "ingress"],
            "defaults": {"vars": {"level": "defaults", "only": "defaults"}, "args": {"Disk": {"Size": 1}}},
            "templates__worker": {
                "kind": "knd",
                "arch": "arm64",
                "tenants": ["*"],
                "size": 7,
                "instance_type": "small",
                "subnet_pool": "workers",
                "vars": {"level": "template", "t": "template"},
                "args": {"Disk": {"Type": "ssd"}, "Tags": ["a", "b"]},
            },
            "templates__bare": {"kind": "bar", "arch": "amd64", "tenants": ["default"]},
            "groups": {
                "default": {
                    "main": {
                        "template": "worker",
                        "size": 3,
                        "vars": {"level": "group"},
                        "args": {"Disk": {"Size": 9}, "Tags": ["c"]},
                        "drain_timeout": "0s",
                    },
                    "idle": {"template": "worker"},
                }
            },
            **changes,
        }
    )


def effective(config: InstancesDocument, key: str, override: GroupOverride | None = None) -> EffectiveGroup:
    group = merge.effective(config, "default", key, override)
    assert group is not None
    return group


def test_the_group_overrides_its_template_and_that_the_defaults() -> None:
    group = effective(fleet(), "main")

    assert group.vars == {"level": "group", "only": "defaults", "t": "template"}
    assert group.args == {"Disk": {"Size": 9, "Type": "ssd"}, "Tags": ["c"]}
    assert (group.prefix, group.arch, group.instance_type) == ("knd", "arm64", "small")
    assert (group.subnet_pool, group.subnets) == ("workers", ("subnet-1", "subnet-2"))
    assert (group.is_static, group.size, group.drain_timeout_seconds) == (True, 3, 0.0)


def test_a_group_without_a_size_has_none_whatever_its_template_says() -> None:
    assert effective(fleet(), "idle").size == 0
    assert effective(fleet(), "idle").drain_timeout_seconds is None


def test_operators_are_shown_what_the_group_says_not_what_it_inherits() -> None:
    stated = effective(fleet(), "main").stated

    assert (stated.instance_type, stated.subnet_pool, stated.vars) == ("", "", {"level": "group"})


def test_a_run_time_change_sets_size_type_and_vars_of_a_configured_group() -> None:
    change = GroupOverride(size=0, instance_type="large", vars={"extra": "1"})

    group = effective(fleet(), "main", change)

    assert (group.size, group.instance_type, group.is_static) == (0, "large", True)
    assert group.vars == {"level": "group", "only": "defaults", "t": "template", "extra": "1"}
    assert group.stated.vars == {"level": "group", "extra": "1"}
    assert group.args == effective(fleet(), "main").args


def test_a_configured_template_and_pool_win_over_those_of_an_older_change() -> None:
    group = effective(fleet(), "main", GroupOverride(template="bare", subnet_pool="ingress", size=1))

    assert (group.template, group.subnet_pool) == ("worker", "workers")


def test_a_group_made_at_run_time_takes_what_it_does_not_name_from_its_template() -> None:
    group = effective(fleet(), "new", GroupOverride(template="worker", size=2))

    assert (group.is_static, group.size, group.instance_type) == (False, 2, "small")
    assert group.subnet_pool == group.stated.subnet_pool == "workers"


def test_a_group_that_nobody_has_is_none() -> None:
    assert merge.effective(fleet(), "default", "other", None) is None
    assert merge.effective(fleet(), "stranger", "main", None) is None


def test_all_groups_are_listed_in_order() -> None:
    overrides = {
        ("default", "new"): GroupOverride(template="bare", size=1),
        ("acme", "main"): GroupOverride(template="worker", size=2),
        ("default", "idle"): GroupOverride(size=5),
    }

    listed = merge.groups(fleet(), overrides)

    assert [(group.tenant, group.key, group.size) for group in listed] == [
        ("acme", "main", 2),
        ("default", "idle", 5),
        ("default", "main", 3),
        ("default", "new", 1),
    ]


def test_a_group_whose_template_is_gone_is_neither_listed_nor_taken_for_deleted() -> None:
    overrides = {("default", "new"): GroupOverride(template="retired", size=4)}

    assert [group.key for group in merge.groups(fleet(), overrides)] == ["idle", "main"]
    assert merge.unresolved(fleet(), overrides) == {
        ("default", "new"): "template 'retired' is not in the configuration, or not for 'default'"
    }
    with pytest.raises(FailedPrecondition, match="no longer has"):
        merge.effective(fleet(), "default", "new", overrides["default", "new"])


@given(json_objects, json_objects)
def test_merging_keeps_all_keys_lets_the_upper_value_win_and_changes_neither(
    below: dict[str, object], above: dict[str, object]
) -> None:
    before = repr((below, above))

    merged = merge.deep_merge(below, above)

    assert set(merged) == {*below, *above}
    assert all(merged[key] == value for key, value in above.items() if not isinstance(value, dict))
    assert all(merged[key] == value for key, value in below.items() if key not in above)
    assert merge.deep_merge(merged, above) == merged
    assert repr((below, above)) == before


@pytest.mark.parametrize(
    ("key", "override", "present", "error", "message"),
    [
        ("main", GroupOverride(template="bare"), False, FailedPrecondition, "with template 'worker'"),
        (
            "main",
            GroupOverride(subnet_pool="workers"),
            True,
            FailedPrecondition,
            "subnet pool of group 'main'",
        ),
        ("main", GroupOverride(size=-1), True, InvalidArgument, "-1 instances"),
        ("new", GroupOverride(size=1), False, InvalidArgument, "needs a template"),
        ("new", GroupOverride(template="wroker"), False, NotFound, "did you mean 'worker'"),
        ("new", GroupOverride(template="wroker"), True, NotFound, "did you mean 'worker'"),
        ("new", GroupOverride(template="bare"), False, InvalidArgument, "has no subnet pool"),
        ("new", GroupOverride(template="bare", subnet_pool="nope"), False, InvalidArgument, "no subnet pool"),
        ("new", GroupOverride(subnet_pool="secure"), True, FailedPrecondition, "not open to groups"),
        ("New", GroupOverride(template="worker"), False, InvalidArgument, "lower-case"),
        ("a--b", GroupOverride(template="worker"), False, InvalidArgument, "two hyphens"),
        ("", GroupOverride(template="worker"), False, InvalidArgument, "must not be empty"),
        ("x" * 33, GroupOverride(template="worker"), False, InvalidArgument, "longer than 32"),
    ],
)
def test_a_change_that_the_configuration_forbids_is_refused_with_the_reason(
    key: str, override: GroupOverride, present: bool, error: type[FleetplaneError], message: str
) -> None:
    with pytest.raises(error) as caught:
        merge.check_override(fleet(), "default", key, override, present)

    assert message in caught.value.message
    assert caught.value.field is not None


def test_an_inherited_pool_must_be_open_to_groups_made_at_run_time_too() -> None:
    config = fleet(shard__dynamic_subnet_pools=["ingress"])

    with pytest.raises(FailedPrecondition, match="'workers' is not open"):
        merge.check_override(config, "default", "new", GroupOverride(template="worker"), False)


@pytest.mark.parametrize(
    ("key", "override", "present"),
    [
        ("main", GroupOverride(size=0), False),
        ("main", GroupOverride(template="worker", size=2, instance_type="l", vars={"a": "b"}), True),
        ("new", GroupOverride(template="worker"), False),
        ("new", GroupOverride(template="bare", subnet_pool="ingress"), False),
        ("new", GroupOverride(size=9), True),
    ],
)
def test_a_change_that_the_configuration_allows_passes(
    key: str, override: GroupOverride, present: bool
) -> None:
    merge.check_override(fleet(), "default", key, override, present)


def test_without_any_pools_a_new_group_needs_none() -> None:
    config = configuration(templates__worker__tenants=["default"])
    merge.check_override(config, "default", "new", GroupOverride(template="worker"), False)


def test_a_second_change_keeps_what_it_does_not_name_but_always_sets_the_size() -> None:
    first = GroupOverride(template="worker", size=5, instance_type="l", vars={"a": "1", "b": "1"})

    assert merge.merge_override(first, GroupOverride(vars={"b": "2", "c": "2"})) == GroupOverride(
        template="worker", size=0, instance_type="l", vars={"a": "1", "b": "2", "c": "2"}
    )
    assert merge.merge_override(None, first) == first


def test_an_instance_made_on_demand_adds_its_own_choices_to_the_group() -> None:
    config = fleet()
    group = effective(config, "main")

    instance = merge.on_demand(
        config, group, instance_type="huge", subnet_pool="ingress", vars={"level": "own"}
    )

    assert (instance.instance_type, instance.subnets, instance.vars["level"]) == (
        "huge",
        ("subnet-3",),
        "own",
    )
    assert instance.args == group.args
    assert merge.on_demand(config, group, template="bare").prefix == "bar"
    with pytest.raises(FailedPrecondition, match="not open"):
        merge.on_demand(config, group, subnet_pool="secure")
    with pytest.raises(NotFound, match="no template"):
        merge.on_demand(config, group, template="nope")


def test_the_nat_group_is_marked_so_that_operators_do_not_see_it() -> None:
    config = fleet(
        groups={
            "default": {"nat": {"template": "worker", "instance_type": "s"}, "x": {"template": "worker"}}
        },
        nat={"default": {"group": "nat", "instance_type_ladder": ["s", "m"]}},
    )

    assert [(group.key, group.is_nat) for group in merge.groups(config, {})] == [("nat", True), ("x", False)]


def test_the_example_merges() -> None:
    groups = {group.key: group for group in merge.groups(example(), {})}

    assert {key: group.size for key, group in groups.items()} == {"apps": 0, "ingress": 2, "main": 1}
    assert groups["ingress"].subnets == ("subnet-23456789",)
    assert groups["ingress"].drain_timeout_seconds == 600.0
    assert groups["main"].args["MetadataOptions"] == {
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
        "InstanceMetadataTags": "enabled",
    }
