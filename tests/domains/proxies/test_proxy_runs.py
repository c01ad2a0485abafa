"""Commands to the NGINX of many agents: waves, what is never sent twice, cancelling, restarts, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet.declared_actions import carried_out
from support.instances.agents_rig import BOSS, FakeAgent, Rig, agents_rig, until
from support.proxies.proxy_api import Api, rest_api

from fleetplane.domains.proxies.agents.runs import PROXY_RUN, ProxyCall, ProxyCommand, ProxyRun
from fleetplane.domains.proxies.kinds.records import OrganizationSpec, WorkspaceSpec
from fleetplane.domains.proxies.nginx.site import VALIDATES_TYPED
from fleetplane.domains.proxies.resources.agents import AGENTS
from fleetplane.domains.proxies.resources.runs import RUNS
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.fleet.runs import runs as all_runs
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.fleet.runs.records import RunState, outcome_of
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.commands import COMMAND
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable

ALL = RunTarget(everyone=True)


class LaterClock(SystemClock):
    """One that a test sets forward."""

    def __init__(self) -> None:
        self.later_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.later_ns


async def time_is_up(rig: Rig, clock: LaterClock) -> None:
    """Whatever was sent and not answered has run for as long as it may."""
    clock.later_ns += 61 * 10**9
    await rig.side.runs.ledger.expire()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


async def connected(rig: Rig, number: int, **about: Any) -> list[FakeAgent]:
    agents = [await rig.agent(f"web-{place}", tier="web" if place % 2 else "db") for place in range(number)]
    for agent in agents:
        await agent.open(**about)
    return agents


async def start(rig: Rig, command: str, target: RunTarget = ALL, **policy: Any) -> ProxyRun:
    call = ProxyCall(command=ProxyCommand(command))
    policy = {"deadline_seconds": call.answer_seconds, **policy}
    order = RunOrder(
        scope=rig.scope, target=target, call=call, policy=RunPolicy(**policy), actor=f"{BOSS}?request_id=r"
    )
    return await rig.side.runs.start(order)


async def over(rig: Rig, run: ProxyRun) -> tuple[str, list[str]]:
    """How a run ended, and each of its targets."""

    def ended() -> bool:
        current = rig.side.runs.get(rig.scope, run.name)
        return current.status is not None and current.status.ended_at_ns is not None

    await until(ended)
    current = rig.side.runs.get(rig.scope, run.name)
    assert current.status is not None
    by_name = {target.name: outcome_of(target).value for target in rig.side.runs.targets(run)}
    assert len(by_name) == current.spec.targets, "each target has exactly one outcome"
    return current.status.state, [by_name[name] for name in sorted(by_name, key=lambda one: named(rig, one))]


def named(rig: Rig, agent_id: str) -> str:
    return rig.stored(agent_id).spec.name


async def quiet(agent: FakeAgent) -> bool:
    """Whether nothing comes for a moment, beside what every stream says."""
    try:
        async with asyncio.timeout(0.3):
            await agent.next("command")
    except TimeoutError:
        return True
    return False


async def test_a_rolling_reload_goes_wave_by_wave_and_keeps_what_agents_said(rig: Rig) -> None:
    agents = await connected(rig, 3)
    run = await start(rig, "reload", mode=Mode.ROLLING, batch=2)
    first = [await agent.next("command") for agent in agents[:2]]
    assert all(command.reload.graceful for command in first)
    for agent, command in zip(agents, first, strict=False):
        await agent.answer(command.command_id, success=True, message="done", output="ok\n")
    last = await agents[2].next("command")
    assert last.command_id == run.name
    await agents[2].answer(last.command_id, success=True, message="done")
    assert await over(rig, run) == (RunState.COMPLETE, ["ok", "ok", "ok"])
    assert rig.side.runs.ledger.outputs.get(run.name, agents[0].agent_id) == "ok\n"
    assert run.spec.actor == f"{BOSS}?request_id=r"


async def test_a_run_stops_after_as_many_failures_as_it_may_have(rig: Rig) -> None:
    agents = await connected(rig, 3)
    run = await start(rig, "restart", mode=Mode.SEQUENTIAL)
    await agents[0].answer((await agents[0].next("command")).command_id, success=False, message="[emerg] no")
    assert await over(rig, run) == (RunState.HALTED, ["err", "not_started", "not_started"])


async def another_workspace(rig: Rig) -> str:
    organization = await rig.places.create_organization(
        OrganizationSpec(name="Them", slug="them"), owner="them", actor=BOSS
    )
    workspace = await rig.places.create_workspace(
        organization.name, WorkspaceSpec(name="Theirs", slug="theirs"), actor=BOSS
    )
    return workspace.scope


async def test_agents_of_another_workspace_are_nobodys_whatever_names_them(rig: Rig) -> None:
    (mine,) = await connected(rig, 1)
    scope = await another_workspace(rig)
    theirs = await rig.agents.enrol(scope, "web-9", {"tier": "db"}, hours=1, actor=BOSS)
    found = rig.side.runs.preview(rig.scope, RunTarget(names=(theirs.agent.name, "web-9", mine.agent_id)))
    assert found.resolved == (mine.agent_id,)
    assert {(one.node_id, one.reason) for one in found.skipped} == {
        (theirs.agent.name, "NotFound"),
        ("web-9", "NotFound"),
    }
    assert rig.side.runs.preview(rig.scope, RunTarget(selector="tier in (db,web)")).resolved == (
        mine.agent_id,
    )
    assert rig.side.runs.preview(rig.scope, RunTarget(selector=f"id={theirs.agent.name}")).resolved == ()
    with pytest.raises(Unavailable):
        await start(rig, "reload", RunTarget(names=(theirs.agent.name,)))
    assert not rig.store.list(COMMAND)


async def test_nothing_begins_with_fewer_agents_than_required(rig: Rig) -> None:
    await connected(rig, 1)
    await rig.agent("away")
    with pytest.raises(FailedPrecondition):
        await start(rig, "reload", require_min=2)
    assert not rig.store.list(PROXY_RUN)


@pytest.mark.parametrize("wait", [False, True])
async def test_a_restart_in_a_run_is_never_sent_twice_and_a_reload_is(tmp_path: Path, wait: bool) -> None:
    clock = LaterClock()
    async with agents_rig(tmp_path, clock=clock) as rig:
        await _repeated(rig, clock, wait=wait)


async def _repeated(rig: Rig, clock: LaterClock, *, wait: bool) -> None:
    (agent,) = await connected(rig, 1)
    reload = await start(rig, "reload", wait=wait, deadline_seconds=60.0)
    restart = await start(rig, "restart", wait=wait, deadline_seconds=60.0)
    sent = {(await agent.next("command")).command_id for _ in range(2)}
    assert sent == {reload.name, restart.name}
    agent.leave()
    await until(lambda: rig.side.presences.get(agent.agent_id) is None)
    await agent.open()
    again = await agent.next("command")
    assert again.command_id == reload.name
    await agent.answer(again.command_id, success=True)
    assert await over(rig, reload) == (RunState.COMPLETE, ["ok"])
    assert await quiet(agent)
    await time_is_up(rig, clock)
    assert await over(rig, restart) == (RunState.COMPLETE, ["timed_out"])


async def test_a_run_that_is_cancelled_tells_which_agents_may_still_finish(rig: Rig) -> None:
    agents = await connected(rig, 3)
    run = await start(rig, "restart", mode=Mode.ROLLING, batch=1)
    command = await agents[0].next("command")
    done = await rig.side.runs.cancel(rig.scope, run.name, actor=BOSS)
    assert (done.cancelled, done.told_to_stop) == (2, 1)
    await agents[0].answer(command.command_id, success=True)
    assert await over(rig, run) == (RunState.CANCELLED, ["ok", "not_started", "not_started"])
    assert await quiet(agents[1])


async def test_a_run_goes_on_after_the_server_was_restarted_and_no_nginx_is_restarted_twice(
    tmp_path: Path,
) -> None:
    async with agents_rig(tmp_path) as rig:
        agents = await connected(rig, 3)
        run = await start(
            rig, "restart", mode=Mode.SEQUENTIAL, on_failure=OnFailure.CONTINUE, deadline_seconds=60.0
        )
        await agents[0].answer((await agents[0].next("command")).command_id, success=True)
        await agents[1].next("command")
        tokens = [(agent.token, agent.agent_id) for agent in agents]
    clock = LaterClock()
    async with agents_rig(tmp_path, clock=clock) as rig:
        again = [await rig.client(token, agent_id) for token, agent_id in tokens]
        for agent in again:
            await agent.open()
        assert await quiet(again[1]), "it has it already: nobody knows whether it restarted"
        await time_is_up(rig, clock)
        command = await again[2].next("command")
        await again[2].answer(command.command_id, success=True)
        assert await over(rig, run) == (RunState.COMPLETE, ["ok", "timed_out", "ok"])
        assert await quiet(again[0])


async def test_a_test_is_of_what_is_served_and_only_for_agents_that_know_it(rig: Rig) -> None:
    (able,) = await connected(rig, 1, capabilities=[VALIDATES_TYPED])
    old = await rig.agent("old")
    await old.open()
    run = await start(rig, "test")
    command = await able.next("command")
    assert command.validate_config == pb.ValidateConfigCommand(candidate=pb.ConfigUpdate())
    await able.answer(command.command_id, success=True, message="The configuration is valid")
    assert await over(rig, run) == (RunState.COMPLETE, ["ok"])
    assert [(one.node_id, one.reason) for one in run.spec.skipped] == [(old.agent_id, "Unsupported")]
    assert await quiet(old)


async def test_one_organisation_cannot_use_up_what_all_share(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_runs, "TARGETS_LIMIT", 3)
    await connected(rig, 2)
    first = await start(rig, "restart", RunTarget(selector="name=web-0"), wait=True)
    await start(rig, "restart")
    with pytest.raises(ResourceExhausted, match="2 runs over 3 targets"):
        await start(rig, "restart", RunTarget(selector="name=web-0"))
    organization = rig.scope.partition("/ws/")[0].removeprefix("org/")
    sibling = await rig.places.create_workspace(
        organization, WorkspaceSpec(name="Next", slug="next"), actor=BOSS
    )
    beside = await rig.agents.enrol(sibling.scope, "web-0", {}, hours=1, actor=BOSS)
    theirs = await rig.agents.enrol(await another_workspace(rig), "web-0", {}, hours=1, actor=BOSS)
    with pytest.raises(ResourceExhausted):
        await start_in(rig, sibling.scope, beside.agent.name)
    assert (await start_in(rig, theirs.agent.scope, theirs.agent.name)).spec.targets == 1
    await rig.side.runs.cancel(rig.scope, first.name, actor=BOSS)


async def start_in(rig: Rig, scope: str, name: str) -> ProxyRun:
    order = RunOrder(
        scope=scope,
        target=RunTarget(names=(name,)),
        call=ProxyCall(command=ProxyCommand.RELOAD),
        policy=RunPolicy(wait=True),
        actor=BOSS,
    )
    return await rig.side.runs.start(order)


async def test_a_list_of_names_that_are_nobodys_is_not_kept(rig: Rig) -> None:
    await connected(rig, 1)
    made_up = RunTarget(names=("web-0", *(f"x{number}" for number in range(1001))))
    with pytest.raises(InvalidArgument, match="1001 targets that do not exist"):
        await start(rig, "reload", made_up)
    assert not rig.store.list(PROXY_RUN)


async def test_an_agent_that_is_deleted_in_the_middle_of_a_run_has_its_outcome(rig: Rig) -> None:
    agents = await connected(rig, 2)
    run = await start(rig, "reload", mode=Mode.SEQUENTIAL, on_failure=OnFailure.CONTINUE)
    command = await agents[0].next("command")
    await rig.agents.delete(rig.scope, agents[1].agent_id, if_match=None, actor=BOSS)
    await agents[0].answer(command.command_id, success=True)
    await until(lambda: rig.side.runs.summary(run).not_started == 1)
    await until(lambda: (rig.side.runs.get(rig.scope, run.name).status or run.status).ended_at_ns)  # type: ignore[union-attr]


# REST.


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with rest_api(tmp_path) as api:
        yield api


async def test_a_strangers_runs_cannot_be_seen_started_or_cancelled(api: Api) -> None:
    organization, workspace = await api.workspace()
    stranger, viewer = await api.person(), await api.person(organization)
    body = {"command": "reload", "target": {"all": True}}
    runs, one = f"/workspaces/{workspace}/runs", f"/workspaces/{workspace}/runs/{'0' * 32}"
    for method, path, sent in (
        ("POST", runs, body),
        ("POST", f"{runs}/preview", {"target": {"all": True}}),
        ("GET", runs, None),
        ("GET", one, None),
        ("GET", f"{one}/events", None),
        ("POST", f"{one}/cancel", None),
    ):
        assert (await stranger.refused(method, path, sent))[0] == 404
    assert (await viewer.refused("POST", runs, body))[0] == 403
    assert (await viewer.refused("POST", f"{one}/cancel"))[0] == 403
    assert (await viewer.refused("GET", one))[0] == 404
    assert (await viewer.get(runs))["items"] == []
    assert await viewer.call("POST", f"{runs}/preview", {"target": {"all": True}})


async def test_a_run_is_seen_in_its_own_workspace_only(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as rig:
        await connected(rig, 1)
        run = await start(rig, "status")
        assert rig.side.runs.find(rig.scope, run.name) is not None
        assert rig.side.runs.find(f"{rig.scope}x", run.name) is None
        assert rig.side.runs.list(f"{rig.scope}x") == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"command": "reload", "target": {}}, "target"),
        ({"command": "reload", "target": {"selector": "tier in ("}}, "target.selector"),
        ({"command": "reload", "target": {"names": ["a"] * 3 + [str(n) for n in range(10_001)]}}, "target"),
        ({"command": "stop", "target": {"all": True}, "timeout_seconds": 601}, "timeout_seconds"),
        ({"command": "reload", "target": {"all": True}, "policy": {"mode": "rolling"}}, "policy.batch"),
        ({"command": "exec", "target": {"all": True}}, "command"),
        ({"command": "reload", "target": {"all": True}, "cmd": "rm"}, "cmd"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_field(api: Api, body: dict[str, Any], field: str) -> None:
    _, workspace = await api.workspace()
    faults = await api.admin.faults("POST", f"/workspaces/{workspace}/runs", body)
    assert [where for where, _ in faults] == [field]
    assert not api.store.list(COMMAND)


async def test_without_any_agent_a_run_is_unavailable_and_nothing_is_written(api: Api) -> None:
    _, workspace = await api.workspace()
    body = {"command": "reload", "target": {"all": True}}
    assert await api.admin.refused("POST", f"/workspaces/{workspace}/runs", body) == (
        503,
        "SERVICE_UNAVAILABLE",
    )
    assert not api.store.list(PROXY_RUN)


async def test_the_actions_reload_restart_test_and_cancel_reach_the_agent(rig: Rig) -> None:
    (agent,) = await connected(rig, 1, capabilities=[VALIDATES_TYPED])
    runs, clock = rig.side.runs, SystemClock()

    async def begun(resource: AnyPublicResource, name: str, action: str) -> str:
        domain = SimpleNamespace(runs=runs)
        answer = await carried_out(resource, domain, rig.store, clock, name, action)
        return "" if answer.begun is None else answer.begun.name

    for action, word in (("reload", "reload"), ("restart", "restart"), ("test", "validate_config")):
        run_id = await begun(AGENTS, "web-0", action)
        command = await agent.next("command")
        assert (command.command_id, command.WhichOneof("command")) == (run_id, word)
        await agent.answer(run_id, success=True, message="done")
        assert (await over(rig, runs.get(rig.scope, run_id)))[0] == RunState.COMPLETE
    run_id = await begun(AGENTS, "web-0", "reload")
    await begun(RUNS, run_id, "cancel")
    assert (await over(rig, runs.get(rig.scope, run_id)))[0] == RunState.CANCELLED
