"""Resources as stored: exact both ways, and open to fields that come later."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.errors import IntegrityError, InvalidArgument
from fleetplane.kernel.resources import Condition, Key, Kind, Resource, check_key, check_labels, encode


class Spec(msgspec.Struct, frozen=True):
    text: str = ""
    number: float = 0.0
    blob: bytes = b""


class NewerSpec(msgspec.Struct, frozen=True):
    text: str = ""
    added: int = 7


KIND: Kind[Spec, Spec] = Kind("thing", Spec, Spec)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
SPECS = st.builds(Spec, text=TEXT, number=st.floats(allow_nan=False), blob=st.binary(max_size=20))
CONDITIONS = st.builds(
    Condition,
    type=TEXT,
    status=TEXT,
    reason=TEXT,
    message=TEXT,
    changed_at_ns=st.none() | st.integers(0, 2**62),
    writer=TEXT,
)
COUNTERS = st.integers(1, 2**62)


def resource(spec: Spec) -> Resource[Spec, Spec]:
    return Resource(
        kind="thing",
        scope="s",
        name="n",
        uid="u",
        labels={},
        spec=spec,
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


@given(
    st.builds(
        Resource,
        kind=st.just("thing"),
        scope=TEXT,
        name=TEXT,
        uid=TEXT,
        labels=st.dictionaries(TEXT, TEXT),
        spec=SPECS,
        status=st.none() | SPECS,
        conditions=st.lists(CONDITIONS, max_size=3).map(tuple),
        revision=COUNTERS,
        created_revision=COUNTERS,
        generation=COUNTERS,
        created_at_ns=COUNTERS,
        updated_at_ns=COUNTERS,
    )
)
def test_a_resource_is_decoded_exactly_as_it_was_encoded(made: Resource[Spec, Spec]) -> None:
    assert KIND.decode(encode(made)) == made


def test_numbers_that_json_cannot_say_are_kept() -> None:
    kept = KIND.decode(encode(resource(Spec(number=math.nan)))).spec.number
    assert math.isnan(kept)
    assert KIND.decode(encode(resource(Spec(number=-math.inf)))).spec.number == -math.inf


def test_a_newer_version_reads_what_an_older_one_wrote() -> None:
    newer: Kind[NewerSpec, Spec] = Kind("thing", NewerSpec, Spec)
    assert newer.decode(encode(resource(Spec(text="kept")))).spec == NewerSpec(text="kept", added=7)


def test_a_body_that_is_not_of_its_kind_is_an_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="thing"):
        KIND.decode(b"\x01")


def test_what_cannot_be_encoded_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument):
        encode(resource(Spec(text="\ud800")))


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (Key("", "s", "n"), "kind"),
        (Key("k" * 65, "s", "n"), "kind"),
        (Key("k", "s" * 1025, "n"), "scope"),
        (Key("k", "s", ""), "name"),
        (Key("k", "s", "é" * 513), "name"),
        (Key("k", "s", "a\0"), "name"),
    ],
)
def test_an_address_beyond_its_limits_names_the_field(key: Key, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_key(key)
    assert refused.value.field == field


def test_labels_are_bounded() -> None:
    check_labels({"a" * 256: "b" * 256})
    with pytest.raises(InvalidArgument):
        check_labels({"a" * 257: ""})
    with pytest.raises(InvalidArgument):
        check_labels({f"l{number}": "" for number in range(65)})


def test_keys_describe_themselves() -> None:
    assert str(Key("gpu", "node/a", "0")) == "gpu node/a/0"
    assert str(Key("gpu", "", "0")) == "gpu 0"
    assert KIND.key("s", "n") == resource(Spec()).key
