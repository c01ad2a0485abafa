"""The selector language: what it accepts, what it means, and when two selectors can mean one agent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.fleet import selectors
from fleetplane.fleet.selectors import Selector, facts_of, parse
from fleetplane.kernel.errors import InvalidArgument

LABELS = {"env": "production", "region": "us-east-1", "empty": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("env=production", True),
        ("env==production", True),
        ("env = production", True),
        ("env=staging", False),
        ("env!=staging", True),
        ("env!=production", False),
        ("absent!=anything", True),
        ("env", True),
        ("absent", False),
        ("!absent", True),
        ("!env", False),
        ("env in (production, staging)", True),
        ("env in(production)", True),
        ("env notin (production,staging)", False),
        ("absent notin (a,b)", True),
        ("absent in (a,b)", False),
        ("env=production,region=us-east", False),  # no prefix matching
        ("env=production,region=us-east-1", True),
        ("env in (a,production),!absent,region!=eu", True),
        ("empty=", True),
        ("env=", False),
    ],
)
def test_a_selector_matches_labels(text: str, matches: bool) -> None:
    assert parse(text).matches(LABELS) is matches


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        ",",
        "env=production,",
        "=x",
        "env=a b",
        "env in ()x",
        "env in (a",
        "env in a,b",
        "-a=b",
        "a-=b",
        "env=é",
        "a" * 64,
        "k=" + "v" * 64,
        "env~x",
        "!",
        "!a=b",
        "x" * 5000,
    ],
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        ("env=a", "env=b", False),
        ("env=a", "env=a", True),
        ("env=a", "region=b", True),
        ("env=a", "env!=a", False),
        ("env=a", "env!=b", True),
        ("env", "!env", False),
        ("env=a", "!env", False),
        ("env!=a", "!env", True),
        ("env in (a,b)", "env in (b,c)", True),
        ("env in (a,b)", "env in (c)", False),
        ("env in (a,b)", "env notin (a,b)", False),
        ("env notin (a)", "env notin (b)", True),
        ("env", "env notin (a)", True),
        ("env=a,tier=web", "env=a,tier=db", False),
    ],
)
def test_two_selectors_meet_if_some_agent_could_match_both(one: str, other: str, may: bool) -> None:
    assert parse(one).may_meet(parse(other)) is may
    assert parse(other).may_meet(parse(one)) is may


KEYS, VALUES = st.sampled_from("ab"), st.sampled_from("xyz")
REQUIREMENTS = st.one_of(
    st.builds("{}={}".format, KEYS, VALUES),
    st.builds("{}!={}".format, KEYS, VALUES),
    KEYS,
    st.builds("!{}".format, KEYS),
    st.builds("{} in ({},{})".format, KEYS, VALUES, VALUES),
    st.builds("{} notin ({},{})".format, KEYS, VALUES, VALUES),
)
SELECTORS = st.lists(REQUIREMENTS, min_size=1, max_size=4).map(",".join)


@given(SELECTORS, SELECTORS)
def test_meeting_agrees_with_trying_every_set_of_labels(one: str, other: str) -> None:
    values = [None, *"xyzw"]  # w stands for every value that no selector names
    worlds = [
        {key: value for key, value in (("a", a), ("b", b)) if value is not None}
        for a in values
        for b in values
    ]
    both = any(parse(one).matches(world) and parse(other).matches(world) for world in worlds)
    assert parse(one).may_meet(parse(other)) is both


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_refused_and_nothing_else(text: str) -> None:
    try:
        parse(text).matches(LABELS)
    except InvalidArgument as error:
        assert error.field == "label_selector"


def test_labels_are_bounded_in_number_and_form() -> None:
    assert list(selectors.label_problems({"env": "production", "a/b.c-d_e": ""})) == []
    assert [key for key, _ in selectors.label_problems({"-a": "b", "a": "b c"})] == ["-a", "a"]
    assert [key for key, _ in selectors.label_problems({f"k{n}": "" for n in range(33)})] == [""]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("tags=prod", True),
        ("tags=db", False),
        ("tags in (db,web)", True),
        ("tags=prod,tags=web", True),
        ("tags!=db", True),
        ("tags!=web", False),
        ("tags notin (db,web)", False),
        ("tags", True),
        ("!tags", False),
        ("tools", False),
        ("!tools", True),
    ],
)
def test_a_fact_with_several_values_is_met_by_one_and_refused_by_any(text: str, matches: bool) -> None:
    assert parse(text).matches(facts_of({}, {"tags": ("prod", "web"), "tools": ()})) is matches


def test_a_label_never_answers_for_what_the_server_knows_of_an_agent() -> None:
    facts = facts_of({"role": "master", "label/site": "oslo", "site": "berlin"}, {"role": "worker", "os": ""})
    assert parse("role=worker,label/role=master,label/site=berlin,site=berlin").matches(facts)
    assert not parse("role=master").matches(facts)
    assert parse("!os").matches(facts_of({"os": "linux"}, {"os": ""}))


def test_a_selector_without_requirements_means_everyone() -> None:
    assert Selector().matches({})
