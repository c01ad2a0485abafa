"""Header fields: timeouts, metadata and content types, for any bytes a peer may send."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.rpc.serving.status import (
    BadTimeout,
    MetadataError,
    decode_binary,
    encode_binary,
    encode_metadata,
    is_grpc_content_type,
    is_reserved,
    parse_metadata,
    parse_timeout,
)

keys = st.from_regex(r"\A[0-9a-z_.\-]{1,20}\Z").filter(lambda key: not is_reserved(key.encode()))
printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=50)
pairs = st.lists(
    st.one_of(
        st.tuples(keys.filter(lambda key: not key.endswith("-bin")), printable),
        st.tuples(keys.map(lambda key: f"{key}-bin"), st.binary(max_size=50)),
    ),
    max_size=8,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0S", 0.0),
        (b"99999999H", 99999999 * 3600.0),
    ],
)
def test_a_timeout_has_digits_and_a_unit(text: bytes, seconds: float) -> None:
    assert parse_timeout(text) == pytest.approx(seconds)


@given(st.binary(max_size=12))
def test_any_bytes_are_a_timeout_or_a_named_error(text: bytes) -> None:
    with contextlib.suppress(BadTimeout):
        assert parse_timeout(text) >= 0


@given(pairs)
def test_metadata_comes_back_as_it_went(sent: list[tuple[str, str | bytes]]) -> None:
    assert list(parse_metadata(encode_metadata(sent))) == sent


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=60)), max_size=10))
def test_any_header_bytes_are_read_or_left_out(headers: list[tuple[bytes, bytes]]) -> None:
    for key, value in parse_metadata(headers):
        assert isinstance(value, bytes if key.endswith("-bin") else str)


@given(st.binary(max_size=60))
def test_binary_values_are_read_with_padding_and_without(value: bytes) -> None:
    assert decode_binary(base64.b64encode(value)) == value
    assert decode_binary(encode_binary(value)) == value
    assert b"=" not in encode_binary(value)


def test_comma_joined_binary_values_are_several() -> None:
    joined = base64.b64encode(b"one") + b", " + encode_binary(b"two!")
    assert parse_metadata([(b"x-bin", joined)]) == (("x-bin", b"one"), ("x-bin", b"two!"))


def test_a_binary_value_that_is_no_base64_is_left_out() -> None:
    assert parse_metadata([(b"x-bin", b"%%%"), (b"y", b"kept")]) == (("y", "kept"),)


def test_what_the_protocol_uses_is_not_the_callers_metadata() -> None:
    headers = [
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"1S"),
        (b"grpc-encoding", b"gzip"),
        (b"user-agent", b"grpc-python"),
        (b"grpc-trace-bin", b"YQ"),
    ]
    assert parse_metadata(headers) == (("user-agent", "grpc-python"), ("grpc-trace-bin", b"a"))


@pytest.mark.parametrize(
    "pair",
    [
        ("Upper", "x"),
        ("sp ace", "x"),
        ("", "x"),
        ("grpc-status", "0"),
        ("content-type", "x"),
        ("text", "ünicode"),
        ("text", "line\nbreak"),
        ("data-bin", "not bytes"),
    ],
)
def test_metadata_that_cannot_travel_is_refused_by_name(pair: tuple[str, str]) -> None:
    with pytest.raises(MetadataError):
        encode_metadata([pair])


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpc; charset=x", True),
        (b"APPLICATION/GRPC", True),
        (b"application/grpc-web", False),
        (b"application/grpc-web+proto", False),
        (b"application/grpcx", False),
        (b"text/plain", False),
        (b"", False),
    ],
)
def test_only_grpc_content_types_are_grpc(value: bytes, accepted: bool) -> None:
    assert is_grpc_content_type(value) is accepted
