"""Runs on several servers of one database: begun on any, driven by the active one, told by all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.edge.edge_runs_rig import NODES, SCOPE, Rig, rig_in
from support.shared.commandkit import FakeCourier

from fleetplane.fleet.runs import runs as runs_module
from fleetplane.fleet.runs.events import RunEnded, Started, TargetEnded, TargetOutput, TargetStarted
from fleetplane.fleet.runs.records import RunState, Summary
from fleetplane.kernel.errors import ResourceExhausted


@pytest.fixture
async def active(tmp_path: Path) -> AsyncIterator[Rig]:
    courier = FakeCourier()
    courier.here = set(NODES)
    async with rig_in(tmp_path, courier) as rig:
        await rig.enrol(*NODES)
        rig.store.shared = True
        yield rig


@pytest.fixture
def standby(active: Rig) -> Rig:
    """Another server: it has the same store, which refuses writes but for those meant for it."""
    return Rig(active.store.reader(), active.courier)


@pytest.fixture
async def observing(standby: Rig) -> AsyncIterator[None]:
    """The other server looks at runs that somebody else drives."""
    with standby.store.writing_here():
        task = asyncio.create_task(standby.runs.run_here())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _events(rig: Rig, run: object) -> list[object]:
    async with asyncio.timeout(60):
        return [event async for event in rig.runs.follow(run)]  # type: ignore[arg-type]


@pytest.mark.usefixtures("observing")
async def test_a_run_begun_on_a_standby_is_driven_by_the_active_server_and_told_on_both(
    active: Rig, standby: Rig
) -> None:
    with standby.store.writing_here():
        run = await standby.start()
    told = asyncio.gather(_events(standby, run), _events(active, run))
    for number, node in enumerate(NODES, 1):
        assert await active.sent_to(number) == NODES[:number]
        await active.end(run, node)
    assert await active.over(run) == (RunState.COMPLETE, Summary(ok=6))
    for events in await told:
        assert isinstance(events[0], Started)
        started = [event.name for event in events if isinstance(event, TargetStarted)]
        ended = [event.name for event in events if isinstance(event, TargetEnded)]
        assert (started, ended) == (NODES, NODES)
        end = events[-1]
        assert isinstance(end, RunEnded)
        assert (end.state, end.summary) == (RunState.COMPLETE, Summary(ok=6))
    await standby.until(lambda: standby.runs.open_count == 0)
    assert standby.runs.ended.total() == 0, "counted once, by its driver"


@pytest.mark.usefixtures("observing")
async def test_what_a_target_printed_is_told_where_none_of_it_was_heard_as_it_came(
    active: Rig, standby: Rig
) -> None:
    with standby.store.writing_here():
        run = await standby.start()
    told = asyncio.gather(_events(active, run), _events(standby, run))
    for number, node in enumerate(NODES, 1):
        await active.sent_to(number)
        if node == NODES[0]:  # which is connected to the active server
            active.runs.progressed(node, run.name, "stdout", b"whole")
        await active.end(run, node, stdout_tail=b"tail", stderr_tail=b"")
    here, elsewhere = (
        [(event.name, event.output) for event in events if isinstance(event, TargetOutput)]
        for events in await told
    )
    assert here == [(NODES[0], b"whole"), *((node, b"tail") for node in NODES[1:])]
    assert elsewhere == [(node, b"tail") for node in NODES]


async def test_an_unfinished_run_is_told_by_a_server_that_starts_later(active: Rig) -> None:
    run = await active.start()
    await active.sent_to(1)
    later = Rig(active.store.reader(), active.courier)
    observing = asyncio.create_task(later.runs.run_here())
    await later.until(lambda: later.runs.open_count == 1)
    told = asyncio.create_task(_events(later, run))
    assert await active.runs.cancel(SCOPE, run.name, actor="operator/test")
    assert (await active.over(run))[0] is RunState.CANCELLED
    end = (await told)[-1]
    assert isinstance(end, RunEnded)
    assert end.state is RunState.CANCELLED
    observing.cancel()
    await asyncio.gather(observing, return_exceptions=True)


async def test_a_run_cancelled_on_a_standby_is_taken_back_by_its_driver(active: Rig, standby: Rig) -> None:
    run = await active.start()
    await active.sent_to(1)
    with standby.store.writing_here():
        await standby.runs.cancel(SCOPE, run.name, actor="operator/test")
    assert (await active.over(run))[0] is RunState.CANCELLED
    assert active.sent == NODES[:1]


async def test_the_bound_on_runs_of_a_tenant_holds_across_servers(
    active: Rig, standby: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "RUNS_LIMIT", 1)
    await active.start()
    assert standby.runs.open_count == 0, "it has not heard of it yet"
    with standby.store.writing_here(), pytest.raises(ResourceExhausted, match="1 runs over 6 targets"):
        await standby.start()
    assert len(active.runs.list(SCOPE)) == 1


@pytest.mark.usefixtures("observing")
async def test_a_server_that_takes_over_drives_on_what_it_observed_and_tells_nothing_twice(
    active: Rig, standby: Rig
) -> None:
    run = await active.start()
    await standby.until(lambda: standby.runs.open_count == 1)
    told = asyncio.create_task(_events(standby, run))
    await active.sent_to(1)
    await active.end(run, NODES[0])
    await active.sent_to(2)
    await active.die()

    standby.store.lead(active.store)
    await standby.runs.take_over()
    for number, node in enumerate(NODES[1:], 2):
        assert await standby.sent_to(number) == NODES[:number]
        await active.end(run, node)
    assert await standby.over(run) == (RunState.COMPLETE, Summary(ok=6))

    events = await told
    assert [type(event) for event in events].count(Started) == 1
    started = [event.name for event in events if isinstance(event, TargetStarted)]
    ended = [event.name for event in events if isinstance(event, TargetEnded)]
    assert (started, ended) == (NODES, NODES)
    await standby.until(lambda: standby.runs.open_count == 0)
    assert standby.runs.ended.total() == 1


@pytest.mark.usefixtures("observing")
async def test_a_run_that_was_halted_before_its_driver_died_is_halted_again(
    active: Rig, standby: Rig
) -> None:
    run = await active.start()
    await standby.until(lambda: standby.runs.open_count == 1)
    await active.sent_to(1)
    await active.die()
    await active.runs._book.conclude(run, RunState.HALTED, actor="system/edge")  # its targets were not told

    standby.store.lead(active.store)
    await standby.runs.take_over()
    assert (await standby.over(run))[0] is RunState.HALTED
    assert standby.sent == NODES[:1]
