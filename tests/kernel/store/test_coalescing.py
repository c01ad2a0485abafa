"""What a slow watcher is told, as a pure rule: the last state of each object, truthfully typed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.shared.storekit import Spec

from fleetplane.kernel.resources import AnyResource, Resource
from fleetplane.kernel.watch import Event, EventType, coalesce, enclosing

ADDED, MODIFIED, DELETED = EventType.ADDED, EventType.MODIFIED, EventType.DELETED


def thing(name: str, revision: int, created: int) -> AnyResource:
    return Resource(
        kind="thing",
        scope="s",
        name=name,
        uid=f"{name}{created}",
        labels={},
        spec=Spec(value=revision),
        status=None,
        conditions=(),
        revision=revision,
        created_revision=created,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def history(text: str) -> list[Event]:
    """`a+ a= a-`: object a added, modified, deleted, at revisions 11, 12, 13."""
    types = {"+": ADDED, "=": MODIFIED, "-": DELETED}
    created: dict[str, int] = {}
    events = []
    for revision, word in enumerate(text.split(), start=11):
        name, sign = word[0], word[1]
        created[name] = revision if sign == "+" else created.get(name, 1)
        events.append(
            Event(type=types[sign], resource=thing(name, revision, created[name]), revision=revision)
        )
    return events


def short(events: list[Event]) -> str:
    signs = {ADDED: "+", MODIFIED: "=", DELETED: "-"}
    return " ".join(f"{event.resource.name}{signs[event.type]}{event.revision}" for event in events)


def test_intermediate_states_are_skipped_and_the_last_is_kept() -> None:
    assert short(coalesce(history("a= b= a= a= b="))) == "a=14 b=15"


def test_added_then_modified_is_added_with_the_last_state() -> None:
    assert short(coalesce(history("a+ a= a="))) == "a+13"


def test_added_then_deleted_unseen_is_not_mentioned() -> None:
    assert short(coalesce(history("a+ a= a- b="))) == "b=14"


def test_modified_then_deleted_is_deleted() -> None:
    assert short(coalesce(history("a= a= a-"))) == "a-13"


def test_deleted_then_made_again_tells_both_in_order() -> None:
    assert short(coalesce(history("a= a- a+ a="))) == "a-12 a+14"
    assert short(coalesce(history("a- a+ a- a+"))) == "a-11 a+14"


def test_deleted_made_again_and_deleted_tells_of_the_incarnation_that_was_known() -> None:
    kept = coalesce(history("a- a+ a-"))
    assert short(kept) == "a-11"
    assert kept[0].resource.created_revision == 1


def test_an_event_that_stays_as_it_was_is_shared() -> None:
    events = history("a= b+")
    assert coalesce(events) == events  # the same objects, with their memos


def lived(steps: list[tuple[str, bool]], known: set[str]) -> list[Event]:
    """What happened to objects of which some were known before: each step changes one, or removes it."""
    live, words = set(known), []
    for name, removing in steps:
        if removing and name not in live:
            continue
        words.append(f"{name}{'-' if removing else '=' if name in live else '+'}")
        (live.discard if removing else live.add)(name)
    return history(" ".join(words))


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30)
KNOWN = st.sets(st.sampled_from("abc"))


@given(STEPS, KNOWN)
def test_a_reader_of_coalesced_events_ends_where_a_reader_of_all_does(
    steps: list[tuple[str, bool]], known: set[str]
) -> None:
    events = lived(steps, known)

    def follow(told: list[Event]) -> dict[str, int]:
        held = dict.fromkeys(known, 0)
        for event in told:
            name = event.resource.name
            match event.type:
                case EventType.ADDED:
                    assert name not in held
                    held[name] = event.revision
                case EventType.MODIFIED:
                    assert name in held
                    held[name] = event.revision
                case EventType.DELETED:
                    del held[name]
        return held

    kept = coalesce(events)
    assert follow(kept) == follow(events)
    assert [event.revision for event in kept] == sorted(event.revision for event in kept)
    assert len(kept) <= 2 * len({event.resource.name for event in events})


@given(STEPS, KNOWN, st.integers(0, 6))
def test_a_reader_who_is_cut_off_between_coalesced_events_ends_there_too(
    steps: list[tuple[str, bool]], known: set[str], received: int
) -> None:
    events = lived(steps, known)

    def follow(told: list[Event]) -> dict[str, int]:
        held = dict.fromkeys(known, 0)
        for event in told:
            if event.type is EventType.DELETED:
                held.pop(event.resource.name, None)  # it may have come and gone within what was coalesced
            else:
                held[event.resource.name] = event.revision
        return held

    got = coalesce(events)[:received]
    after = got[-1].revision if got else 0
    assert follow([*got, *(event for event in events if event.revision > after)]) == follow(events)


def test_a_scope_is_enclosed_by_itself_its_parents_and_the_root() -> None:
    assert list(enclosing("org/a/ws")) == ["org/a/ws", "org/a", "org", ""]
    assert list(enclosing("")) == [""]
