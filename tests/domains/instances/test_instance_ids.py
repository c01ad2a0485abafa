from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.instances import ids
from fleetplane.kernel.errors import InvalidArgument

VECTORS = [
    ("abc06awcb4f5hzmfey7qwt7s8a6q4", "abc", "0195c62c-8f2c-7f47-bbc7-bf347ca146b9"),
    ("knc0000000001r010000000000000", "knc", "00000000-0000-7000-8000-000000000000"),
    ("opr06bgm7733st2576nx5jht4ecjw", "opr", "01970a1c-e31e-7422-9cd5-e9651d11cc97"),
]

moments = st.integers(min_value=0, max_value=ids.MAX_UNIX_MS)
randomness = st.binary(min_size=ids.RANDOM_BYTES, max_size=ids.RANDOM_BYTES)
prefixes = st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=3)


@pytest.mark.parametrize(("text", "prefix", "uuid"), VECTORS)
def test_published_ids_decode_and_encode(text: str, prefix: str, uuid: str) -> None:
    assert ids.decode(text) == (prefix, UUID(uuid))
    assert ids.encode(prefix, UUID(uuid)) == text
    assert ids.validate(text) == text
    assert ids.storage_key(text) == f"{uuid}-{prefix}"


@given(prefixes, moments, randomness)
def test_every_generated_id_is_valid_and_tells_when_it_was_made(
    prefix: str, now_ms: int, random: bytes
) -> None:
    text = ids.generate(prefix, now_ms=now_ms, random=random)

    decoded, uuid = ids.decode(text)
    assert (decoded, uuid.version, uuid.variant) == (prefix, 7, "specified in RFC 4122")
    assert ids.encode(decoded, uuid) == text
    assert ids.created_at_ms(text) == now_ms


@given(moments, moments, randomness, randomness)
def test_ids_of_a_later_millisecond_sort_later(one: int, two: int, first: bytes, second: bytes) -> None:
    earlier, later = sorted((one, two))
    if earlier < later:
        assert ids.generate("knc", now_ms=earlier, random=first) < ids.generate(
            "knc", now_ms=later, random=second
        )


def test_all_random_bits_but_the_first_six_matter() -> None:
    zero = ids.generate("knc", now_ms=1, random=bytes(10))
    made = {ids.generate("knc", now_ms=1, random=(1 << bit).to_bytes(10, "big")) for bit in range(74)}

    assert len(made | {zero}) == 75


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "29 characters"),
        ("abc06awcb4f5hzmfey7qwt7s8a6q", "29 characters"),
        ("ab106awcb4f5hzmfey7qwt7s8a6q4", "three letters"),
        ("ABC06awcb4f5hzmfey7qwt7s8a6q4", "three letters"),
        ("abc06awcb4f5hzmfey7qwt7s8a6qu", "'u' as character 29"),
        ("abc06AWCB4F5HZMFEY7QWT7S8A6Q4", "'A' as character 6"),
        ("abc06awcb4f5hzmfey7qwt7s8a6q5", "must be zero"),
        ("abc00000000000000000000000000", "version 7"),
        ("abc0000000001r000000000000000", "version 7"),
    ],
)
def test_what_is_not_an_id_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as refused:
        ids.validate(text)
    assert refused.value.field == "instance_id"


def test_time_and_randomness_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="48 bits"):
        ids.generate("knc", now_ms=1 << 48, random=bytes(10))
    with pytest.raises(InvalidArgument, match="10 random bytes"):
        ids.generate("knc", now_ms=0, random=bytes(9))
    with pytest.raises(InvalidArgument, match="three letters"):
        ids.generate("knob", now_ms=0, random=bytes(10))
