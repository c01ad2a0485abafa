from __future__ import annotations

import json
from typing import Any

import pytest

from fleetplane.client.objects import Expectation, Object
from fleetplane.client.watches import EventReader, Watch
from fleetplane.kernel.errors import Compacted, IntegrityError, PermissionDenied, Unavailable


def gpu(name: str, revision: int, **status: Any) -> dict[str, Any]:
    return {
        "kind": "gpu",
        "metadata": {"name": name, "scope": "/", "revision": revision},
        "spec": {},
        "status": status,
        "conditions": [{"type": "Ready", "status": status.get("ready", "False"), "reason": "Why"}],
    }


def told(watch: Watch, kind: str, data: Any, mark: int = 0) -> list[tuple[str, str]]:
    changes = watch.on_event(str(mark or ""), kind, json.dumps(data))
    return [(one.type, one.object.name) for one in changes]


def bookmark(watch: Watch, revision: int) -> list[tuple[str, str]]:
    return told(watch, "bookmark", {"revision": revision}, revision)


def begun(*names: str) -> Watch:
    """A watch that has seen these objects, up to revision 10."""
    watch = Watch(of="gpus")
    watch.request()
    for number, name in enumerate(names):
        assert told(watch, "added", gpu(name, number + 1)) == [("added", name)]
    assert bookmark(watch, 10) == []
    return watch


def test_events_are_read_line_by_line_and_comments_left_out() -> None:
    reader = EventReader()
    lines = [": hello", "id: 7", "event: added", "data: {", "data: }", "", "", "event: x", "data:y", ""]
    assert [made for line in lines if (made := reader.line(line))] == [("7", "added", "{\n}"), ("", "x", "y")]


def test_a_watch_goes_on_after_the_last_revision_it_has_seen() -> None:
    watch = begun("a")
    assert watch.request().query["after"] == "10"
    assert told(watch, "modified", gpu("a", 11), 11) == [("modified", "a")]
    assert told(watch, "deleted", gpu("a", 12), 12) == [("deleted", "a")]
    assert watch.request().query["after"] == "12"


def test_a_snapshot_that_was_cut_off_begins_anew() -> None:
    watch = Watch(of="gpus")
    watch.request()
    told(watch, "added", gpu("a", 1))
    assert watch.request().query["after"] == ""
    assert told(watch, "added", gpu("a", 1)) == []
    assert told(watch, "added", gpu("b", 2)) == [("added", "b")]


def test_after_a_compaction_only_differences_are_told() -> None:
    watch = begun("same", "changed", "gone")
    assert told(watch, "compacted", {"reason": "Compacted"}) == []
    assert watch.request().query["after"] == ""
    assert told(watch, "added", gpu("same", 1)) == []
    assert told(watch, "added", gpu("changed", 20)) == [("modified", "changed")]
    assert told(watch, "added", gpu("new", 21)) == [("added", "new")]
    assert bookmark(watch, 30) == [("deleted", "gone")]
    assert watch.after == 30


def test_a_compaction_is_raised_where_that_was_asked_for() -> None:
    watch = Watch(of="gpus", after=5, raise_compacted=True)
    watch.request()
    with pytest.raises(Compacted):
        told(watch, "compacted", {})


def test_a_bare_deletion_shows_the_last_that_was_known() -> None:
    watch = begun("a")
    bare = {"kind": "gpu", "metadata": {"name": "a", "scope": "/"}}
    (change,) = watch.on_event("11", "deleted", json.dumps(bare))
    assert change.object.metadata.revision == 1


def test_what_another_connection_would_not_mend_is_raised() -> None:
    watch = begun()
    assert watch.on_end(Unavailable("away"), jitter=0.5) >= 0
    assert watch.on_end(None, jitter=0.5) >= 0
    with pytest.raises(PermissionDenied):
        watch.on_end(PermissionDenied("no"), jitter=0.5)


def test_a_server_that_asks_for_patience_gets_it() -> None:
    assert begun().on_end(Unavailable("busy", retry_after_seconds=7.0), jitter=0.0) >= 7.0


@pytest.mark.parametrize("data", ["", "{", "[]", "1", '{"kind": "gpu"}', '{"kind":1,"metadata":[]}'])
def test_an_event_that_is_no_object_is_an_error_and_no_crash(data: str) -> None:
    with pytest.raises(IntegrityError):
        list(begun().on_event("11", "added", data))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Ready", False),
        ("Ready=false", True),
        ("Ready=Unknown", False),
        (".status.health=good", True),
        (".status.health=bad", False),
        (".status.none=x", False),
        (".metadata.revision=3", True),
        ("deleted", False),
    ],
)
def test_what_is_waited_for_is_a_condition_a_field_or_the_end(text: str, holds: bool) -> None:
    found = Object.of(gpu("a", 3, health="good"))
    assert Expectation.parsed(text).holds(found) is holds
    assert Expectation.parsed(text).holds(None) is (text == "deleted")


@pytest.mark.parametrize("text", ["", "=x", "Ready=maybe", ".status.x", "Ready="])
def test_what_cannot_be_waited_for_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is True, False or Unknown|is neither"):
        Expectation.parsed(text)


def test_it_is_told_what_is_the_case_instead() -> None:
    assert Expectation.parsed("Ready").told(Object.of(gpu("a", 1))) == "Ready is False (Why)"
