"""What a plan comes to, object by object."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.fleet.plans.decisions import (
    OWNER_LABEL,
    ObjectAddress,
    PlanOperation,
    ShownPart,
    check_unique,
    operation,
    owned_labels,
    ownership_warning,
    prunable,
)
from fleetplane.kernel.errors import Conflict, InvalidArgument

OWNERS = st.sampled_from(["", "site", "other"])
SCOPES = st.sampled_from(["/", "/tenants/a", "/tenants/a/groups/x", "/tenants/ab", "/tenants/b"])
ADDRESSES = st.builds(ObjectAddress, kind=st.sampled_from(["one", "two"]), scope=SCOPES, name=st.text("nm"))
OBJECTS = st.dictionaries(ADDRESSES, OWNERS, max_size=12)


def labels(owner: str) -> dict[str, str]:
    return {OWNER_LABEL: owner} if owner else {}


@given(OBJECTS, st.sets(ADDRESSES, max_size=6), SCOPES)
def test_pruning_takes_only_what_the_owner_made_within_the_scope_and_no_longer_names(
    objects: dict[ObjectAddress, str], named: set[ObjectAddress], scope: str
) -> None:
    doomed = prunable(
        ((address, labels(owner)) for address, owner in objects.items()),
        owner="site",
        scope=scope,
        named=named,
    )

    assert set(doomed) == {
        address
        for address, owner in objects.items()
        if owner == "site"
        and address not in named
        and (scope == "/" or (address.scope + "/").startswith(scope + "/"))
    }


def test_what_is_the_same_is_nothing_and_what_differs_is_told_field_by_field() -> None:
    before = ShownPart(labels={"a": "1"}, spec={"size": 2})
    after = ShownPart(labels={"a": "1"}, spec={"size": 3})

    assert operation(before, before) == (PlanOperation.NOTHING, ())
    assert operation(None, after)[0] is PlanOperation.CREATE
    assert operation(before, None)[0] is PlanOperation.DELETE
    change, fields = operation(before, after)
    assert change is PlanOperation.CHANGE
    assert [(one.field, one.old, one.new) for one in fields] == [("spec.size", 2, 3)]


def test_labels_left_out_stay_and_the_owner_is_added() -> None:
    assert owned_labels(None, {"a": "1"}, owner="site") == {"a": "1", OWNER_LABEL: "site"}
    assert owned_labels({}, {"a": "1"}, owner="") == {}


def test_what_another_owner_has_is_refused_unless_it_is_taken_over() -> None:
    address = ObjectAddress("one", "/tenants/a", "n")

    with pytest.raises(Conflict, match="belongs to other"):
        ownership_warning(address, labels("other"), owner="site", take_over=False)
    assert "will belong to site" in ownership_warning(address, labels("other"), owner="site", take_over=True)
    assert "had no owner" in ownership_warning(address, {}, owner="site", take_over=False)
    assert ownership_warning(address, labels("site"), owner="site", take_over=False) == ""
    assert ownership_warning(address, labels("other"), owner="", take_over=False) == ""


def test_an_object_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_unique(
            [ObjectAddress("one", "/", "a"), ObjectAddress("one", "/", "b"), ObjectAddress("one", "/", "a")]
        )
    assert refused.value.field == "objects[2]"
