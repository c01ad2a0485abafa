"""What the live page makes of events, run by a real JavaScript engine where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fleetplane.web

MODEL = Path(fleetplane.web.__file__).parent / "files" / "instances_model.mjs"
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


INSTANCE = (
    '{"id":"i","group":"web","state":"registered","health":"healthy","created_at":"2026-01-01T00:00:00Z"}'
)
STREAM = events(
    "event: reset\ndata: {}",
    f"event: instance\ndata: {INSTANCE}",
    'event: groups\ndata: [{"name":"web"},{"name":"api"}]',
    ": still here",
    'id: 41\nevent: now\ndata: {"at":"2026-01-01T00:00:10Z"}',
    'event: health\ndata: {"i":"silent","unknown":"silent"}',
    'event: group_deleted\ndata: {"name":"api"}',
    'event: later\ndata: {"of":"a newer server"}',
    'id: 42\nevent: now\ndata: {"at":"2026-01-01T00:00:11Z"}',
)
READ = """(() => {
  const reader = new m.EventReader(), known = m.nothing();
  for (const piece of PIECES) for (const event of reader.take(piece)) m.apply(known, event, NOW);
  return {...known, groups: [...known.groups.keys()], instances: [...known.instances.values()]};
})()"""


def read(pieces: list[str], now: str = "Date.parse('2026-01-01T00:00:01Z')") -> Any:
    return run(READ.replace("PIECES", json.dumps(pieces)).replace("NOW", now))


def test_events_become_what_the_page_knows() -> None:
    known = read([STREAM])
    assert known["groups"] == ["web"]
    assert [(one["id"], one["health"]) for one in known["instances"]] == [("i", "silent")]
    assert (known["mark"], known["synced"]) == ("42", True)
    assert known["skewMs"] == 10_000  # the server's clock is ahead of the page's


@pytest.mark.parametrize("size", [1, 7])
def test_it_does_not_matter_where_the_stream_is_cut(size: int) -> None:
    assert read([STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == read([STREAM])


def test_a_reset_that_was_cut_short_is_begun_again_and_not_gone_on_with() -> None:
    known = read([STREAM, events("event: reset\ndata: {}", f"event: instance\ndata: {INSTANCE}")])
    assert (known["mark"], known["synced"], len(known["instances"])) == ("", False, 1)


def test_a_deleted_instance_is_forgotten() -> None:
    assert read([STREAM, events('event: instance_deleted\ndata: {"id":"i"}')])["instances"] == []


def test_the_token_is_taken_from_the_fragment() -> None:
    assert run("m.credentialsIn('#token=a.b%2Bc&tenant=acme')") == {"token": "a.b+c", "tenant": "acme"}
    assert run("m.credentialsIn('#token=a')") == {"token": "a", "tenant": ""}
    assert run("[m.credentialsIn(''), m.credentialsIn('#groups'), m.credentialsIn('#token=')]") == [None] * 3


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


ROWS = """m.instancesShown({instances: new Map([
  {id: "b", group: "web", state: "registered", created_at: "2", hostname: "Host-B"},
  {id: "a", group: "web", state: "draining", created_at: "1", hostname: "", last_error: "Disk"},
  {id: "c", group: "api", state: "deleted", created_at: "3", hostname: ""},
].map((one) => [one.id, {provider_id: "", last_error: "", ...one}]))}, FILTERS).rows.map((one) => one.id)"""


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, ["a", "b"]),
        ({"gone": True}, ["c", "a", "b"]),
        ({"state": "deleted"}, ["c"]),
        ({"group": "web", "text": " HOST "}, ["b"]),
        ({"text": "disk"}, ["a"]),
        ({"group": "none"}, []),
    ],
)
def test_rows_are_found_and_ordered(filters: dict[str, Any], ids: list[str]) -> None:
    assert run(ROWS.replace("FILTERS", json.dumps(filters))) == ids


def test_more_rows_than_anyone_reads_are_counted_and_not_shown() -> None:
    made = (
        "m.instancesShown({instances: new Map(Array.from({length: 2000}, (_, n) => "
        "[n, {id: String(n), group: 'g', state: 'registered', created_at: ''}]))})"
    )
    found = run(f"(({{rows, total}}) => [rows.length, total])({made})")
    assert found == [500, 2000]


def test_retries_wait_longer_each_time_and_never_too_long() -> None:
    waits = run("[0, 1, 2, 10, 5000].map((attempt) => m.retryMs(attempt, 1))")
    assert waits == [500, 1000, 2000, 30_000, 30_000]
    assert run("m.retryMs(2, 0)") == 1000


def test_why_is_told_in_lines() -> None:
    instance = {
        "reason": "scale-down",
        "delete_at": "2026-01-01T00:00:00Z",
        "last_error": "no disk",
        "file_errors": {"app.env": "no space"},
    }
    reasons = [{"code": "FROZEN", "message": "by ada", "subject": "i"}]
    finding = {"failures": 3, "last_error": "provider away", "reasons": reasons}
    explained = {"findings": [finding]}
    lines = run(f"m.whyLines({json.dumps(explained)}, {json.dumps(instance)})")
    assert lines == [
        "It is on its way out: scale-down; it goes at 2026-01-01T00:00:00Z at the latest.",
        "The last thing tried with it failed: no disk",
        "Its file app.env is not well: no space",
        "3 passes failed in a row: provider away",
        "i: by ada [FROZEN]",
    ]
    calm = {"findings": [{"failures": 0, "last_error": "", "reasons": []}]}
    assert run(f"m.whyLines({json.dumps(calm)}, null)") == ["Everything is as it should be."]
    assert run("m.whyLines({findings: []}, null)") == ["Nobody has looked at it yet."]
