from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.access import covers
from fleetplane.kernel.resources import AnyResource, Resource
from fleetplane.kernel.store.view import KindView

# The characters that sort around the separator are those that matter.
texts = st.text(alphabet="a/-.0b\x01é", max_size=5)


def resource(scope: str, name: str) -> AnyResource:
    return Resource(
        kind="k",
        scope=scope,
        name=name,
        uid="",
        labels={},
        spec=None,
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


@given(st.lists(st.tuples(texts, texts), unique=True, max_size=30), texts)
def test_a_list_has_exactly_what_its_scope_covers_in_order(places: list[tuple[str, str]], scope: str) -> None:
    view = KindView()
    for place in places:
        view.put(resource(*place))
    found = [(one.scope, one.name) for one in view.list(scope)]
    assert found == sorted(place for place in places if covers(scope, place[0]))
    assert view.count(scope) == len(found)


@given(st.lists(st.tuples(texts, texts), unique=True, max_size=20), st.data())
def test_a_list_follows_what_is_deleted(places: list[tuple[str, str]], data: st.DataObject) -> None:
    view = KindView()
    view.load(resource(*place) for place in places)
    gone = data.draw(st.sets(st.sampled_from(places)) if places else st.just(set()))
    for place in gone:
        view.delete(*place)
    assert [(one.scope, one.name) for one in view.list("")] == sorted(set(places) - gone)
    assert view.count("") == len(set(places) - gone)


class Seen:
    """The names that there are, as an index has them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def moved(self, before: AnyResource | None, after: AnyResource | None) -> None:
        if before is not None:
            self.names.remove(before.name)
        if after is not None:
            self.names.append(after.name)


def test_an_index_is_in_step_for_as_long_as_somebody_holds_it() -> None:
    view, seen = KindView(), Seen()
    view.put(resource("", "before"))
    view.feed(seen)
    assert seen.names == ["before"]
    view.put(resource("", "before"))
    view.put(resource("", "after"))
    view.delete("", "before")
    view.delete("", "never")
    assert seen.names == ["after"]
    names = seen.names
    del seen
    view.put(resource("", "later"))
    assert names == ["after"]
    view.feed(Seen())
    assert len(view._indexes) == 1, "those that are gone are forgotten"
