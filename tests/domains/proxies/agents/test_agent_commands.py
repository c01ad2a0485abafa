from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.instances.agents_rig import BOSS, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents import commands as commander
from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentResult, AgentVerb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.commands import COMMAND_TARGET, Commands, state_of
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


def ordered(rig: Rig, agent: FakeAgent, order: AgentOrder) -> asyncio.Task[AgentResult]:
    return asyncio.create_task(
        rig.side.commander.order(rig.stored(agent.agent_id), order, actor=BOSS), name=order.verb
    )


async def test_a_reload_ends_with_the_agents_own_words(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    command = await agent.next("command")
    assert command.reload.graceful
    await agent.answer(command.command_id, success=True, message="Nginx reloaded successfully", output="ok\n")
    assert await asked == AgentResult(success=True, message="Nginx reloaded successfully", output="ok\n")


async def test_a_failure_is_an_answer_too(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    await agent.answer((await agent.next("command")).command_id, success=False, message="[emerg] no")
    assert await asked == AgentResult(success=False, message="[emerg] no")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (AgentOrder(verb=AgentVerb.RELOAD, graceful=False), pb.Command(reload=pb.ReloadCommand())),
        (AgentOrder(verb=AgentVerb.RESTART, force=True), pb.Command(restart=pb.RestartCommand(force=True))),
        (
            AgentOrder(verb=AgentVerb.STOP, timeout_seconds=7),
            pb.Command(stop=pb.StopCommand(graceful=True, timeout_seconds=7)),
        ),
        (AgentOrder(verb=AgentVerb.STATUS), pb.Command(get_status=pb.GetStatusCommand())),
        (
            AgentOrder(verb=AgentVerb.VALIDATE, config_content="events {}"),
            pb.Command(validate_config=pb.ValidateConfigCommand(config_content="events {}")),
        ),
    ],
    ids=lambda value: value.verb if isinstance(value, AgentOrder) else "",
)
async def test_every_verb_arrives_with_its_options(
    rig: Rig, agent: FakeAgent, order: AgentOrder, expected: pb.Command
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
        await ordered(rig, away, AgentOrder(verb=AgentVerb.RELOAD))


async def test_an_agent_that_does_not_answer_is_unavailable_after_a_while(
    rig: Rig, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commander.ANSWER_SECONDS, AgentVerb.RELOAD, 0.2)
    issue = Commands.issue

    async def delivered_whenever(*arguments: Any, **options: Any) -> Any:
        return await issue(*arguments, **{**options, "deliver_within_seconds": 60.0})

    monkeypatch.setattr(Commands, "issue", delivered_whenever)
    with pytest.raises(Unavailable, match="did not answer in time"):
        await ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    command = await agent.next("command")
    await agent.answer(command.command_id, success=True, event_id="late")
    assert (await agent.next("ack")).message_id == "late", "a late answer is received, and changes nothing"
    assert [state_of(target) for target in rig.store.list(COMMAND_TARGET)] == ["timed_out"]


async def test_repeated_answers_count_once(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
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
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    command = await agent.next("command")
    await other.answer(command.command_id, success=False)
    await other.next("ack")
    assert not asked.done()
    await agent.answer(command.command_id, success=True)
    assert (await asked).success


async def test_a_reload_lost_with_its_connection_is_sent_again_and_a_restart_is_not(
    rig: Rig, agent: FakeAgent
) -> None:
    reload = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    first = await agent.next("command")
    restart = ordered(rig, agent, AgentOrder(verb=AgentVerb.RESTART))
    second = await agent.next("command")
    agent.leave()
    await agent.open()
    again = await agent.next("command")
    assert again.command_id == first.command_id
    await agent.answer(again.command_id, success=True)
    assert (await reload).success
    await agent.answer(second.command_id, success=True)
    assert (await restart).success, "its answer may come by the new connection"


async def test_an_agent_has_sixteen_commands_at_once_and_gets_the_next_for_each_answer(
    rig: Rig, agent: FakeAgent
) -> None:
    asked = [ordered(rig, agent, AgentOrder(verb=AgentVerb.STATUS)) for _ in range(commander.IN_FLIGHT + 2)]
    first = [await agent.next("command") for _ in range(commander.IN_FLIGHT)]
    live = rig.side.presences.get(agent.agent_id)
    assert live is not None
    await until(lambda: rig.side.commander.ledger.open_count == len(asked))
    assert set(live.flights) == {command.command_id for command in first}
    assert live.session.queued == 0
    for command in first:
        await agent.answer(command.command_id, success=True)
    for _ in range(2):
        await agent.answer((await agent.next("command")).command_id, success=True)
    assert all(result.success for result in await asyncio.gather(*asked))
    await until(lambda: not live.flights)


async def test_an_agent_that_answers_nothing_takes_no_more_and_that_is_said(
    rig: Rig, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commander, "IN_FLIGHT", 1)
    first = ordered(rig, agent, AgentOrder(verb=AgentVerb.STATUS))
    await agent.next("command")
    monkeypatch.setitem(commander.ANSWER_SECONDS, AgentVerb.RELOAD, 0.2)
    with pytest.raises(Unavailable, match="has 1 commands to answer"):
        await ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    first.cancel()


async def test_a_deleted_agent_ends_what_waits_for_it(rig: Rig, agent: FakeAgent) -> None:
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
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
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "warning"})
    assert rig.state(agent.agent_id) == "online", "one spike is no degradation"
    live = rig.side.presences.get(agent.agent_id)
    assert live is not None
    live.heights.since_ns["cpu_high"] -= 121 * 10**9  # it lasts
    await agent.health(system=system(96.0))
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "critical"})
    await until(lambda: rig.state(agent.agent_id) == "degraded")
    status = rig.stored(agent.agent_id).status
    assert status is not None
    assert status.reasons == ("alert cpu_high: High CPU usage: 96%",)
    await agent.health(system=system(91.0))
    await agent.health(system=system(89.0))
    await until(lambda: rig.alerts(agent.agent_id) == {"cpu_high": "warning"})
    await until(lambda: rig.state(agent.agent_id) == "online")
    await agent.health(system=system(76.0))
    await agent.health(system=system(74.0))
    await until(lambda: rig.alerts(agent.agent_id) == {})


@pytest.mark.parametrize(
    ("event_type", "data", "success"),
    [
        ("command_result", {"status": "success", "message": "done"}, True),
        ("command.completed", {"message": "done"}, True),
        ("command.failed", {"error": "done"}, False),
        ("command.response", {"success": "false", "error_message": "done"}, False),
    ],
)
async def test_a_plain_answer_counts_by_the_id_of_its_command(
    rig: Rig, agent: FakeAgent, event_type: str, data: dict[str, str], success: bool
) -> None:
    asked = ordered(rig, agent, AgentOrder(verb=AgentVerb.RELOAD))
    command = await agent.next("command")
    await agent.send(event=pb.Event(event_id=command.command_id, event_type=event_type, data=data))
    assert await asked == AgentResult(success=success, message="done")
