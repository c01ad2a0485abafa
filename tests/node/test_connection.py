"""When an agent tries again: what counts as a good session, and what each protocol waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from fleetplane.domains.boards.agent.registration import RefusedByServer
from fleetplane.domains.proxies.agent.agent import (
    CONTENTION_FAILURES,
    DOUBT_FAILURES,
    ProxyAgentPolicy,
    ProxyWaits,
)
from fleetplane.domains.proxies.agent.enrolment import TokenSuperseded
from fleetplane.kernel.clock import Backoff
from fleetplane.node.connection import (
    SPREAD_SECONDS,
    ConnectionAttempt,
    ConnectionRetries,
    KeepConnected,
    RetryWait,
)
from fleetplane.node.link import LinkLost, ServerRefused
from fleetplane.sim.clock import VirtualClock

Serve = Callable[[ConnectionAttempt], Awaitable[None]]


class Doubling:
    """1, 2, 4 … seconds, without chance."""

    def after(self, why: Exception, failures: int, *, jitter: float) -> RetryWait:
        return RetryWait(seconds=2.0**failures, failures=failures + 1)


class Loop:
    """A loop at work in virtual time, and the waits it told of."""

    def __init__(self, serve: Serve, *, steady: float = 10.0, leaving: asyncio.Event | None = None) -> None:
        self.clock = VirtualClock()
        self.waits: list[float] = []
        self.errors: list[str] = []
        self._serve = serve
        self._keep = KeepConnected(
            endings=(LinkLost, ServerRefused),
            waits=Doubling(),
            lost=self._lost,
            clock=self.clock,
            steady_seconds=steady,
            leaving=leaving,
        )

    def _lost(self, why: Exception, seconds: float) -> None:
        self.errors.append(str(why))
        self.waits.append(seconds)

    async def run_for(self, seconds: float) -> None:
        running = asyncio.create_task(self._keep.run(self._serve))
        try:
            await self.clock.advance(seconds)
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def run(self) -> None:
        await self._keep.run(self._serve)


async def test_waits_grow_while_nothing_answers() -> None:
    async def serve(attempt: ConnectionAttempt) -> None:
        raise LinkLost("away")

    loop = Loop(serve)
    await loop.run_for(20)
    assert loop.waits == [1, 2, 4, 8, 16]


async def test_a_loop_ends_also_when_asked_while_a_session_is_breaking_down() -> None:
    breaking, stopped = asyncio.Event(), asyncio.Event()

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            breaking.set()
            await stopped.wait()

    async def serve(attempt: ConnectionAttempt) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beside())
            await asyncio.sleep(0)
            raise LinkLost("away")

    running = asyncio.create_task(Loop(serve).run())
    await breaking.wait()
    running.cancel()
    asyncio.get_running_loop().call_soon(stopped.set)
    await asyncio.wait([running], timeout=60)
    assert running.cancelled()


async def test_an_attempt_that_hangs_before_it_fails_is_no_good_session() -> None:
    async def serve(attempt: ConnectionAttempt) -> None:
        await loop.clock.sleep(60)  # a connection attempt into the void
        raise LinkLost("away")

    loop = Loop(serve)
    await loop.run_for(185)
    assert loop.waits == [1, 2, 4]


async def test_a_session_that_is_ended_at_once_does_not_shorten_the_waits() -> None:
    async def serve(attempt: ConnectionAttempt) -> None:
        attempt.established()
        raise LinkLost("thrown out")

    loop = Loop(serve)
    await loop.run_for(6)
    assert loop.waits == [1, 2, 4]


async def test_waits_begin_anew_after_a_session_that_was_established_and_lasted() -> None:
    async def serve(attempt: ConnectionAttempt) -> None:
        if attempt.failures == 2:
            attempt.established()
            await loop.clock.sleep(10)
            attempt.established()  # again: the first time counts
        raise LinkLost("away")

    loop = Loop(serve)
    await loop.run_for(17)
    assert loop.waits == [1, 2, 1, 2, 1][: len(loop.waits)]
    assert len(loop.waits) >= 4


async def test_the_next_attempt_knows_why_the_last_one_ended() -> None:
    seen: list[tuple[int, Exception | None]] = []
    errors: list[Exception | None] = [
        ServerRefused("no", code=grpc.StatusCode.UNAUTHENTICATED),
        None,
        LinkLost("x"),
    ]

    async def serve(attempt: ConnectionAttempt) -> None:
        seen.append((attempt.failures, attempt.after))
        error = errors.pop(0) if errors else LinkLost("x")
        if error is not None:
            raise error

    loop = Loop(serve)
    await loop.run_for(1.5)
    assert seen[0] == (0, None)
    assert seen[1][0] == 1
    assert isinstance(seen[1][1], ServerRefused)
    assert seen[2] == (0, None), "a session that ended as it should is followed at once"


async def test_the_first_of_several_causes_is_told_and_other_errors_pass() -> None:
    async def serve(attempt: ConnectionAttempt) -> None:
        raise ExceptionGroup("", [LinkLost("first"), ExceptionGroup("", [ServerRefused("second")])])

    loop = Loop(serve)
    await loop.run_for(0.5)
    assert loop.errors == ["first"]

    async def breaks(attempt: ConnectionAttempt) -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await Loop(breaks).run()


async def test_leaving_cuts_a_wait_short_and_starts_nothing_new() -> None:
    leaving, sessions = asyncio.Event(), []

    async def serve(attempt: ConnectionAttempt) -> None:
        sessions.append(attempt)
        raise LinkLost("away")

    loop = Loop(serve, leaving=leaving)
    running = asyncio.create_task(loop.run())
    await loop.clock.advance(0.5)
    assert not running.done()
    leaving.set()
    await asyncio.wait_for(running, 60)
    assert len(sessions) == 1


def test_a_refusal_may_have_waits_of_its_own() -> None:
    waits = ConnectionRetries(
        backoff=Backoff(first_seconds=1.0, ceiling_seconds=60.0),
        refused=Backoff(first_seconds=30.0, ceiling_seconds=600.0),
    )
    assert waits.after(LinkLost("x"), 3, jitter=1.0) == RetryWait(seconds=8.0, failures=4)
    assert waits.after(RefusedByServer("x"), 3, jitter=1.0) == RetryWait(seconds=240.0, failures=4)
    assert ConnectionRetries(backoff=Backoff()).after(ServerRefused("x"), 0, jitter=1.0).seconds == 0.5


@pytest.mark.parametrize("has_certificate", [True, False])
def test_a_proxy_waits_long_when_refused_and_doubts_its_certificate(has_certificate: bool) -> None:
    waits = ProxyWaits(policy=ProxyAgentPolicy(), has_certificate=lambda: has_certificate)
    told = waits.after(ServerRefused("x"), 7, jitter=0.5)
    assert told.seconds == pytest.approx(300.0)
    assert told.failures == (DOUBT_FAILURES if has_certificate else 0)


def test_two_proxies_with_one_token_slow_each_other_down() -> None:
    waits = ProxyWaits(policy=ProxyAgentPolicy(), has_certificate=lambda: True)
    told = waits.after(TokenSuperseded("x"), 0, jitter=1.0)
    assert told == RetryWait(seconds=20.0, failures=CONTENTION_FAILURES + 1)
    assert waits.after(LinkLost("x"), 1, jitter=1.0) == RetryWait(seconds=2.0, failures=2)


def test_agents_that_lost_the_same_server_come_back_over_two_seconds_or_more() -> None:
    """Only the first time: later waits are far enough apart by themselves."""
    proxies = ProxyWaits(policy=ProxyAgentPolicy(), has_certificate=lambda: True)
    others = ConnectionRetries(backoff=Backoff(first_seconds=0.5), spread_seconds=SPREAD_SECONDS)
    for waits in (proxies, others):
        soonest, latest = (waits.after(LinkLost("x"), 0, jitter=jitter).seconds for jitter in (0.0, 1.0))
        assert soonest > 0.0
        assert latest - soonest >= 2.0
    assert others.after(LinkLost("x"), 1, jitter=1.0).seconds == 1.0
