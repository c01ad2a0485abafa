"""What only the active server does or knows is had from any server, and from its successor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run
from support.shared.virtual_servers import VirtualServer, until, virtual_servers

from fleetplane.fleet.errands import ERRAND, OPEN_LIMIT, TENANT_LIMIT, Errands, RemoteRefusal, rebuilt
from fleetplane.kernel.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store

KINDS = (*KERNEL_KINDS, ERRAND)


def errands(store: Store, done: list[str]) -> Errands:
    made = Errands(store, store.clock, channel="lab")

    async def echo(about: str) -> str:
        done.append(about)
        return about.upper()

    async def refuse(about: str) -> str:
        raise FailedPrecondition(f"not {about}", field="config.group", hint="ask for another")

    async def never(_about: str) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    for what, doing in {"echo": echo, "refuse": refuse, "never": never}.items():
        made.does(what, doing)
    return made


def with_three(work: Callable[[list[Errands], list[Store], list[str]], Any]) -> None:
    async def all_of_it() -> None:
        async with three_stores(KINDS) as stores, asyncio.TaskGroup() as tasks:
            done: list[str] = []
            made = [errands(store, done) for store in stores]
            running = tasks.create_task(made[0].run_active())
            with stores[1].writing_here():
                await work(made, list(stores), done)
            running.cancel()

    run(all_of_it())


def test_any_server_gets_what_the_active_one_answers() -> None:
    async def work(made: list[Errands], stores: list[Store], done: list[str]) -> None:
        asked = [one.ask("echo", f"a{at}", seconds=10) for at, one in enumerate(made * 5)]
        assert await asyncio.gather(*asked) == [f"A{at}" for at in range(15)]
        assert sorted(done) == sorted(f"a{at}" for at in range(15))
        assert made[0].asked == 0, "the active server asks nobody"
        await stores[0].confirmed()
        assert stores[0].count(ERRAND) == 0, "nothing is left behind"

    with_three(work)


def test_an_error_is_the_same_at_the_server_that_asked() -> None:
    async def work(made: list[Errands], _stores: list[Store], _done: list[str]) -> None:
        told = []
        for one in made:
            with pytest.raises(FailedPrecondition) as refused:
                await one.ask("refuse", "this", seconds=10)
            error = refused.value
            told.append((error.reason, error.message, error.field, error.advice))
        assert told == [("FAILED_PRECONDITION", "not this", "config.group", "ask for another")] * 3

    with_three(work)


def test_who_is_not_answered_is_told_so_and_leaves_nothing_behind() -> None:
    async def work(made: list[Errands], stores: list[Store], _done: list[str]) -> None:
        with pytest.raises(Unavailable, match=r"within 3 s|took too long"):
            await made[1].ask("never", "", seconds=3)
        made[1].does("other", lambda about: asyncio.sleep(0, about))
        with pytest.raises(Unavailable, match="does not know 'other'"):
            await made[1].ask("other", "", seconds=3)
        assert stores[1].count(ERRAND) == 0

    with_three(work)


def test_there_are_never_more_questions_than_the_limit() -> None:
    async def work(made: list[Errands], _stores: list[Store], _done: list[str]) -> None:
        asked = [
            one.ask("never", "", seconds=5, tenant=f"t{number % 4}")
            for one in made[1:]
            for number in range(OPEN_LIMIT)
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in found if isinstance(one, ResourceExhausted)]
        assert len(refused) == len(asked) - OPEN_LIMIT
        with pytest.raises(ResourceExhausted):
            await made[1].ask("echo", "x" * 5000, seconds=5)

    with_three(work)


def test_the_many_questions_of_a_tenant_keep_no_other_from_asking() -> None:
    async def work(made: list[Errands], stores: list[Store], _done: list[str]) -> None:
        asked = [
            asyncio.create_task(made[1].ask("never", "", seconds=30, tenant="greedy"))
            for _ in range(TENANT_LIMIT)
        ]
        await until(lambda: stores[1].count(ERRAND) == TENANT_LIMIT)
        with pytest.raises(ResourceExhausted, match="of this tenant"):
            await made[1].ask("echo", "mine", seconds=5, tenant="greedy")
        patient = asyncio.create_task(made[1].ask("echo", "mine", seconds=120, tenant="modest"))
        assert {type(one) for one in await asyncio.gather(*asked, return_exceptions=True)} == {Unavailable}
        assert await patient == "MINE"

    with_three(work)


def test_the_successor_of_an_active_server_that_died_answers_what_it_was_asked() -> None:
    async def all_of_it() -> None:
        done: list[str] = []
        asked: list[asyncio.Task[str]] = []

        async def here(server: VirtualServer) -> None:
            if server.name == "three":
                made = errands(server.standby.store.reader(), done)
                asked.append(asyncio.create_task(made.ask("slow", "it", seconds=60)))
            await asyncio.Event().wait()

        async def active(server: VirtualServer) -> None:
            made = Errands(server.store, server.clock, channel="lab")

            async def slow(about: str) -> str:
                done.append(server.name)
                if server.name == "one":
                    await asyncio.Event().wait()
                return about

            made.does("slow", slow)
            await made.run_active()

        async with virtual_servers(KINDS, here=here, active=active) as servers:
            one = await servers.start("one")
            await servers.start("two")
            await servers.start("three")
            await until(lambda: done == ["one"])
            one.kill()
            assert await asked[0] == "it"
            assert done in (["one", "two"], ["one", "three"]), "whichever leads next"

    run(all_of_it())


def test_an_error_of_a_sort_that_is_not_known_here_is_one_that_passes() -> None:
    assert isinstance(rebuilt(RemoteRefusal(reason="NOT_FOUND", message="gone")), NotFound)
    assert isinstance(rebuilt(RemoteRefusal(reason="NEVER_HEARD_OF", message="x")), Unavailable)
