"""Runs over daemons that answer when they are told to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.edge.edge_runs_rig import NODES, SCOPE, TENANT, Rig, rig_in
from support.fleet.declared_actions import carried_out
from support.shared.commandkit import FakeCourier
from support.shared.lost_answers import lost_answer

from fleetplane.domains.edge import resources
from fleetplane.domains.edge.rest.common import Manner
from fleetplane.domains.edge.rest.runs import FleetRoutes, InvokeBody
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.channel import (
    EDGE_RUN,
)
from fleetplane.domains.edge.streams.call_encoding import decode_call, public_id
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.fleet.runs.driver import RELEASED_AT_ONCE
from fleetplane.fleet.runs.events import RunEnded, Started, TargetEnded, TargetOutput
from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.fleet.runs.records import RunState, Summary, outcome_of
from fleetplane.fleet.runs.runs import CancelledTargets
from fleetplane.kernel import boundary
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Backoff, SystemClock
from fleetplane.kernel.commands import COMMAND, Command, Commands, CommandState
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    StorageFull,
    Unavailable,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.web.rest.app import Desk, Reply
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.idempotency import Answers
from fleetplane.web.rest.routes import Call, Headers


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    courier = FakeCourier()
    courier.here = set(NODES)
    async with rig_in(tmp_path, courier) as rig:
        await rig.enrol(*NODES)
        yield rig


async def test_one_after_the_other(rig: Rig) -> None:
    run = await rig.start()
    for number, node in enumerate(NODES, 1):
        assert await rig.sent_to(number) == NODES[:number]
        await rig.end(run, node, exit_code=0)
    assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=6))
    assert len(rig.sent) == 6


async def test_the_command_says_what_to_run_and_for_whom(rig: Rig) -> None:
    run = await rig.start("@host-2")
    assert await rig.sent_to(1) == [NODES[2]]
    command = rig.store.get(COMMAND, run.scope, run.name)
    assert command is not None
    call = decode_call(command.spec.payload)
    assert (call.tool, call.tenant, call.actor) == ("cmd.run", TENANT, "operator/test")
    assert (call.security_context, call.deadline_seconds) == ("zaru-free", 60.0)


async def test_many_at_once_but_no_more_than_allowed(rig: Rig) -> None:
    run = await rig.start(mode=Mode.PARALLEL, max_concurrency=4, on_failure=OnFailure.CONTINUE)
    assert len(await rig.sent_to(4)) == 4
    await rig.end(run, rig.sent[0], CommandState.FAILED, exit_code=3)
    assert len(await rig.sent_to(5)) == 5
    for node in rig.sent[1:5]:
        await rig.end(run, node)
    await rig.end(run, (await rig.sent_to(6))[5], CommandState.TIMED_OUT)
    assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=4, err=1, timed_out=1))


async def test_the_next_wave_waits_for_the_whole_one_before(rig: Rig) -> None:
    run = await rig.start(mode=Mode.ROLLING, batch=2, on_failure=OnFailure.CONTINUE)
    assert len(await rig.sent_to(2)) == 2
    await rig.end(run, rig.sent[0])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await rig.sent_to(3)
    await rig.end(run, rig.sent[1])
    assert len(await rig.sent_to(4)) == 4
    for node in rig.sent[2:4]:
        await rig.end(run, node)
    for node in (await rig.sent_to(6))[4:]:
        await rig.end(run, node)
    assert (await rig.over(run))[1].ok == 6


async def test_the_first_failure_stops_everything(rig: Rig) -> None:
    run = await rig.start(mode=Mode.PARALLEL, max_concurrency=3)
    sent = list(await rig.sent_to(3))
    await rig.end(run, sent[1], CommandState.FAILED)
    assert await rig.over(run) == (RunState.HALTED, Summary(err=1, cancelled=2, not_started=3))
    assert {target for target, _, _ in rig.courier.recalled} == {sent[0], sent[2]}
    assert len(rig.sent) == 3, "nothing was started afterwards"
    assert not await rig.ledger.ended(sent[0], run.name, CommandState.OK), "a late answer changes nothing"


async def test_so_many_failures_are_borne_and_no_more(rig: Rig) -> None:
    run = await rig.start(on_failure=OnFailure.STOP_AFTER, stop_after=2)
    await rig.end(run, (await rig.sent_to(1))[0], CommandState.FAILED)
    await rig.end(run, (await rig.sent_to(2))[1])
    await rig.end(run, (await rig.sent_to(3))[2], CommandState.TIMED_OUT)
    assert await rig.over(run) == (RunState.HALTED, Summary(ok=1, err=1, timed_out=1, not_started=3))


async def test_taking_a_run_back_reaches_those_that_are_at_it(rig: Rig) -> None:
    run = await rig.start(mode=Mode.PARALLEL, max_concurrency=2)
    sent = list(await rig.sent_to(2))
    assert await rig.runs.cancel(SCOPE, run.name, actor="operator/test") == CancelledTargets(cancelled=6)
    assert await rig.over(run) == (RunState.CANCELLED, Summary(cancelled=2, not_started=4))
    assert {target for target, _, _ in rig.courier.recalled} == set(sent)
    again = await rig.runs.cancel(SCOPE, run.name, actor="operator/test")
    assert again == CancelledTargets(), "there is nothing left"


async def test_a_daemon_that_leaves_fails_at_once(rig: Rig) -> None:
    run = await rig.start(on_failure=OnFailure.CONTINUE, mode=Mode.PARALLEL)
    await rig.sent_to(6)
    rig.courier.here.discard(NODES[0])
    await rig.ledger.lost(NODES[0], detail="edge_disconnected")
    for node in NODES[1:]:
        await rig.end(run, node)
    assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=5, err=1))
    assert {outcome_of(target) for target in rig.runs.targets(run)} == {"ok", "err"}


async def test_nothing_starts_when_too_few_can_be_reached(rig: Rig) -> None:
    rig.courier.here = set(NODES[:2])
    with pytest.raises(FailedPrecondition, match="3 are required") as refusal:
        await rig.start(require_min=3)
    assert refusal.value.details["cause"] == "RequireMinNotSatisfied"
    rig.courier.here.clear()
    with pytest.raises(Unavailable) as unavailable:
        await rig.start()
    assert unavailable.value.details["cause"] == "EdgeUnavailable"
    assert rig.runs.list(SCOPE) == []


async def test_those_left_out_are_named_with_the_reason(rig: Rig) -> None:
    rig.courier.here.discard(NODES[3])
    found = rig.runs.preview(SCOPE, targets.parse("all"))
    assert len(found.resolved) == 5
    assert [(skipped.node_id, skipped.reason) for skipped in found.skipped] == [(NODES[3], "Disconnected")]
    assert NODES[3] in rig.runs.preview(SCOPE, targets.parse("all"), wait=True).resolved


@pytest.mark.parametrize("error", [StorageFull("the disk is full"), RecursionError("a defect")])
async def test_a_run_whose_driver_fails_is_driven_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(boundary, "BACKOFF", Backoff(first_seconds=0.001, ceiling_seconds=0.001))
    refused: list[str] = []

    def refusing_once(name: str) -> Any:
        do = getattr(Commands, name)

        async def refuse(self: Commands, *args: Any, **more: Any) -> Any:
            if name not in refused:
                refused.append(name)
                raise error
            return await do(self, *args, **more)

        return refuse

    for name in ("release", "cancel"):
        monkeypatch.setattr(Commands, name, refusing_once(name))
    run = await rig.start()
    await rig.sent_to(1)
    await rig.end(run, NODES[0], CommandState.FAILED)
    assert await rig.over(run) == (RunState.HALTED, Summary(err=1, not_started=5))
    assert refused == ["release", "cancel"]


@pytest.mark.parametrize("given", ["pinned", "add", "remove"])
async def test_a_group_takes_no_more_members_at_once_than_it_may_have(rig: Rig, given: str) -> None:
    await rig.groups.create(TENANT, name="some", selector=None, pinned=(), actor="u")
    many = tuple(f"m{number}" for number in range(1001))
    with pytest.raises(InvalidArgument, match="1001 members, more than 1000"):
        await rig.groups.change(TENANT, "some", actor="u", **{given: many})  # type: ignore[arg-type]


async def test_a_durable_run_waits_for_who_is_away(rig: Rig) -> None:
    rig.courier.here.discard(NODES[0])
    run = await rig.start("@host-0", wait=True)
    rig.courier.here.add(NODES[0])
    await rig.until(lambda: rig.runs.summary(run).running == 1)
    await rig.ledger.arrived(NODES[0])
    await rig.sent_to(1)
    await rig.end(run, NODES[0])
    assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=1))


async def test_a_group_is_its_selector_and_its_pinned_members(rig: Rig) -> None:
    stranger = str(uuid.UUID(int=99))
    group = await rig.groups.create(
        TENANT,
        name="some",
        selector=targets.parse("tags=even").selector,
        pinned=(NODES[1], stranger),
        actor="u",
    )
    found = rig.runs.preview(SCOPE, targets.parse("group:some"))
    assert set(found.resolved) == {NODES[0], NODES[1], NODES[2], NODES[4]}
    assert [(skipped.node_id, skipped.reason) for skipped in found.skipped] == [(stranger, "NotFound")]
    assert rig.groups.get(TENANT, group.name).name == group.name
    with pytest.raises(AlreadyExists):
        await rig.groups.create(TENANT, name="some", selector=None, pinned=(), actor="u")
    with pytest.raises(NotFound):
        rig.groups.get("other", group.name)
    await rig.groups.change(TENANT, "some", actor="u", new_name="few", selector=None, remove=(stranger,))
    assert rig.runs.preview(SCOPE, targets.parse("group:few")).resolved == (NODES[1],)
    await rig.groups.delete(TENANT, "few", actor="u")
    await rig.groups.create(TENANT, name="few", selector=None, pinned=(), actor="u")


async def test_a_stranger_finds_no_run_and_no_daemon(rig: Rig) -> None:
    run = await rig.start()
    for refused in (
        lambda: rig.runs.get("other", run.name),
        lambda: rig.runs.preview("other", targets.parse(f"@{NODES[0]}")),
    ):
        with pytest.raises(NotFound):
            refused()
    with pytest.raises(NotFound):
        await rig.runs.cancel("other", run.name, actor="operator/other")


@pytest.mark.parametrize(
    "policy",
    [
        RunPolicy(batch=0),
        RunPolicy(max_concurrency=0),
        RunPolicy(stop_after=0),
        RunPolicy(deadline_seconds=0),
        RunPolicy(deadline_seconds=86_401),
        RunPolicy(require_min=-1),
        RunPolicy(wait=True, deliver_within_seconds=0),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(policy: RunPolicy) -> None:
    with pytest.raises(InvalidArgument):
        policy.check()


async def test_whoever_looks_on_sees_everything_and_may_come_back(rig: Rig) -> None:
    run = await rig.start(mode=Mode.PARALLEL)
    await rig.sent_to(6)
    rig.runs.progressed(NODES[0], run.name, "stdout", b"hello\n")
    for node in NODES:
        await rig.end(run, node, exit_code=0, stdout_tail=b"hello\n")
    await rig.over(run)
    feed = rig.runs.feed(run)
    assert feed is not None
    events = [event async for event in feed.after() if event is not None]
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    kinds = [type(event) for event in events]
    assert (kinds[0], kinds[-1]) == (Started, RunEnded)
    assert kinds.count(TargetEnded) == 6
    assert [event.output for event in events if isinstance(event, TargetOutput)] == [b"hello\n"]
    later = [event async for event in feed.after(events[3].number) if event is not None]
    assert later == events[4:]


async def test_a_run_whose_starter_went_away_is_driven_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, transact = 0, rig.store.transact
    for turns in range(1, 10):  # until the transaction runs, while the disk is waited for, and after
        starting = asyncio.create_task(rig.start("@host-1"))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        left += starting.cancelled()

    async def gone_while_it_is_written(*args: Any, **options: Any) -> Any:
        writing = asyncio.ensure_future(transact(*args, **options))
        if asyncio.current_task() is starting:
            starting.cancel()
        return await asyncio.shield(writing)

    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "transact", gone_while_it_is_written)
        starting = asyncio.create_task(rig.start("@host-1"))
        await asyncio.gather(starting, return_exceptions=True)
        left += starting.cancelled()
    await rig.store.transact(lambda _: None, actor="test", action="settle", touches=[])
    written = rig.store.list(EDGE_RUN)
    assert left > 10 - len(written), "some were written although their starters had gone"
    for run in written:
        await rig.until(lambda run=run: run.name in rig.commands_sent)  # type: ignore[misc]
        await rig.end(run, NODES[1])
        assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=1))


async def test_a_run_that_was_cancelled_right_before_a_crash_sends_nothing_more(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = set(NODES)
    async with rig_in(tmp_path, courier) as first:
        await first.enrol(*NODES)
        run = await first.start(on_failure=OnFailure.CONTINUE)
        await first.sent_to(1)
        # The server is killed after the run's record was written and before its targets were.
        await first.runs._book.conclude(run, RunState.CANCELLED, actor="operator/test")
    sent = len(courier.delivered)
    async with rig_in(tmp_path, courier) as second:
        state, summary = await second.over(run)
        assert (state, summary.not_started, summary.err) == (RunState.CANCELLED, 5, 1)
        assert len(courier.delivered) == sent, "nothing was sent after the operator had cancelled"


async def test_a_run_goes_on_after_the_server_was_restarted(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = set(NODES)
    async with rig_in(tmp_path, courier) as rig:
        await rig.enrol(*NODES)
        run = await rig.start(on_failure=OnFailure.CONTINUE, mode=Mode.ROLLING, batch=2)
        await rig.end(run, (await rig.sent_to(2))[0])
    async with rig_in(tmp_path, courier) as rig:
        for number in (4, 6):
            for node in (await rig.sent_to(number))[number - 2 :]:
                await rig.end(run, node)
        assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=5, err=1)), "what was under way is lost"
    async with rig_in(tmp_path, courier) as rig:
        assert (await rig.over(run))[1] == Summary(ok=5, err=1)


class Prompt(FakeCourier):
    """Its targets answer as soon as they are asked."""

    def __init__(self, outcome: CommandState) -> None:
        super().__init__()
        self.here = set(MANY)
        self.outcome = outcome
        self.ledger: Commands | None = None
        self.answering: list[asyncio.Task[bool]] = []

    def deliver(self, target: str, command: Command) -> bool:
        took = super().deliver(target, command)
        assert took
        assert self.ledger is not None
        answer = self.ledger.ended(target, command.name, self.outcome)
        self.answering.append(asyncio.create_task(answer))
        return took


MANY = [str(uuid.UUID(int=number)) for number in range(1, 6 * RELEASED_AT_ONCE)]


@asynccontextmanager
async def large_rig(folder: Path, outcome: CommandState) -> AsyncIterator[Rig]:
    courier = Prompt(outcome)
    async with rig_in(folder, courier) as rig:
        courier.ledger = rig.ledger
        await rig.enrol(*MANY)
        yield rig
        await asyncio.gather(*courier.answering)


async def test_a_failure_halts_a_large_run_while_most_still_wait_for_their_turn(tmp_path: Path) -> None:
    async with large_rig(tmp_path, CommandState.FAILED) as rig:
        run = await rig.start(mode=Mode.PARALLEL, on_failure=OnFailure.FAIL_FAST)
        state, summary = await rig.over(run)
        assert state is RunState.HALTED
        assert summary.ok == 0
        assert summary.not_started >= RELEASED_AT_ONCE
        assert len(rig.sent) == summary.err + summary.cancelled


async def test_results_of_a_large_run_are_told_while_others_still_wait(tmp_path: Path) -> None:
    async with large_rig(tmp_path, CommandState.OK) as rig:
        run = await rig.start(mode=Mode.PARALLEL, on_failure=OnFailure.CONTINUE)
        feed = rig.runs.feed(run)
        assert feed is not None
        sent_by_then = [len(rig.sent) async for event in feed.after() if isinstance(event, TargetEnded)]
        assert sent_by_then[0] <= 3 * RELEASED_AT_ONCE
        assert len(sent_by_then) == len(MANY)
        assert await rig.over(run) == (RunState.COMPLETE, Summary(ok=len(MANY)))


async def test_the_actions_run_and_cancel_of_daemons_groups_and_runs(rig: Rig) -> None:
    group = await rig.groups.create(TENANT, name="web", selector=None, pinned=(NODES[1],), actor="test")
    domain, clock = SimpleNamespace(runs=rig.runs), SystemClock()

    async def begun(resource: AnyPublicResource, name: str, action: str, body: Any = None) -> str:
        answer = await carried_out(resource, domain, rig.store, clock, name, action, body)
        return "" if answer.begun is None else answer.begun.name

    tool = {"tool": "cmd.run", "args": {"argv": ["true"]}}
    first = await begun(resources.EDGE_NODES, NODES[0], "run", tool)
    assert await rig.sent_to(1) == [NODES[0]]
    run = rig.runs.get(SCOPE, first)
    await rig.end(run, NODES[0])
    assert (await rig.over(run))[0] is RunState.COMPLETE

    second = await begun(resources.EDGE_GROUPS, group.spec.name, "run", tool)
    assert (await rig.sent_to(2))[1:] == [NODES[1]]
    await begun(resources.EDGE_RUNS, second, "cancel")
    assert (await rig.over(rig.runs.get(SCOPE, second)))[0] is RunState.CANCELLED


async def test_a_run_whose_answer_was_lost_is_named_to_whoever_asks_again_with_its_key(rig: Rig) -> None:
    routes = FleetRoutes(
        runs=rig.runs, node=lambda *_: None, manner=Manner(shipped=False), deadline_seconds=60.0
    )
    (route,) = [one for one in routes.routes() if one.path == "/fleet/invoke"]
    clock = SystemClock()
    answers = Answers(rig.store, MasterKey(bytes(32), clock), clock, namespace="edge")
    desk: Desk[Any] = Desk(None, answers, rig.store)  # type: ignore[arg-type]
    principal = Principal(name="op", roles=frozenset(), scope=SCOPE)
    call: Call[Any] = Call(
        request_id="",
        address="",
        scope=SCOPE,
        path={},
        query={},
        headers=Headers({b"accept": b"application/json"}, method="POST"),
        body=InvokeBody(target="all", tool="cmd.run"),
        _caller=OperatorCaller(principal=principal),
    )
    with lost_answer(rig.store):
        await desk._once(route, call, "digest", b"")
    again = await desk._once(route, call, "digest", b"")
    assert isinstance(again, Reply)
    assert again.given["idempotency-replayed"] == "true"
    (run,) = rig.runs.list(SCOPE)
    told = msgspec.json.decode(again.body)
    assert told["fleet_command_id"] == again.given["x-fleet-command-id"] == public_id(run.name)
    assert told["summary"]["pending"] == run.spec.targets
