from __future__ import annotations

import asyncio

import pytest

from fleetplane.kernel import boundary
from fleetplane.kernel.boundary import Boundary, Failures, contained, count_into
from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.errors import OutcomeUnknown, StorageFull


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    monkeypatch.setattr(boundary, "BACKOFF", Backoff(first_seconds=0.001, ceiling_seconds=0.001))
    return Failures()


async def test_work_that_fails_is_begun_again_and_its_siblings_go_on(failures: Failures) -> None:
    count_into(failures)
    begun, healed = 0, asyncio.Event()

    async def fails_thrice() -> None:
        nonlocal begun
        begun += 1
        if begun == 2:  # what it waits for was cancelled, and not the work
            raise asyncio.CancelledError
        if begun <= 3:
            raise StorageFull("the disk is full") if begun == 1 else RecursionError("too deep")
        healed.set()

    async with asyncio.timeout(10), Boundary() as tasks:
        sibling = tasks.keep("sibling", asyncio.Event().wait)  # type: ignore[arg-type]
        tasks.keep("work", fails_thrice)
        await healed.wait()
        assert not sibling.done()
        sibling.cancel()
    assert (begun, dict(failures.by_work)) == (4, {"work": 3})
    [family] = failures.collect()
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"work": "work"}, 3)]


async def test_work_on_one_object_fails_alone(failures: Failures) -> None:
    count_into(failures)

    async def broken() -> None:
        raise ValueError("of this object")

    async with Boundary() as tasks:
        await tasks.once("one", broken, about="x")
        for name in ("a", "b"):
            with contained("each", about=name):
                raise KeyError(name)
    assert failures.by_work == {"one": 1, "each": 2}


async def test_what_the_server_cannot_go_on_without_ends_it(failures: Failures) -> None:
    async def unsure() -> None:
        raise OutcomeUnknown("a sync has failed")

    cancelled = asyncio.Event()

    async def sibling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def serve() -> None:
        async with Boundary() as tasks:
            tasks.keep("sibling", sibling)
            await asyncio.sleep(0)
            tasks.essential("store", unsure())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await serve()
    assert ended.group_contains(OutcomeUnknown)
    assert cancelled.is_set()


async def test_work_ends_when_it_is_cancelled_also_while_it_waits_to_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundary, "BACKOFF", Backoff(first_seconds=3600.0, ceiling_seconds=3600.0))
    failed = asyncio.Event()

    async def broken() -> None:
        failed.set()
        raise ValueError

    async with asyncio.timeout(10), Boundary() as tasks:
        waiting = tasks.keep("waiting", broken)
        await failed.wait()
        waiting.cancel()
