"""Commands on streams: within an agent's room, until they land or their time is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetplane.fleet.streams.courier import StreamCourier
from fleetplane.fleet.streams.presence import Flight, Live, Presences
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, Commands, CommandState, state_of
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

SCOPE = "org/a"
TextLive = Live[str, Flight]


@dataclass
class Texts:
    """Commands are their verbs; a recall is the verb `stop`."""

    clock: VirtualClock
    limit: int = 2
    takes: bool = True

    def takes_work(self, _live: TextLive) -> bool:
        return self.takes

    def room(self, _live: TextLive) -> int:
        return self.limit

    def encode(self, _live: TextLive, command: Command) -> tuple[str, Flight]:
        if command.spec.verb == "unusable":
            raise RecursionError("too deep")
        now_ns = self.clock.now_ns()
        return command.spec.verb, Flight(sent_at_ns=now_ns, over_at_ns=now_ns + command.spec.run_for_ns)

    def encode_recall(self, _live: TextLive, _command: str, reason: str) -> str | None:
        return f"stop: {reason}"


class CourierRig:
    def __init__(self, store: Store, clock: VirtualClock) -> None:
        self.clock = clock
        self.texts = Texts(clock)
        self.sessions = Sessions()
        self.presences = Presences[TextLive]()
        self.courier: StreamCourier[str, TextLive, Flight] = StreamCourier(
            self.presences, self.texts, clock, channel="test"
        )
        self.ledger = Commands(store, clock, channel="test", courier=self.courier)

    def comes(self, agent: str, *, queue: int = 10) -> TextLive:
        live: TextLive = Live(
            agent=agent, session=self.sessions.open(agent, "t", limit=queue), since_ns=0, heard_ns=0
        )
        self.presences.came(live)
        return live

    async def issue(self, verb: str, *, repeatable: bool = True, wait: bool = False) -> Command:
        return await self.ledger.issue(
            SCOPE, verb, ["a"], actor="u", run_for_seconds=60.0, repeatable=repeatable, wait=wait
        )

    def state(self, command: Command) -> CommandState:
        (target,) = self.ledger.targets(command)
        return state_of(target)


def written(live: TextLive) -> list[str]:
    return list(live.session._queue)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[CourierRig]:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "commands.db")
    async with Store.open(settings, kinds=(COMMAND, COMMAND_TARGET), clock=clock) as store:
        yield CourierRig(store, clock)


async def test_an_agent_has_no_more_commands_than_it_has_room_for(rig: CourierRig) -> None:
    live = rig.comes("a")
    first, second, third = [await rig.issue(verb) for verb in ("one", "two", "three")]
    assert written(live) == ["one", "two"]
    assert rig.state(third) is CommandState.WAITING

    assert rig.courier.landed(live, first.name) is not None
    assert rig.courier.landed(live, first.name) is None, "it had it once"
    await rig.ledger.answered("a", first.name, ok=True)
    await rig.ledger.room("a")
    assert written(live) == ["one", "two", "three"]
    assert set(live.flights) == {second.name, third.name}


async def test_a_place_is_given_up_when_the_time_is_over(rig: CourierRig) -> None:
    live = rig.comes("a")
    for verb in ("one", "two"):
        await rig.issue(verb)
    third = await rig.ledger.issue(
        SCOPE, "three", ["a"], actor="u", deliver_within_seconds=600.0, run_for_seconds=60.0
    )
    await rig.clock.advance(59)
    await rig.courier.expire(rig.ledger)
    assert len(live.flights) == 2
    await rig.clock.advance(2)
    await rig.courier.expire(rig.ledger)
    assert set(live.flights) == {third.name}
    assert written(live)[-1] == "three"


async def test_who_is_away_takes_no_work_or_does_not_read_is_given_none(rig: CourierRig) -> None:
    assert rig.state(await rig.issue("nobody")) is CommandState.UNDELIVERABLE
    live = rig.comes("a", queue=1)
    rig.texts.takes = False
    assert rig.state(await rig.issue("draining")) is CommandState.UNDELIVERABLE
    rig.texts.takes = True
    assert rig.state(await rig.issue("unusable")) is CommandState.UNDELIVERABLE
    await rig.issue("one")
    full = await rig.issue("two")
    assert written(live) == ["one"]
    assert full.name not in live.flights, "what its queue did not take, it does not have"


@pytest.mark.parametrize("repeatable", [True, False])
async def test_what_no_message_can_carry_ends_when_its_turn_comes_and_holds_up_nothing(
    rig: CourierRig, *, repeatable: bool
) -> None:
    unusable = await rig.issue("unusable", wait=True, repeatable=repeatable)
    good = await rig.issue("good", wait=True)
    assert rig.state(unusable) is CommandState.WAITING
    live = rig.comes("a")
    await rig.ledger.room("a")
    [target] = rig.ledger.targets(unusable)
    assert target.status is not None
    assert target.status.state is CommandState.UNDELIVERABLE
    assert target.status.detail == "it cannot be sent: RecursionError: too deep"
    assert (written(live), rig.state(good)) == (["good"], CommandState.SENT)


async def test_a_command_is_recalled_once(rig: CourierRig) -> None:
    live = rig.comes("a")
    issued = await rig.issue("one")
    for _ in range(2):
        rig.courier.recall("a", issued.name, "enough")
    rig.courier.recall("a", "unknown", "enough")
    rig.courier.recall("b", issued.name, "enough")
    assert written(live) == ["one", "stop: enough"]
    assert issued.name in live.flights, "its place is taken until it answers"


async def test_what_an_older_stream_lost_waits_for_the_next_and_what_that_has_is_left_alone(
    rig: CourierRig,
) -> None:
    older = rig.comes("a")
    rig.texts.limit = 16
    lost, once = await rig.issue("lost"), await rig.issue("once", repeatable=False)
    older.session.close()
    rig.presences.gone(older)
    await rig.ledger.renewed("a")
    assert (rig.state(lost), rig.state(once)) == (CommandState.WAITING, CommandState.SENT), (
        "what may not be repeated is not"
    )
    newer = rig.comes("a")
    early = await rig.issue("early")
    await rig.ledger.room("a")
    assert written(newer) == ["early", "lost"]
    assert {rig.state(command) for command in (lost, once, early)} == {CommandState.SENT}
