"""Statuses as trailers."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.rpc.serving.status import GrpcStatus, encode_message, log_level


@given(st.text(max_size=200))
def test_any_text_survives_percent_encoding(text: str) -> None:
    encoded = encode_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote(encoded.decode()) == text.encode("utf-8", "replace").decode()


def test_plain_text_stays_readable() -> None:
    assert encode_message("no such GPU: gpu-0 (of 8)") == b"no such GPU: gpu-0 (of 8)"
    assert encode_message("100% ü\n") == b"100%25 %C3%BC%0A"


@given(st.text(min_size=1, max_size=4))
def test_a_long_text_is_cut_between_characters(piece: str) -> None:
    decoded = unquote(encode_message(piece * 2049).decode(), errors="strict")
    assert decoded.endswith("…")
    assert len(decoded.encode()) <= 2052


def test_a_status_without_text_is_one_field() -> None:
    assert GrpcStatus(code=5).headers() == [(b"grpc-status", b"5")]


@pytest.mark.parametrize(
    ("code", "level"), [(1, "debug"), (5, "info"), (8, "warning"), (13, "error"), (2, "error")]
)
def test_the_log_level_follows_whose_business_it_is(code: int, level: str) -> None:
    assert log_level(code) == level
