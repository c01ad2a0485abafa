"""Who holds the event loop is found out, by name."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleetplane.kernel import stalls
from fleetplane.kernel.stalls import HANDLERS_KEPT, LIMIT_SECONDS, OTHERS, Watchdog, WatchdogCollector
from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.rpc.listening import doors
from fleetplane.rpc.listening.doors import HANDLER, VISITS_KEPT

TOO_LONG = 1.5 * LIMIT_SECONDS


MOMENT = [0.0]
"""Time passes where a test says so: a machine that stands still holds no loop."""


@pytest.fixture(autouse=True)
def standing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stalls, doors):
        monkeypatch.setattr(module, "_now", lambda: MOMENT[0])


async def _hold() -> str:
    await asyncio.sleep(0)
    MOMENT[0] += TOO_LONG  # this is the fault
    await asyncio.sleep(0)
    return "done"


async def _wait() -> str:
    await asyncio.sleep(TOO_LONG)
    return "waited"


async def test_a_task_that_holds_the_loop_is_named_and_one_that_waits_is_not() -> None:
    dog = Watchdog()
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    dog.install(loop)
    try:
        tasks = [asyncio.create_task(_hold()), asyncio.create_task(_wait())]
        assert [await task for task in tasks] == ["done", "waited"]
    finally:
        loop.set_task_factory(before)
    assert list(dog.held) == ["_hold"]
    assert dog.held["_hold"].times == 1
    assert dog.held["_hold"].seconds == pytest.approx(TOO_LONG)
    registry = CollectorRegistry()
    registry.register(WatchdogCollector(dog))
    assert b'fleetplane_loop_held_total{handler="_hold"} 1.0' in generate_latest(registry)


async def test_watched_tasks_end_as_others_do() -> None:
    dog = Watchdog()
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    dog.install(loop)
    try:
        never = asyncio.create_task(_wait(), name="mine")
        assert "_wait" in repr(never)
        never.cancel()  # before its first step
        with pytest.raises(asyncio.CancelledError):
            await never
        running = asyncio.create_task(_wait())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def failing() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await asyncio.create_task(failing())
    finally:
        loop.set_task_factory(before)
    assert dog.held == {}


def test_work_is_told_apart_from_waiting() -> None:
    dog = Watchdog()
    dog.look()
    assert dog.report("asleep", 5.0) < 1.0


def test_names_are_bounded() -> None:
    dog = Watchdog()
    for number in range(HANDLERS_KEPT + 10):
        dog.report(f"handler-{number}", 0.2)
    assert len(dog.held) == HANDLERS_KEPT + 1
    assert dog.held[OTHERS].times == 10


async def test_a_handler_of_a_listener_is_named_from_its_table_and_a_path_never_is(tmp_path: Path) -> None:
    dog = Watchdog()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["path"] == "/known":
            scope[HANDLER] = "GET /{table}"
        MOMENT[0] += TOO_LONG
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    spec = ListenerSpec(name="test", addresses=("127.0.0.1:0",), app=app, http1=True, watchdog=dog)
    async with open_listener(spec, grace_seconds=1) as listener, httpx.AsyncClient() as client:
        for path in ("/known", "/a-strangers-path"):
            assert (await client.get(listener.addresses[0] + path)).text == "ok"
        assert {visit.requests for visit in listener.door.visits.values()} == {2}
        async with asyncio.timeout(60):
            while {visit.open for visit in listener.door.visits.values()} != {0}:
                await asyncio.sleep(0.005)
        door = listener.door
        for number in range(VISITS_KEPT + 5):  # nobody looks after this listener: those at rest are forgotten
            door._new_visit(("192.0.2.1", number))
        assert len(door.visits) <= VISITS_KEPT
    assert {name: held.times for name, held in dog.held.items()} == {"GET /{table}": 1, "test": 1}


def test_work_of_others_before_a_step_is_not_counted_as_its_own() -> None:
    dog = Watchdog()
    seen: list[float] = []
    report = dog.report

    def noting(handler: str, seconds: float) -> float:
        seen.append(report(handler, seconds))
        return seen[-1]

    dog.report = noting  # type: ignore[method-assign]
    ends = time.thread_time() + 0.5
    while time.thread_time() < ends:  # somebody's work, on the same thread
        pass
    MOMENT[0] += 0.5
    steps = dog.watch(_hold(), lambda: "asleep")
    for _ in range(3):
        try:
            steps.send(None)
        except StopIteration:
            break
    assert seen
    assert max(seen) < 0.4, "a step that slept worked little"
