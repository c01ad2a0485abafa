"""Server-sent events, ages and retries in live pages, run by a real JavaScript engine where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fleetplane.web

MODEL = Path(fleetplane.web.__file__).parent / "files" / "live.mjs"
SECONDS = 60.0
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


def run(expression: str) -> Any:
    """The value of an expression that has the model's names in scope."""
    script = (
        f"import * as m from {json.dumps(MODEL.as_uri())};\n"
        f"process.stdout.write(JSON.stringify({expression}))"
    )
    done = subprocess.run(
        [NODE or "", "--input-type=module", "--eval", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def events(*blocks: str) -> str:
    return "".join(f"{block}\n\n" for block in blocks)


STREAM = events(
    "event: reset\ndata: {}",
    'event: instance\ndata: {"id":"i"}',
    ": still here",
    'id: 41\nevent: now\ndata: {"at":"2026-01-01T00:00:10Z"}',
)
READ = "((reader) => PIECES.flatMap((piece) => reader.take(piece)))(new m.EventReader())"


def read(pieces: list[str]) -> Any:
    return run(READ.replace("PIECES", json.dumps(pieces)))


def test_text_becomes_events() -> None:
    assert read([STREAM]) == [
        {"kind": "reset", "data": {}, "mark": ""},
        {"kind": "instance", "data": {"id": "i"}, "mark": ""},
        {"kind": "now", "data": {"at": "2026-01-01T00:00:10Z"}, "mark": "41"},
    ]


@pytest.mark.parametrize("size", [1, 7])
def test_it_does_not_matter_where_the_stream_is_cut(size: int) -> None:
    assert read([STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == read([STREAM])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (61, "1m 1s"),
        (3_600, "1h"),
        (5_400, "1h 30m"),
        (90_000, "1d 1h"),
        (864_060, "10d"),
    ],
)
def test_ages_are_told_in_two_units(seconds: int, text: str) -> None:
    moment = "2026-01-01T00:00:00Z"
    assert run(f"m.age('{moment}', Date.parse('{moment}') + {seconds * 1000})") == text


def test_an_age_of_nothing_is_nothing() -> None:
    assert run("m.age('never', 0)") == ""


def test_retries_wait_longer_each_time_and_never_too_long() -> None:
    waits = run("[0, 1, 2, 10, 5000].map((attempt) => m.retryMs(attempt, 1))")
    assert waits == [500, 1000, 2000, 30_000, 30_000]
    assert run("m.retryMs(2, 0)") == 1000
