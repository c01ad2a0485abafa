"""Killed at any moment, the store opens with everything it acknowledged, and nothing by halves."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

from support.shared import crash_writer
from support.shared.crash_writer import PARTS, WRITERS
from support.shared.storekit import SCOPE, THING, flat, opened, taken

from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Event, EventType

ROUNDS = int(os.environ.get("STORE_CRASH_ROUNDS", "12"))
"""A short form; give the variable a hundred for a long one."""
LONGEST_LIFE_SECONDS = 0.35
START_SECONDS = 60.0

Acknowledged = dict[int, tuple[int, int]]
"""The last acknowledged (value, revision) of each writer."""


def _live_and_die(path: Path, life_seconds: float, *, writing: bool) -> Acknowledged:
    """Run the writer for a moment, kill it, and return what it was told was durable.

    The moment begins when it is open, or when it has written: that may take a slow machine longer.
    """
    with subprocess.Popen(
        [sys.executable, crash_writer.__file__, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        try:
            ready, _, _ = select.select([child.stdout], [], [], START_SECONDS)
            assert ready, "the writer did not start"
            assert child.stdout.readline() == b"open\n"
            if writing:
                assert child.stdout.peek(1)  # type: ignore[attr-defined]
            time.sleep(life_seconds)  # its whole life: the moment of death is what varies
        finally:
            child.kill()
        lines = child.stdout.read().splitlines()
    acknowledged: Acknowledged = {}
    for line in lines:
        writer, value, revision = map(int, line.split())
        acknowledged[writer] = (value, revision)
    return acknowledged


def _check_acknowledged(store: Store, acknowledged: Acknowledged) -> None:
    for writer, (value, revision) in acknowledged.items():
        held = store.get(THING, SCOPE, f"w{writer}-a")
        assert held is not None
        assert held.spec.value >= value
        assert store.revision >= revision
        assert store.claimed_by(THING, SCOPE, "value", f"w{writer}-{value}") == f"w{writer}"


def _check_whole(store: Store) -> None:
    for writer in range(WRITERS):
        parts = [store.get(THING, SCOPE, f"w{writer}-{part}") for part in PARTS]
        assert len({part.spec.value for part in parts if part is not None}) <= 1
        assert len({part is None for part in parts}) == 1
        if parts[0] is not None:
            value = parts[0].spec.value
            remains = [t.name for t in store.list(THING) if t.name.startswith(f"w{writer}-old")]
            assert remains == [f"w{writer}-old{value}"]
            assert store.claimed_by(THING, SCOPE, "value", f"w{writer}-{value + 1}") is None


def _follow(held: dict[str, int], events: list[Event]) -> None:
    for event in events:
        if event.type is EventType.DELETED:
            del held[event.resource.name]
        else:
            assert (event.type is EventType.ADDED) == (event.resource.name not in held)
            held[event.resource.name] = event.resource.spec.value


async def test_killed_at_random_moments_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    chance = random.Random()
    held: dict[str, int] = {}  # what a watcher knows that resumes after every crash
    cursor = killed_while_writing = 0
    for number in range(ROUNDS):
        life_seconds = chance.uniform(0.0, LONGEST_LIFE_SECONDS)
        acknowledged = _live_and_die(path, life_seconds, writing=number % 4 > 0)
        killed_while_writing += bool(acknowledged)
        verdict = await verify_file(path)
        assert verdict.intact, verdict.problem
        async with opened(path, replay_page_events=100) as store:
            _check_acknowledged(store, acknowledged)
            _check_whole(store)
            assert verdict.revision == store.revision
            watch = store.watch(THING, after=cursor)
            events = flat(await taken(watch, store.revision))
            revisions = [event.revision for event in events]
            assert sorted(set(revisions)) == list(range(cursor + 1, store.revision + 1))
            assert revisions == sorted(revisions)
            _follow(held, events)
            cursor = watch.revision
            assert held == {thing.name: thing.spec.value for thing in store.list(THING)}
    assert killed_while_writing > ROUNDS / 2, "the writer was hardly ever caught writing"
