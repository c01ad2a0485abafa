from __future__ import annotations

from pathlib import Path

import click
import pytest

from fleetplane.cli.parameters import (
    CONDITION,
    DURATION,
    LOCAL_SOCKET,
    SYSTEM_SOCKET,
    default_address,
    parse_address,
)
from fleetplane.kernel.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("2m", 120),
        ("1h", 3600),
        ("7", 7),
        ("1.5s", 1.5),
        ("1h30m", 5400),
        ("2 m", 120),
    ],
)
def test_durations_are_written_with_a_unit_or_as_seconds(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "0s", "abc", "1s2", "9999999h", "9" * 400])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        DURATION.convert(text, None, None)


def test_a_condition_is_type_and_status_in_any_case() -> None:
    term = CONDITION.convert("Ready=true", None, None)
    assert (term.type, term.status, str(term)) == ("Ready", "True", "Ready=True")


@pytest.mark.parametrize("text", ["Ready", "=True", "Ready=", "Ready=Maybe"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        CONDITION.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/x.sock", "unix:///run/x.sock"),
        ("unix:/run/x.sock", "unix:///run/x.sock"),
        ("/run/x.sock", "unix:///run/x.sock"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("http://127.0.0.1:50051", "127.0.0.1:50051"),
        ("http://127.0.0.1:50051/", "127.0.0.1:50051"),
        ("[::1]:50051", "[::1]:50051"),
        ("node-7.example:443", "node-7.example:443"),
    ],
)
def test_addresses_are_taken_as_people_and_ready_files_write_them(text: str, address: str) -> None:
    assert parse_address(text) == address


def test_a_relative_socket_is_made_absolute() -> None:
    assert parse_address("./device.sock") == f"unix://{Path.cwd() / 'device.sock'}"


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "localhost:", ":50051", "x:0", "x:70000", "https://a:1", "unix:", "/" + "x" * 120],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_the_systems_socket_comes_first_then_the_local_one_then_the_port() -> None:
    assert default_address(lambda path: True) == f"unix://{SYSTEM_SOCKET}"
    assert default_address(lambda path: path == LOCAL_SOCKET) == f"unix://{Path.cwd() / LOCAL_SOCKET}"
    assert default_address(lambda path: False) == "127.0.0.1:50051"
