from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agents_rig import BOSS, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies import commander
from fleetplane.domains.proxies.ports import Order, Result, Verb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.commands import COMMAND_TARGET, state_of
from fleetplane.kernel.errors import Unavailable


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def agent(rig: Rig) -> FakeAgent:
    agent = await rig.agent("web-01")
    await agent.open()
    return agent


def ordered(rig: Rig, agent: FakeAgent, order: Order) -> asyncio.Task[Result]:
    return asyncio.create_task(
        rig.side.commander.order(rig.stored(agent.agent_id), order, actor=BOSS), name=order.verb
    )


async def test_a_reload_ends_with_the_agents_own_words(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, Order(verb=Verb.RELOAD))
    command = await agent.next("command")
    assert command.reload.graceful
    await agent.answer(command.command_id, success=True, message="Nginx reloaded successfully", output="ok\n")
    assert await asked == Result(success=True, message="Nginx reloaded successfully", output="ok\n")


async def test_a_failure_is_an_answer_too(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, Order(verb=Verb.RELOAD))
    await agent.answer((await agent.next("command")).command_id, success=False, message="[emerg] no")
    assert await asked == Result(success=False, message="[emerg] no")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order(verb=Verb.RELOAD, graceful=False), pb.Command(reload=pb.ReloadCommand())),
        (Order(verb=Verb.RESTART, force=True), pb.Command(restart=pb.RestartCommand(force=True))),
        (
            Order(verb=Verb.STOP, timeout_seconds=7),
            pb.Command(stop=pb.StopCommand(graceful=True, timeout_seconds=7)),
        ),
        (Order(verb=Verb.STATUS), pb.Command(get_status=pb.GetStatusCommand())),
        (
            Order(verb=Verb.VALIDATE, config_content="events {}"),
            pb.Command(validate_config=pb.ValidateConfigCommand(config_content="events {}")),
        ),
    ],
    ids=lambda value: value.verb if isinstance(value, Order) else "",
)
async def test_every_verb_arrives_with_its_options(
    rig: Rig, agent: FakeAgent, order: Order, expected: pb.Command
) -> None:
    asked = ordered(rig, agent, order)
    command = await agent.next("command")
    await agent.answer(command.command_id, success=True)
    assert (await asked).success
    command.command_id = ""
    assert command == expected


async def test_an_agent_that_is_away_is_unavailable_at_once(rig: Rig) -> None:
    away = await rig.agent("away")
    with pytest.raises(Unavailable, match="agent away is not connected"):
        await ordered(rig, away, Order(verb=Verb.RELOAD))


async def test_an_agent_that_does_not_answer_is_unavailable_after_a_while(
    rig: Rig, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commander.ANSWER_SECONDS, Verb.RELOAD, 0.2)
    with pytest.raises(Unavailable, match="did not answer in time"):
        await ordered(rig, agent, Order(verb=Verb.RELOAD))
    command = await agent.next("command")
    await agent.answer(command.command_id, success=True, event_id="late")
    assert (await agent.next("ack")).message_id == "late", "a late answer is received, and changes nothing"
    assert [state_of(target) for target in rig.store.list(COMMAND_TARGET)] == ["timed_out"]


async def test_repeated_answers_count_once(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, Order(verb=Verb.RELOAD))
    command = await agent.next("command")
    for success in (True, False):
        await agent.answer(command.command_id, success=success, event_id="same")
        assert (await agent.next("ack")).message_id == "same"
    await agent.answer(command.command_id, success=False, event_id="other")
    await agent.next("ack")
    assert (await asked).success
    assert rig.side.commander.ledger.ignored == 1


async def test_nobody_answers_for_another(rig: Rig, agent: FakeAgent) -> None:
    other = await rig.agent("other")
    await other.open()
    asked = ordered(rig, agent, Order(verb=Verb.RELOAD))
    command = await agent.next("command")
    await other.answer(command.command_id, success=False)
    await other.next("ack")
    assert not asked.done()
    await agent.answer(command.command_id, success=True)
    assert (await asked).success


async def test_a_reload_lost_with_its_connection_is_sent_again_and_a_restart_is_not(
    rig: Rig, agent: FakeAgent
) -> None:
    reload = ordered(rig, agent, Order(verb=Verb.RELOAD))
    first = await agent.next("command")
    restart = ordered(rig, agent, Order(verb=Verb.RESTART))
    second = await agent.next("command")
    agent.leave()
    await agent.open()
    again = await agent.next("command")
    assert again.command_id == first.command_id
    await agent.answer(again.command_id, success=True)
    assert (await reload).success
    await agent.answer(second.command_id, success=True)
    assert (await restart).success, "its answer may come by the new connection"


async def test_a_deleted_agent_ends_what_waits_for_it(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, Order(verb=Verb.RELOAD))
    await agent.next("command")
    await rig.agents.delete(rig.scope, agent.agent_id, if_match=None, actor=BOSS)
    result = await asked
    assert (result.success, result.message) == (False, "the target was removed")


async def test_alerts_open_change_and_end_with_the_reports(rig: Rig, agent: FakeAgent) -> None:
    def system(cpu: float) -> pb.SystemMetrics:
        return pb.SystemMetrics(cpu_percent=cpu)

    own = pb.Alert(id="disk", severity="info", message="nearly full")
    await agent.health(system=system(85.0), alerts=[own])
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "warning", "disk": "info"})
    await agent.health(system=system(96.0))
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "critical"})
    await until(lambda: rig.state(agent.agent_id) == "degraded")
    await agent.health(system=system(91.0))
    await agent.health(system=system(89.0))
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "warning"})
    await until(lambda: rig.state(agent.agent_id) == "online")
    await agent.health(system=system(76.0))
    await agent.health(system=system(74.0))
    await until(lambda: rig.alerts(agent.agent_id) == {})
