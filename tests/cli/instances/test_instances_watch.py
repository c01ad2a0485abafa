"""What a watcher of instances knows, shows, and does when its server goes and comes back."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.instances.operator_rig import TENANT
from support.instances.operator_server import running

from fleetplane.client.places import Place
from fleetplane.domains.instances.cli.client import OperatorTarget
from fleetplane.domains.instances.cli.watch import RECENT_LINES, Known, _InstanceScreen, follow
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.errors import Unavailable


def group(key: str, size: int = 1, actual: int = 0) -> operator_pb2.GroupStatus:
    return operator_pb2.GroupStatus(
        key=key, tenant=TENANT, template="worker", size=size, actual_size=actual, etag=f"{key}{size}"
    )


def upsert(key: str, size: int = 1) -> operator_pb2.GroupEvent:
    return operator_pb2.GroupEvent(type=operator_pb2.GroupEvent.TYPE_UPSERT, group=group(key, size))


def gone(key: str) -> operator_pb2.GroupEvent:
    return operator_pb2.GroupEvent(
        type=operator_pb2.GroupEvent.TYPE_DELETE, group=operator_pb2.GroupStatus(key=key, tenant=TENANT)
    )


def test_a_snapshot_after_a_reconnect_is_no_news() -> None:
    known = Known()
    assert known.is_news(upsert("web"))
    assert not known.is_news(upsert("web"))
    assert known.is_news(upsert("web", size=2))


def test_a_group_that_went_while_nobody_watched_is_told_as_deleted() -> None:
    known = Known()
    for key in ("api", "web"):
        known.is_news(upsert(key))
    assert list(known.missing([group("api")])) == [gone("web")]
    assert list(known.missing([group("api")])) == []


def test_the_end_of_a_group_is_news_once() -> None:
    known = Known()
    known.is_news(upsert("web"))
    assert known.is_news(gone("web"))
    assert not known.is_news(gone("web"))


def test_the_screen_shows_groups_totals_and_the_latest_events() -> None:
    screen = _InstanceScreen()
    screen.known.is_news(operator_pb2.GroupEvent(group=group("web", size=3, actual=2)))
    screen.recent.extend(f"line {number}" for number in range(RECENT_LINES + 2))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen.draw())
    text = console.export_text()
    assert "web" in text
    assert "2 of 3 instances" in text
    assert "line 1\n" not in text
    assert f"line {RECENT_LINES + 1}" in text


def test_the_screen_says_when_it_is_not_connected() -> None:
    screen = _InstanceScreen()
    screen.on_gap("gone", 1.5)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen.draw())
    assert "not connected: gone; trying again in 1.5 s" in console.export_text()


def test_a_watch_survives_a_restart_and_tells_what_changed_meanwhile(tmp_path: Path) -> None:
    target = OperatorTarget(place=Place(data_dir=tmp_path, timeout=30), tenant=TENANT)
    told: list[tuple[str, int]] = []
    seen, gap = threading.Event(), threading.Event()

    def watch() -> None:
        for event in follow(
            target, Known(), ["groups"], seconds=120, on_gap=lambda _reason, _delay: gap.set()
        ):
            told.append((event.group.key, event.group.size))
            if len(told) == 2:
                seen.set()
            if told[-1] == ("web", 9):
                return

    watching = threading.Thread(target=watch)
    with running(tmp_path):
        watching.start()
        assert seen.wait(60)
    assert gap.wait(60)
    with running(tmp_path) as server:
        server.run(_set_size(server.rig, 9))
        watching.join(60)
    assert not watching.is_alive()
    assert told == [("api", 1), ("web", 2), ("web", 9)]


async def _set_size(rig: Any, size: int) -> None:
    await (await rig.operator()).upsert("web", size=size)


def test_the_first_connection_must_succeed(tmp_path: Path) -> None:
    target = OperatorTarget(place=Place(data_dir=tmp_path, timeout=60), tenant=TENANT)
    with pytest.raises(Unavailable):
        next(follow(target, Known(), ["groups"], seconds=60, on_gap=lambda _reason, _delay: None))
