"""Merge patches and differences of documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from fleetplane.fleet.plans.documents import applied, difference, merge_patch, same

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)

# The examples of RFC 7396, appendix A: original, patch, result.
RFC_7396: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


@pytest.mark.parametrize(("original", "patch", "result"), RFC_7396)
def test_merge_patches_do_what_the_rfc_says(original: Any, patch: Any, result: Any) -> None:
    assert merge_patch(original, patch) == result


@given(DOCUMENTS, DOCUMENTS)
def test_a_merge_patch_changes_neither_of_its_arguments_and_can_be_repeated(target: Any, patch: Any) -> None:
    before = repr((target, patch))
    once = merge_patch(target, patch)
    assert repr((target, patch)) == before
    assert same(merge_patch(once, patch), once)


@given(DOCUMENTS, DOCUMENTS)
def test_applying_a_difference_gives_the_target(old: Any, new: Any) -> None:
    assert same(applied(old, difference(old, new)), new)


@given(DOCUMENTS)
def test_a_document_does_not_differ_from_itself(document: Any) -> None:
    assert difference(document, document) == []


@given(DOCUMENTS, DOCUMENTS)
def test_what_differs_is_named_and_nothing_else(old: Any, new: Any) -> None:
    changes = difference(old, new)
    assert bool(changes) is not same(old, new)
    assert all(
        change.old is UNSET or change.new is UNSET or repr(change.old) != repr(change.new)
        for change in changes
    )


def test_a_field_is_spelled_as_people_write_it() -> None:
    old: Any = {"spec": {"servers": [{"address": "a", "weight": 1}]}, "labels": {"site/owner": "x"}}
    new: Any = {"spec": {"servers": [{"address": "b", "weight": 1}]}, "labels": {"site/owner": "y"}}

    assert [(one.field, one.old, one.new) for one in difference(old, new)] == [
        ('labels["site/owner"]', "x", "y"),
        ("spec.servers[0].address", "a", "b"),
    ]


def test_true_is_not_one() -> None:
    assert [one.field for one in difference({"a": 1}, {"a": True})] == ["a"]
