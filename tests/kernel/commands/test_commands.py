from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.shared.commandkit import SCOPE, FakeCourier, ledger

from fleetplane.kernel.commands import (
    COMMAND_TARGET,
    Command,
    CommandLimits,
    Commands,
    CommandState,
    run,
    state_of,
)
from fleetplane.kernel.errors import InvalidArgument, NotFound, ResourceExhausted
from fleetplane.sim.clock import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def courier() -> FakeCourier:
    return FakeCourier()


@pytest.fixture
async def commands(tmp_path: Path, clock: VirtualClock, courier: FakeCourier) -> AsyncIterator[Commands]:
    async with ledger(tmp_path, clock, courier) as (_, commands):
        yield commands


def outcomes(commands: Commands, command: Command) -> dict[str, CommandState]:
    return {target.name: state_of(target) for target in commands.targets(command)}


async def test_each_target_gets_its_own_outcome_and_the_command_counts_them(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here = {"a", "b"}
    issued = await commands.issue(SCOPE, "reload", ["a", "b", "c"], actor="user/1")
    assert [target for target, _, _ in courier.delivered] == ["a", "b"]

    assert await commands.answered("a", issued.name, ok=True, detail="done")
    assert await commands.answered("b", issued.name, ok=False, detail="broken")

    done = await commands.finished(issued)
    assert outcomes(commands, issued) == {
        "a": CommandState.OK,
        "b": CommandState.FAILED,
        "c": CommandState.UNDELIVERABLE,
    }
    assert done.status is not None
    assert (done.status.open, sum(done.status.outcomes.values())) == (0, 3)
    assert done.status.finished_at_ns is not None


async def test_a_command_waits_for_a_target_that_is_away_if_asked_to(
    commands: Commands, courier: FakeCourier
) -> None:
    issued = await commands.issue(SCOPE, "one", ["a"], actor="u", wait=True)
    second = await commands.issue(SCOPE, "two", ["a"], actor="u", wait=True)
    assert outcomes(commands, issued) == {"a": CommandState.WAITING}

    courier.here.add("a")
    await commands.arrived("a")

    assert [verb for _, verb, _ in courier.delivered] == ["one", "two"], "in the order of their issue"
    assert outcomes(commands, second) == {"a": CommandState.SENT}


async def test_the_two_deadlines_are_separate(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here.add("here")
    issued = await commands.issue(
        SCOPE, "x", ["here", "away"], actor="u", wait=True, deliver_within_seconds=100, run_for_seconds=10
    )
    await clock.advance(10)
    await commands.expire()
    assert outcomes(commands, issued) == {"here": CommandState.TIMED_OUT, "away": CommandState.WAITING}

    await clock.advance(90)
    await commands.expire()
    assert outcomes(commands, issued) == {"here": CommandState.TIMED_OUT, "away": CommandState.EXPIRED}


async def test_time_to_run_begins_with_the_delivery(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    issued = await commands.issue(
        SCOPE, "x", ["a"], actor="u", wait=True, deliver_within_seconds=100, run_for_seconds=10
    )
    await clock.advance(95)
    courier.here.add("a")
    await commands.arrived("a")
    await clock.advance(9)
    await commands.expire()
    assert outcomes(commands, issued) == {"a": CommandState.SENT}
    await clock.advance(1)
    await commands.expire()
    assert outcomes(commands, issued) == {"a": CommandState.TIMED_OUT}


async def test_what_arrives_after_the_delivery_deadline_is_not_sent_even_before_it_was_noticed(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u", wait=True, deliver_within_seconds=5)
    await clock.advance(5)
    courier.here.add("a")
    await commands.arrived("a")
    assert courier.delivered == []
    assert outcomes(commands, issued) == {"a": CommandState.EXPIRED}


async def test_late_and_repeated_words_change_nothing(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here.add("a")
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u", run_for_seconds=1)
    await clock.advance(1)
    await commands.expire()

    assert not await commands.answered("a", issued.name, ok=True)
    assert not await commands.answered("a", issued.name, ok=False)
    assert not await commands.answered("a", "never-issued", ok=True)
    assert not await commands.answered("b", issued.name, ok=True), "nobody answers for another"
    assert outcomes(commands, issued) == {"a": CommandState.TIMED_OUT}
    assert commands.ignored == 4


async def test_an_answer_may_overtake_everything_else(commands: Commands) -> None:
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u", wait=True)
    assert await commands.answered("a", issued.name, ok=True)
    assert not await commands.started("a", issued.name)
    assert outcomes(commands, issued) == {"a": CommandState.OK}


async def test_a_repeatable_command_is_sent_again_in_the_next_session_and_another_is_not(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here.add("a")
    again = await commands.issue(SCOPE, "again", ["a"], actor="u")
    once = await commands.issue(SCOPE, "once", ["a"], actor="u", repeatable=False)
    await commands.arrived("a")
    assert [verb for _, verb, _ in courier.delivered] == ["again", "once", "again"]
    assert outcomes(commands, again) == outcomes(commands, once) == {"a": CommandState.SENT}


async def test_a_session_without_room_turns_a_command_back(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here.add("a")
    courier.full.add("a")
    impatient = await commands.issue(SCOPE, "x", ["a"], actor="u")
    patient = await commands.issue(SCOPE, "y", ["a"], actor="u", wait=True)
    assert outcomes(commands, impatient) == {"a": CommandState.UNDELIVERABLE}
    assert outcomes(commands, patient) == {"a": CommandState.WAITING}

    courier.full.clear()
    await clock.advance(5)
    await commands.expire()
    assert [verb for _, verb, _ in courier.delivered] == ["y"], "it is tried again by itself"


async def test_a_target_that_cannot_stop_is_told_to_and_its_own_word_counts(
    tmp_path: Path, clock: VirtualClock, courier: FakeCourier
) -> None:
    async with ledger(tmp_path, clock, courier, stops=lambda target: target != "deaf") as (_, commands):
        courier.here = {"deaf", "a"}
        issued = await commands.issue(
            SCOPE, "x", ["deaf", "a", "away"], actor="u", wait=True, run_for_seconds=60
        )
        late = await commands.issue(SCOPE, "x", ["deaf"], actor="u", run_for_seconds=60)
        for one in (issued, late):
            await commands.cancel(SCOPE, one.name, actor="user/2")
        assert outcomes(commands, issued) == {
            "deaf": CommandState.SENT,
            "a": CommandState.CANCELLED,
            "away": CommandState.CANCELLED,
        }
        assert [target for target, _, _ in courier.recalled] == ["a", "deaf", "deaf"]
        (told,) = [one.status for one in commands.targets(issued) if one.name == "deaf"]
        assert told is not None
        assert (told.told_to_stop, told.detail) == (True, "told to stop; may finish: cancelled by user/2")
        await commands.cancel(SCOPE, issued.name, actor="user/3")
        assert len(courier.recalled) == 3, "it is told once"
        assert await commands.answered("deaf", issued.name, ok=True, detail="done")
        assert outcomes(commands, issued)["deaf"] is CommandState.OK
        await clock.advance(61)
        await commands.expire()
        (silent,) = [one.status for one in commands.targets(late)]
        assert silent is not None
        assert silent.state is CommandState.TIMED_OUT
        assert silent.detail.startswith("told to stop; may finish: ")


async def test_cancelling_ends_what_is_open_and_leaves_what_ended(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here = {"a", "b"}
    issued = await commands.issue(SCOPE, "x", ["a", "b", "c"], actor="u", wait=True)
    await commands.answered("a", issued.name, ok=True)
    await commands.started("b", issued.name)

    await commands.cancel(SCOPE, issued.name, actor="user/2")
    assert not await commands.answered("b", issued.name, ok=True)

    assert outcomes(commands, issued) == {
        "a": CommandState.OK,
        "b": CommandState.CANCELLED,
        "c": CommandState.CANCELLED,
    }
    with pytest.raises(NotFound):
        await commands.cancel(SCOPE, "unknown", actor="u")


async def test_a_removed_target_ends_all_it_had(commands: Commands, courier: FakeCourier) -> None:
    waiting = await commands.issue(SCOPE, "x", ["a"], actor="u", wait=True)
    courier.here.add("a")
    sent = await commands.issue(SCOPE, "y", ["a"], actor="u")
    await commands.removed("a")
    assert outcomes(commands, waiting) == {"a": CommandState.UNDELIVERABLE}
    assert outcomes(commands, sent) == {"a": CommandState.FAILED}, "nobody knows whether it was done"


async def test_a_restart_loses_nothing(tmp_path: Path, clock: VirtualClock, courier: FakeCourier) -> None:
    courier.here.add("a")
    async with ledger(tmp_path, clock, courier) as (_, commands):
        sent = await commands.issue(SCOPE, "sent", ["a"], actor="u", run_for_seconds=30)
        waiting = await commands.issue(
            SCOPE, "waiting", ["b"], actor="u", wait=True, deliver_within_seconds=20
        )
    await clock.advance(20)
    async with ledger(tmp_path, clock, courier) as (_, commands):
        await commands.expire()
        assert outcomes(commands, waiting) == {"b": CommandState.EXPIRED}, "deadlines go on while nobody runs"
        assert await commands.answered("a", sent.name, ok=True), "an answer may come to the next run"
        assert outcomes(commands, sent) == {"a": CommandState.OK}


async def test_outcomes_can_be_watched(tmp_path: Path, clock: VirtualClock, courier: FakeCourier) -> None:
    courier.here.add("a")
    async with ledger(tmp_path, clock, courier) as (store, commands):
        with store.watch(COMMAND_TARGET, SCOPE) as watch:
            issued = await commands.issue(SCOPE, "x", ["a"], actor="u")
            await commands.answered("a", issued.name, ok=True)
            seen: list[CommandState] = []
            async with asyncio.timeout(60):
                while CommandState.OK not in seen:
                    seen += [state_of(event.resource) for event in (await watch.next()).events]
        assert seen == [CommandState.SENT, CommandState.OK]


async def test_deadlines_are_kept_by_the_runner_also_for_an_issuer_that_left(
    tmp_path: Path, clock: VirtualClock, courier: FakeCourier
) -> None:
    async with ledger(tmp_path, clock, courier) as (store, commands), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(commands, clock))
        await asyncio.sleep(0)
        leaving = tasks.create_task(
            commands.issue(SCOPE, "x", ["a"], actor="u", wait=True, deliver_within_seconds=3)
        )
        async with asyncio.timeout(60):
            while not (store.list(COMMAND_TARGET) or leaving.done()):
                await asyncio.sleep(0)
        leaving.cancel()
        async with asyncio.timeout(60):
            while state_of(store.list(COMMAND_TARGET)[0]) is CommandState.WAITING:
                await clock.advance(0.5)
        assert state_of(store.list(COMMAND_TARGET)[0]) is CommandState.EXPIRED
        running.cancel()


async def test_old_commands_are_forgotten_with_their_targets(
    tmp_path: Path, clock: VirtualClock, courier: FakeCourier
) -> None:
    async with ledger(tmp_path, clock, courier) as (store, commands):
        await commands.issue(SCOPE, "x", ["a", "b"], actor="u")
        open_ = await commands.issue(
            SCOPE, "y", ["a"], actor="u", wait=True, deliver_within_seconds=20 * 86_400
        )
        assert await commands.sweep() == 0
        await clock.advance(8 * 86_400)
        assert await commands.sweep() == 1
        assert {target.spec.command for target in store.list(COMMAND_TARGET)} == {open_.name}


async def test_limits_are_named(tmp_path: Path, clock: VirtualClock, courier: FakeCourier) -> None:
    limits = CommandLimits(targets=2, open=3, payload_bytes=4)
    async with ledger(tmp_path, clock, courier, limits=limits) as (store, commands):
        for wrong in ([], ["a", "a"], ["a", "b", "c"]):
            with pytest.raises(InvalidArgument, match="targets"):
                await commands.issue(SCOPE, "x", wrong, actor="u")
        with pytest.raises(InvalidArgument, match="at most 4 bytes"):
            await commands.issue(SCOPE, "x", ["a"], actor="u", payload=b"12345")
        with pytest.raises(InvalidArgument, match="waits at most"):
            await commands.issue(SCOPE, "x", ["a"], actor="u", deliver_within_seconds=0)
        with pytest.raises(InvalidArgument, match="runs for at most"):
            await commands.issue(SCOPE, "x", ["a"], actor="u", run_for_seconds=10**9)
        await commands.issue(SCOPE, "x", ["a", "b"], actor="u", wait=True)
        with pytest.raises(ResourceExhausted, match="open"):
            await commands.issue(SCOPE, "x", ["a", "b"], actor="u", wait=True)
        assert len(store.list(COMMAND_TARGET)) == 2


async def test_output_is_kept_for_a_while_and_bounded(commands: Commands, courier: FakeCourier) -> None:
    courier.here.add("a")
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u")
    await commands.answered("a", issued.name, ok=True, output="x" * 100_000 + "end")
    kept = commands.outputs.get(issued.name, "a")
    assert kept.endswith("end")
    assert len(kept) == 64 * 1024


async def test_another_channels_commands_are_left_alone(
    tmp_path: Path, clock: VirtualClock, courier: FakeCourier
) -> None:
    async with ledger(tmp_path, clock, courier) as (store, commands):
        issued = await commands.issue(SCOPE, "x", ["a"], actor="u", wait=True)
        other = Commands(store, clock, channel="other", courier=courier)
        other.recover()
        await clock.advance(120)
        await other.expire()
        assert outcomes(commands, issued) == {"a": CommandState.WAITING}
        assert not await other.answered("a", issued.name, ok=True)


async def test_what_may_have_run_does_not_end_as_undelivered(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here.add("a")
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u", deliver_within_seconds=5)
    courier.full.add("a")
    await commands.arrived("a")
    assert outcomes(commands, issued) == {"a": CommandState.WAITING}, "the new session did not take it"
    await clock.advance(5)
    await commands.expire()
    assert outcomes(commands, issued) == {"a": CommandState.TIMED_OUT}, "the first session may have"


async def test_what_is_held_goes_to_its_targets_only_when_it_is_released(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here = {"a", "b"}
    issued = await commands.issue(SCOPE, "x", ["a", "b", "c"], actor="u", hold=True)
    assert courier.delivered == []
    assert set(outcomes(commands, issued).values()) == {CommandState.HELD}

    await commands.release(issued, ["a"])
    assert outcomes(commands, issued) == {
        "a": CommandState.SENT,
        "b": CommandState.HELD,
        "c": CommandState.HELD,
    }
    await commands.release(issued, ["a", "c"])
    assert len(courier.delivered) == 1, "released twice, delivered once"
    assert outcomes(commands, issued)["c"] is CommandState.UNDELIVERABLE, "it is away, and is not waited for"


async def test_what_is_held_for_too_long_expires(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here = {"a"}
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u", hold=True, deliver_within_seconds=10)
    await clock.advance(11)
    await commands.expire()
    assert outcomes(commands, issued) == {"a": CommandState.EXPIRED}


async def test_a_target_without_room_gets_the_next_when_it_has_some(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here, courier.limits = {"a"}, {"a": 1}
    first = await commands.issue(SCOPE, "one", ["a"], actor="u")
    second = await commands.issue(SCOPE, "two", ["a"], actor="u")
    third = await commands.issue(SCOPE, "three", ["a"], actor="u")
    assert [verb for _, verb, _ in courier.delivered] == ["one"]
    assert outcomes(commands, second) == {"a": CommandState.WAITING}

    await commands.ended("a", first.name, CommandState.OK)
    courier.held["a"].clear()
    await commands.room("a")
    assert [verb for _, verb, _ in courier.delivered] == ["one", "two"]
    assert outcomes(commands, third) == {"a": CommandState.WAITING}


async def test_a_lost_session_ends_what_it_had_and_what_would_not_wait(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here, courier.limits = {"a"}, {"a": 2}
    once = await commands.issue(SCOPE, "once", ["a"], actor="u", repeatable=False)
    again = await commands.issue(SCOPE, "again", ["a"], actor="u", repeatable=True)
    queued = await commands.issue(SCOPE, "queued", ["a"], actor="u")
    patient = await commands.issue(SCOPE, "patient", ["a"], actor="u", wait=True)

    courier.here.clear()
    await commands.lost("a", detail="gone")
    assert outcomes(commands, once) == {"a": CommandState.FAILED}
    assert outcomes(commands, queued) == {"a": CommandState.UNDELIVERABLE}
    assert outcomes(commands, again) == {"a": CommandState.SENT}, "it is sent again in the next session"
    assert outcomes(commands, patient) == {"a": CommandState.WAITING}
    (target,) = commands.targets(once)
    assert target.status is not None
    assert target.status.detail == "gone"


async def test_those_that_may_be_at_it_are_told_when_nobody_waits_any_more(
    commands: Commands, courier: FakeCourier, clock: VirtualClock
) -> None:
    courier.here = {"a", "b"}
    issued = await commands.issue(
        SCOPE, "x", ["a", "b", "c"], actor="u", wait=True, run_for_seconds=10, deliver_within_seconds=100
    )
    await commands.cancel(SCOPE, issued.name, actor="u", targets={"a", "c"}, reason="enough")
    assert courier.recalled == [("a", issued.name, "enough")], "c never had it"
    assert outcomes(commands, issued) == {
        "a": CommandState.CANCELLED,
        "b": CommandState.SENT,
        "c": CommandState.CANCELLED,
    }

    await clock.advance(11)
    await commands.expire()
    assert courier.recalled[1:] == [("b", issued.name, "no word came in time")]
    assert outcomes(commands, issued)["b"] is CommandState.TIMED_OUT


async def test_a_result_is_kept_with_the_outcome_and_bounded(
    commands: Commands, courier: FakeCourier
) -> None:
    courier.here = {"a"}
    issued = await commands.issue(SCOPE, "x", ["a"], actor="u")
    with pytest.raises(InvalidArgument, match="at most"):
        await commands.ended("a", issued.name, CommandState.OK, result=bytes(16 * 1024 + 1))
    assert await commands.ended("a", issued.name, CommandState.TIMED_OUT, detail="slow", result=b"shown")
    (target,) = commands.targets(issued)
    assert target.status is not None
    assert (target.status.state, target.status.result) == (CommandState.TIMED_OUT, b"shown")
    assert not await commands.ended("a", issued.name, CommandState.OK), "the first word stands"


async def test_after_a_restart_nobody_has_a_session(
    tmp_path: Path, clock: VirtualClock, courier: FakeCourier
) -> None:
    courier.here = {"a", "b"}
    async with ledger(tmp_path, clock, courier) as (_, commands):
        once = await commands.issue(SCOPE, "x", ["a"], actor="u", repeatable=False)
        held = await commands.issue(SCOPE, "y", ["b"], actor="u", hold=True)
    async with ledger(tmp_path, clock, courier) as (_, commands):
        await commands.all_lost()
        assert outcomes(commands, once) == {"a": CommandState.FAILED}
        assert outcomes(commands, held) == {"b": CommandState.HELD}, "its turn may still come"
