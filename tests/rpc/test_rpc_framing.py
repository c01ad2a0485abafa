"""Frames survive any way of being cut into chunks, and nothing else is taken for a frame."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.rpc.serving.framing import (
    CUT_HEAD_BYTES,
    DEFLATE,
    GZIP,
    IDENTITY,
    CutMessage,
    Framed,
    FrameDecoder,
    FramingError,
    MessageTooLarge,
    compress,
    decompress,
    prefix,
)

LIMIT = 1000
payloads = st.lists(st.binary(max_size=200), max_size=8)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def decode(chunks: list[bytes], *, encoding: bytes = IDENTITY, limit: int = LIMIT) -> list[bytes]:
    decoder = FrameDecoder(limit=limit, encoding=encoding)
    found: list[bytes] = []
    for chunk in chunks:
        decoder.feed(chunk)
        while (message := decoder.take()) is not None:
            found.append(message)
        assert decoder.buffered_bytes <= limit + 5
    decoder.finish()
    return found


@given(payloads, st.lists(st.integers(min_value=0)))
def test_messages_survive_any_cutting(messages: list[bytes], places: list[int]) -> None:
    assert decode(cut(b"".join(prefix(message) for message in messages), places)) == messages


@given(payloads, st.lists(st.integers(min_value=0)), st.sampled_from([GZIP, DEFLATE]))
def test_compressed_messages_survive_any_cutting(
    messages: list[bytes], places: list[int], encoding: bytes
) -> None:
    data = b"".join(prefix(compress(message, encoding), compressed=True) for message in messages)
    assert decode(cut(data, places), encoding=encoding) == messages


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_any_bytes_give_messages_or_a_named_error(chunks: list[bytes]) -> None:
    try:
        messages = decode(chunks, encoding=GZIP)
    except (FramingError, MessageTooLarge):
        return
    assert all(len(message) <= LIMIT for message in messages)


@given(st.binary(min_size=1, max_size=300), st.sampled_from([GZIP, DEFLATE]))
def test_any_bytes_in_place_of_a_compressed_message_are_refused_or_read(data: bytes, encoding: bytes) -> None:
    with contextlib.suppress(FramingError, MessageTooLarge):
        assert len(decompress(data, encoding, LIMIT)) <= LIMIT


def test_a_message_over_the_limit_is_refused_by_its_prefix_alone() -> None:
    with pytest.raises(MessageTooLarge, match=r"1001 bytes .* limit of 1000 bytes"):
        decode([prefix(bytes(1001))[:5]])


def test_a_message_at_the_limit_passes() -> None:
    assert decode([prefix(bytes(LIMIT))]) == [bytes(LIMIT)]
    assert decode([prefix(compress(bytes(LIMIT), GZIP), compressed=True)], encoding=GZIP) == [bytes(LIMIT)]


@pytest.mark.parametrize("size", [LIMIT + 1, 50_000_000])
def test_a_message_is_measured_while_it_is_decompressed(size: int) -> None:
    with pytest.raises(MessageTooLarge):
        decompress(gzip.compress(bytes(size)), GZIP, LIMIT)


@pytest.mark.parametrize(
    "broken",
    [b"", b"junk", gzip.compress(b"x")[:-1], gzip.compress(b"x") + b"y", gzip.compress(b"x") * 2],
    ids=["empty", "junk", "truncated", "trailing", "two"],
)
def test_a_message_is_exactly_one_compressed_stream(broken: bytes) -> None:
    with pytest.raises(FramingError):
        decompress(broken, GZIP, LIMIT)


def test_deflate_means_the_zlib_format() -> None:
    assert decompress(zlib.compress(b"abc"), DEFLATE, LIMIT) == b"abc"


def test_a_compressed_message_in_a_call_without_compression_is_an_error() -> None:
    with pytest.raises(FramingError, match="named no compression"):
        decode([prefix(b"x", compressed=True)])


def test_half_a_message_at_the_end_is_an_error() -> None:
    with pytest.raises(FramingError, match="middle of a message"):
        decode([prefix(b"abc")[:-1]])


def test_framed_messages_join_into_one_chunk() -> None:
    joined = Framed.join([Framed(b"a"), Framed(b""), Framed(b"ccc")])
    assert (joined.messages, decode([joined.body])) == (3, [b"a", b"", b"ccc"])
    assert repr(joined) == "<Framed messages=3 bytes=19>"


def test_framed_is_immutable_and_compares_by_its_bytes() -> None:
    framed = Framed(b"a")
    with pytest.raises(AttributeError):
        framed.body = b""
    assert framed == Framed(b"a")
    assert len({framed, Framed(b"a"), Framed(b"b")}) == 2


@pytest.mark.parametrize("step", [977, 65_536, 1 << 30])
def test_a_message_that_is_too_large_may_be_cut_and_what_follows_is_whole(step: int) -> None:
    large, small = bytes(range(256)) * 1024, b"small"
    body = b"".join(struct.pack(">BI", 0, len(one)) + one for one in (small, large, small))
    decoder = FrameDecoder(limit=CUT_HEAD_BYTES * 2, cut=True)
    taken: list[bytes] = []
    for start in range(0, len(body), step):
        decoder.feed(body[start : start + step])
        while (message := decoder.take()) is not None:
            taken.append(message)
    decoder.finish()
    first, cut, last = taken
    assert (first, last) == (small, small)
    assert isinstance(cut, CutMessage)
    assert (cut.size, bytes(cut)) == (len(large), large[:CUT_HEAD_BYTES])
    strict = FrameDecoder(limit=1024)
    strict.feed(body[5 + len(small) :])
    with pytest.raises(MessageTooLarge):
        strict.take()
