from __future__ import annotations

import msgspec
import pytest

from fleetplane.domains.edge.kinds import Capabilities
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.selectors import Selector, from_json, parse, to_json
from fleetplane.domains.edge.runs.target_spellings import SpelledTarget, TargetKind
from fleetplane.kernel.errors import InvalidArgument

HOST = Capabilities(
    os="macos", arch="aarch64", local_tools=("git", "docker"), labels={"site": "berlin", "rack": "7"}
)
TAGS = ("prod", "web")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("os=macos", True),
        ("os=darwin", True),
        ("os=linux", False),
        ("arch=aarch64 tools=git", True),
        ("tools=git,docker", True),
        ("tools=git,helm", False),
        ("labels=site=berlin,rack=7", True),
        ("labels=site=paris", False),
        ("labels=Exists(rack)", True),
        ("labels=Exists(row)", False),
        ("labels=In(site,paris,berlin)", True),
        ("labels=In(site,paris)", False),
        ("tags=prod,web", True),
        ("tags=prod,db", False),
        ("tags=AnyOf(db,web)", True),
        ("tags=AllOf(prod,web)", True),
        ("tags=NoneOf(db)", True),
        ("tags=NoneOf(web)", False),
        ("os=macos tags=prod labels=rack=7", True),
        ("os=macos tags=prod labels=rack=8", False),
        ("where:os in (linux,darwin),site=berlin,tags notin (db)", True),
        ("where:tools=git,tools=docker,!gpu", True),
        ("where:site in (oslo,paris)", False),
        ("where:os!=darwin", False),
    ],
)
def test_every_term_must_hold(text: str, fits: bool) -> None:
    selector = parse(text)
    assert selector.matches(HOST, TAGS) is fits
    assert from_json(to_json(selector)) == selector, "and it survives the way through JSON"


@pytest.mark.parametrize(
    "text",
    [
        "os",
        "os=",
        "color=red",
        "os=a os=b",
        "labels=site",
        "labels=In(site)",
        "labels=AnyOf(a)",
        "where:",
        "where:site in (",
        "where:site=a b",
        "tags=In(a,b)",
        "tags=",
        "tools=git,,docker",
        " ".join(["tags=a"] * 65),
        "arch=" + "x" * 257,
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse(text)
    assert refusal.value.field == "selector"


def test_both_spellings_of_a_labels_value_mean_the_same() -> None:
    one = from_json({"labels": [{"Equals": ["site", "berlin"]}, {"In": ["rack", ["7", "8"]]}]})
    other = from_json({"labels": [{"Equals": {"site": "berlin"}}, {"In": {"rack": ["7", "8"]}}]})
    assert one == other
    assert one.matches(HOST, ())


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        {"oss": "linux"},
        {"tools": "git"},
        {"tools": [7]},
        {"labels": [{}]},
        {"tags": [{"Some": "a"}]},
        {"labels": [{"Equals": "site"}]},
        {"labels": [{"Equals": ["a", "b"], "Exists": "c"}]},
        {"tags": [{"AnyOf": []}]},
        {"os": 7},
    ],
)
def test_json_that_says_something_else_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        from_json(value)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("all", SpelledTarget(kind=TargetKind.ALL)),
        ("@web-1", SpelledTarget(kind=TargetKind.NODE, name="web-1")),
        ("group:rack 7", SpelledTarget(kind=TargetKind.GROUP, name="rack 7")),
        ("os=linux", SpelledTarget(kind=TargetKind.SELECTOR, selector=Selector(os="linux"))),
    ],
)
def test_a_target_as_people_type_it(text: str, target: SpelledTarget) -> None:
    assert targets.parse(text) == target
    assert targets.from_json(targets.to_json(target)) == target


def test_everyone_can_be_said_in_two_ways() -> None:
    assert targets.from_json("All") == targets.from_json({"All": None}) == SpelledTarget(kind=TargetKind.ALL)


@pytest.mark.parametrize(
    "value", ["", "@", "group:", {}, {"Node": 7}, {"All": 1}, {"Node": "a", "Group": "b"}, {"Some": "x"}, 7]
)
def test_a_target_that_names_nobody_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        targets.from_json(value)


def test_a_selector_stored_before_the_shared_language_decodes_and_shows_as_it_did() -> None:
    stored = {
        "os": "linux",
        "arch": "",
        "tools": ["git"],
        "labels": [{"op": "In", "key": "site", "values": ["berlin"]}],
        "tags": [{"op": "Has", "tags": ["prod"]}],
    }
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=Selector)
    assert found.matches(Capabilities(os="linux", local_tools=("git",), labels={"site": "berlin"}), ("prod",))
    assert to_json(found) == {
        "os": "linux",
        "arch": None,
        "tools": ["git"],
        "labels": [{"In": ["site", ["berlin"]]}],
        "tags": [{"Has": "prod"}],
    }


def test_a_daemons_own_label_does_not_stand_in_for_its_system() -> None:
    assert not parse("os=linux").matches(Capabilities(labels={"os": "linux"}), ())


def test_long_words_do_not_come_back_whole() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse("z" * 5000)
    assert len(str(refusal.value)) < 300
    assert selectors.TEXT_LIMIT < 5000
