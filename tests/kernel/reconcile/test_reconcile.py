from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from fleetplane.kernel.reconcile import LEASE, Explanations, Lease, PassResult, Reason, Reconciler
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

DEADLINE_SECONDS = 60.0
DAY = 86_400.0
DONE = PassResult()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(seed=7)


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(LEASE,), clock=clock) as opened:
        yield opened


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(*reconcilers: Reconciler) -> AsyncIterator[None]:
    """Each under way, its lease held if nobody else has it."""
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(reconciler.run()) for reconciler in reconcilers]
        await until(lambda: any(reconciler._lease.held() for reconciler in reconcilers))
        await settle()
        try:
            yield
        finally:
            for task in started:
                task.cancel()


class Recorder:
    """A controller that does as it is told and remembers when it was called."""

    def __init__(self, clock: VirtualClock, answer: Callable[[str], PassResult] = lambda _: DONE) -> None:
        self.clock = clock
        self.answer = answer
        self.calls: list[tuple[str, float]] = []

    async def __call__(self, key: str) -> PassResult:
        self.calls.append((key, self.clock.monotonic()))
        return self.answer(key)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.calls]

    @property
    def moments(self) -> list[float]:
        return [moment for _, moment in self.calls]


def made(
    clock: VirtualClock, store: Store, reconcile: Callable[[str], Awaitable[PassResult]], **more: Any
) -> Reconciler:
    return Reconciler("test", reconcile, clock=clock, store=store, **more)


async def test_a_key_is_reconciled_once_however_often_it_is_queued(clock: VirtualClock, store: Store) -> None:
    recorder = Recorder(clock)
    reconciler = made(clock, store, recorder)
    for _ in range(10):
        reconciler.enqueue("a")
    async with running(reconciler):
        await until(lambda: recorder.calls)
        await settle()

    assert recorder.keys == ["a"]


async def test_a_delayed_key_waits_and_an_earlier_wish_wins(clock: VirtualClock, store: Store) -> None:
    recorder = Recorder(clock)
    reconciler = made(clock, store, recorder)
    async with running(reconciler):
        reconciler.enqueue("a", 100)
        reconciler.enqueue("b", 50)
        await clock.advance(10)
        reconciler.enqueue("a", 20)
        await clock.advance(500)

    assert recorder.calls == [("a", 30.0), ("b", 50.0)]


async def test_a_key_queued_while_running_runs_again_once(clock: VirtualClock, store: Store) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    calls = 0

    async def reconcile(key: str) -> PassResult:
        nonlocal calls
        calls += 1
        started.set()
        await go.wait()
        return DONE

    reconciler = made(clock, store, reconcile, concurrency=4)
    async with running(reconciler):
        reconciler.enqueue("a")
        await started.wait()
        for _ in range(5):
            reconciler.enqueue("a")
        await settle()
        assert calls == 1, "never two passes over one key at a time"
        go.set()
        await until(lambda: calls == 2)
        await settle()
    assert calls == 2


async def test_a_result_can_ask_to_be_looked_at_again(clock: VirtualClock, store: Store) -> None:
    recorder = Recorder(clock, lambda _: PassResult(requeue_after_seconds=3600))
    reconciler = made(clock, store, recorder)
    async with running(reconciler):
        reconciler.enqueue("a")
        await clock.advance(DAY)

    assert recorder.moments == [hour * 3600.0 for hour in range(25)]


async def test_a_day_of_back_off_passes_in_no_time_and_tries_ever_less_often(
    clock: VirtualClock, store: Store
) -> None:
    def fail(_: str) -> PassResult:
        raise Unavailable("the provider is down")

    recorder = Recorder(clock, fail)
    reconciler = made(clock, store, recorder, backoff=Backoff(first_seconds=1, ceiling_seconds=600))
    began = time.perf_counter()
    async with running(reconciler):
        reconciler.enqueue("a")
        await clock.advance(DAY)
        explanation = reconciler.explain("a")

    waits = [after - before for before, after in zip(recorder.moments, recorder.moments[1:], strict=False)]
    for attempt, wait in enumerate(waits):
        whole = min(600.0, 2.0**attempt)
        assert whole / 2 - 0.002 <= wait <= whole + 0.002  # to the shortest wait
    assert len(set(waits[12:])) > 20, "jittered: no two clocks fall into step"
    assert 144 <= len(waits) <= 320
    assert time.perf_counter() - began < 60
    assert explanation is not None
    assert explanation.failures == len(recorder.calls)
    assert explanation.last_error == "the provider is down"
    assert explanation.next_due_ns is not None
    assert explanation.next_due_ns > clock.now_ns()


async def test_one_keys_failures_hold_up_no_other(clock: VirtualClock, store: Store) -> None:
    def answer(key: str) -> PassResult:
        if key == "bad":
            raise RuntimeError("a defect")
        return DONE

    recorder = Recorder(clock, answer)
    reconciler = made(clock, store, recorder)
    async with running(reconciler):
        for key in ("bad", "good", "better"):
            reconciler.enqueue(key)
        await clock.advance(0.1)
        assert recorder.keys == ["bad", "good", "better"]
        bad = reconciler.explain("bad")
        assert bad is not None
        assert bad.last_error == "RuntimeError: a defect"


async def test_success_forgets_the_failures_before_it(clock: VirtualClock, store: Store) -> None:
    planned: Sequence[PassResult | Unavailable] = [
        Unavailable("one"),
        Unavailable("two"),
        DONE,
        Unavailable("three"),
        DONE,
    ]
    outcomes = iter(planned)

    def answer(_: str) -> PassResult:
        outcome = next(outcomes)
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome

    recorder = Recorder(clock, answer)
    reconciler = made(clock, store, recorder, backoff=Backoff(first_seconds=8, ceiling_seconds=600))
    async with running(reconciler):
        reconciler.enqueue("a")
        await clock.advance(100)
        assert len(recorder.calls) == 3
        healthy = reconciler.explain("a")
        assert healthy is not None
        assert (healthy.failures, healthy.last_error, healthy.next_due_ns) == (0, "", None)
        reconciler.enqueue("a")
        await clock.advance(8)

    assert len(recorder.calls) == 5, "the wait began anew at its shortest"


async def test_a_cancellation_from_inside_a_pass_is_a_failure_like_any_other(
    clock: VirtualClock, store: Store
) -> None:
    calls = 0

    async def reconcile(_: str) -> PassResult:
        nonlocal calls
        calls += 1
        raise asyncio.CancelledError

    reconciler = made(clock, store, reconcile)
    async with running(reconciler):
        reconciler.enqueue("a")
        await clock.advance(0.2)
        explanation = reconciler.explain("a")
    assert calls == 1
    assert explanation is not None
    assert explanation.failures == 1


async def test_so_many_run_at_a_time_and_no_more(clock: VirtualClock, store: Store) -> None:
    go = asyncio.Event()
    active: Counter[str] = Counter()
    most = 0

    async def reconcile(key: str) -> PassResult:
        nonlocal most
        active[key] += 1
        most = max(most, active.total())
        await go.wait()
        active[key] -= 1
        return DONE

    reconciler = made(clock, store, reconcile, concurrency=3)
    async with running(reconciler):
        for number in range(10):
            reconciler.enqueue(str(number))
        await until(lambda: active.total() == 3)
        await settle()
        assert reconciler.statistics().running == 3
        assert reconciler.statistics().queued == 7
        go.set()
        await until(lambda: reconciler.statistics().passes == 10)
    assert most == 3


async def test_there_is_a_most_of_queued_keys(clock: VirtualClock, store: Store) -> None:
    reconciler = made(clock, store, Recorder(clock), keys_limit=2)
    reconciler.enqueue("a")
    reconciler.enqueue("b")

    with pytest.raises(ResourceExhausted):
        reconciler.enqueue("c")
    reconciler.enqueue("a")


async def test_every_pass_says_why_not(clock: VirtualClock, store: Store) -> None:
    reason = Reason(code="FROZEN", message="automation is frozen: migration", subject="web-1")
    recorder = Recorder(clock, lambda _: PassResult(explanation=(reason,), requeue_after_seconds=60))
    reconciler = made(clock, store, recorder)
    registry = Explanations()
    registry.register(reconciler)
    assert reconciler.explain("a") is None
    async with running(reconciler):
        reconciler.enqueue("a")
        await clock.advance(10)
        (finding,) = registry.about("a")

    assert finding.controller == "test"
    assert finding.explanation.reasons == (reason,)
    assert finding.explanation.next_due_ns == finding.explanation.at_ns + 60 * 10**9
    assert registry.of("test") == registry.all()
    assert registry.about("b") == []


async def test_a_failure_keeps_the_reasons_found_before_it(clock: VirtualClock, store: Store) -> None:
    reason = Reason(code="LIMIT", message="at its limit")
    answers = iter([PassResult(explanation=(reason,))])

    def answer(_: str) -> PassResult:
        try:
            return next(answers)
        except StopIteration:
            raise Unavailable("down") from None

    reconciler = made(clock, store, Recorder(clock, answer))
    async with running(reconciler):
        for _ in range(2):
            reconciler.enqueue("a")
            await clock.advance(0.1)
        explanation = reconciler.explain("a")
    assert explanation is not None
    assert (explanation.reasons, explanation.failures) == ((reason,), 1)


async def test_only_so_many_explanations_are_kept(clock: VirtualClock, store: Store) -> None:
    reconciler = made(clock, store, Recorder(clock), explanations_limit=2)
    async with running(reconciler):
        for key in "abc":
            reconciler.enqueue(key)
        await clock.advance(1)

    assert [explanation.key for explanation in reconciler.explanations()] == ["b", "c"]
    reconciler.forget("b")
    assert reconciler.explain("b") is None


async def test_a_registry_knows_its_controllers(clock: VirtualClock, store: Store) -> None:
    registry = Explanations()
    registry.register(made(clock, store, Recorder(clock)))

    with pytest.raises(AlreadyExists):
        registry.register(made(clock, store, Recorder(clock)))
    with pytest.raises(NotFound, match="no controller named nobody"):
        registry.of("nobody")


# One owner


def leased(clock: VirtualClock, store: Store, holder: str, life_seconds: float | None = 30.0) -> Lease:
    return Lease(store, clock, name="l", holder=holder, life_seconds=life_seconds)


async def renewed(store: Store, clock: VirtualClock, seconds: float) -> None:
    """Let time pass in steps short enough for renewals, each of which is written for real."""
    for _ in range(round(seconds)):
        await clock.advance(1)
        await store.settled(LEASE)
        await settle()


async def test_on_a_store_of_its_own_a_restarted_server_takes_over_at_once(
    tmp_path: Path, clock: VirtualClock
) -> None:
    settings = StoreSettings(path=tmp_path / "restart.db")
    for expected_term in (1, 2):  # the first never lets go, as after a crash
        async with asyncio.timeout(DEADLINE_SECONDS):
            async with Store.open(settings, kinds=(LEASE,), clock=clock) as store:
                lease = Lease(store, clock, name="l")
                await lease.acquire()
                assert lease.held()
                written = store.get(LEASE, "", "l")
                assert written is not None
                assert written.spec.term == expected_term


async def test_on_a_store_of_its_own_holding_a_lease_costs_no_writes(
    clock: VirtualClock, store: Store
) -> None:
    reconciler = made(clock, store, Recorder(clock))
    async with running(reconciler):
        revision = store.revision
        await clock.advance(DAY)
        await store.settled(LEASE)
        assert store.revision == revision


async def test_a_second_holder_waits_until_the_first_has_not_renewed(
    clock: VirtualClock, store: Store
) -> None:
    first, second = leased(clock, store, "one"), leased(clock, store, "two")
    await first.acquire()
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(second.acquire())
        keeping = tasks.create_task(first.keep())
        await until(lambda: clock.sleepers == 2)
        await renewed(store, clock, 100)
        assert first.held(), "renewed in time"
        assert not waiting.done()
        keeping.cancel()  # as if it had died
        await renewed(store, clock, 31)
        await until(waiting.done)

    assert second.held()
    assert not first.held()


async def test_a_released_lease_goes_to_the_next_at_once(clock: VirtualClock, store: Store) -> None:
    first, second = leased(clock, store, "one"), leased(clock, store, "two")
    await first.acquire()
    await first.release()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await second.acquire()

    assert second.held()
    await first.release()
    assert second.held(), "who no longer holds it cannot release it"


async def test_who_loses_the_lease_stops_and_who_has_it_works(clock: VirtualClock, store: Store) -> None:
    hanging = asyncio.Event()
    log: list[str] = []

    def worker(holder: str) -> Reconciler:
        async def reconcile(key: str) -> PassResult:
            log.append(f"{holder} {key}")
            if key == "slow":
                try:
                    await hanging.wait()
                finally:
                    log.append(f"{holder} stopped")
            return DONE

        return Reconciler(holder, reconcile, clock=clock, store=store, lease=leased(clock, store, holder))

    one, two = worker("one"), worker("two")
    async with running(one, two):
        holder, other = (one, two) if one._lease.held() else (two, one)
        for reconciler in (one, two):
            reconciler.enqueue("slow")
        await until(lambda: log == [f"{holder.name} slow"])

        def steal(draft: Any) -> None:
            current = draft.get(LEASE, "", "l")
            assert current is not None
            from msgspec.structs import replace

            spec = replace(current.spec, term=current.spec.term + 1, holder="thief")
            draft.put(LEASE, "", "l", spec=spec)

        await store.transact(steal, actor="t", action="t", touches=[LEASE.key("", "l")])
        await renewed(store, clock, 11)  # the next renewal notices
        assert log == [f"{holder.name} slow", f"{holder.name} stopped"]
        assert holder.statistics().leases_lost == 1

        await renewed(store, clock, 40)  # the thief never renews
        await until(lambda: len(log) >= 3)
        assert one._lease.held() != two._lease.held()
    assert other.statistics().leases_lost == 0


async def test_two_holders_of_one_name_do_not_both_think_that_it_is_theirs(
    clock: VirtualClock, store: Store
) -> None:
    first, second = leased(clock, store, "same", None), leased(clock, store, "same", None)
    await first.acquire()
    await second.acquire()

    assert second.held()
    assert not first.held()
