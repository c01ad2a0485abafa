from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from support.instances.certificates_rig import until

from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.acme.workers import AcmeWorkers


async def test_what_a_call_returns_or_raises_comes_back() -> None:
    workers = AcmeWorkers("someone")
    assert await workers.run(int, "ff", base=16) == 255
    assert await workers.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(FileNotFoundError):
        await workers.run(Path("/nowhere/at/all").read_text)
    assert workers.running == 0


async def test_a_call_that_hangs_is_given_up_and_keeps_its_slot_until_it_ends() -> None:
    workers = AcmeWorkers("the oracle", threads=1, call_seconds=0.05)
    release = threading.Event()
    with pytest.raises(IssuanceFailed, match="the oracle did not answer in"):
        await workers.run(release.wait, 60)
    assert workers.running == 1
    with pytest.raises(IssuanceFailed):
        await workers.run(lambda: None)
    release.set()
    await until(lambda: workers.running == 0)
    workers._call_seconds = 60.0
    assert await workers.run(lambda: "again") == "again"


async def test_no_more_calls_run_at_a_time_than_there_are_slots() -> None:
    workers = AcmeWorkers("someone", threads=2)
    lock, running, most = threading.Lock(), [0], [0]
    go = threading.Event()

    def call() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        go.wait(60)
        with lock:
            running[0] -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(workers.run(call))
        await until(lambda: running[0] == 2)
        go.set()
    assert most == [2]


async def test_one_who_leaves_does_not_disturb_the_thread_or_those_after() -> None:
    workers = AcmeWorkers("someone", threads=1)
    release = threading.Event()
    task = asyncio.create_task(workers.run(release.wait, 60))
    await until(lambda: workers.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await workers.run(lambda: "next") == "next"
