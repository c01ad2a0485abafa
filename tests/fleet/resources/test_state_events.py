"""The event feed tells every change of a state, of all five fleets, the same on every server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fleet.resources_rig import ResourcesRig, resources_rig
from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, until, virtual_servers

from fleetplane.domains.blueprint import Blueprint
from fleetplane.domains.boards.kinds import BOARD, BoardSpec, BoardState, BoardStatus
from fleetplane.domains.boards.kinds import SCOPE as BOARDS_SCOPE
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.gpus.kinds import GPU, SCOPE, GpuSpec, GpuStatus
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.instances.kinds import INSTANCE, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    WORKSPACE,
    AgentSpec,
    AgentStatus,
    WorkspaceSpec,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.fleet.feeds.state_events import StateEvents
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember
from fleetplane.fleet.resources.changes import ChangeRing
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.store import Draft, Store

BLUEPRINTS = (BOARDS, EDGE, GPUS, INSTANCES, PROXIES)
ADMIN = "admin"
WHERE = workspace_scope("o", "w")
Steps = tuple[Callable[[ResourcesRig], Any], ...]


async def _board(rig: ResourcesRig, state: BoardState) -> None:
    await rig.put(BOARD, BOARDS_SCOPE, "1", spec=BoardSpec(name="pi"), status=BoardStatus(state=state))


async def _agent(rig: ResourcesRig, status: AgentStatus) -> None:
    await rig.put(WORKSPACE, WHERE, "w", spec=WorkspaceSpec(name="Ws", slug="ws"))
    await rig.put(AGENT, WHERE, "a", spec=AgentSpec(name="web-1"), status=status)


async def _instance(rig: ResourcesRig, **status: Any) -> None:
    spec = InstanceSpec(cluster="c", shard="s", group="web", template="t", prefix="wkr")
    await rig.put(INSTANCE, "tenant/acme", "i-1", spec=spec, status=InstanceStatus(**status))


DOWN = AgentStatus(state=AgentState.DEGRADED, reasons=("NGINX is not running",))
FLEETS: dict[str, tuple[Steps, str, dict[str, str]]] = {
    "boards": (
        (lambda rig: _board(rig, BoardState.READY), lambda rig: _board(rig, BoardState.NOT_READY)),
        "boards/pi board.not_ready",
        {"before": "ready"},
    ),
    "edge": (
        (lambda rig: rig.node("acme", "n"), lambda rig: rig.node("acme", "n", "disconnected")),
        "edge-nodes/n edge-node.disconnected",
        {"before": "connected"},
    ),
    "gpus": (
        (lambda rig: rig.gpu("g"), lambda rig: rig.gpu("g", "False")),
        "gpus/g gpu.unhealthy",
        {"before": "healthy", "reason": "Ready Said"},
    ),
    "instances": (
        (
            lambda rig: _instance(rig, registered_at_ns=1, provider_id="p"),
            lambda rig: _instance(rig, registered_at_ns=1, provider_id="p", unhealthy_since_ns=2),
        ),
        "instances/i-1 instance.unhealthy",
        {"before": "registered"},
    ),
    "proxies": (
        (
            lambda rig: _agent(rig, AgentStatus(state=AgentState.ONLINE)),
            lambda rig: _agent(rig, DOWN),
        ),
        "proxy-agents/web-1 proxy-agent.degraded",
        {"before": "online", "reason": "NGINX is not running"},
    ),
}


async def _events(rig: ResourcesRig, token: str, expected: str) -> list[dict[str, Any]]:
    """All events, once the expected one is among them."""
    async with asyncio.timeout(60):
        while True:
            answer = await rig.get("/events", token, sort=".spec.occurredAt")
            assert answer.status_code == 200, answer.text
            found = [one["spec"] for one in answer.json()["items"]]
            if any(f"{one['about']} {one['type']}" == expected for one in found):
                return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("fleet", FLEETS)
async def test_the_feed_tells_a_change_of_state_of_every_fleet_also_after_a_restart(
    fleet: str, tmp_path: Path
) -> None:
    steps, expected, details = FLEETS[fleet]
    async with resources_rig(tmp_path, BLUEPRINTS) as rig:
        boss = await rig.token("boss", ADMIN)
        for step in steps:
            await step(rig)
        before = await _events(rig, boss, expected)
        (told,) = [one for one in before if f"{one['about']} {one['type']}" == expected]
        assert told["details"] == details
    async with resources_rig(tmp_path, BLUEPRINTS) as rig:
        again = await rig.token("again", ADMIN)
        assert await _events(rig, again, expected) == before


async def test_who_may_read_one_fleet_reads_of_that_one_only(tmp_path: Path) -> None:
    async with resources_rig(tmp_path, BLUEPRINTS) as rig:
        viewer = await rig.token("viewer", "gpus.viewer")
        await rig.node("acme", "n")
        await rig.gpu("g")
        found = await _events(rig, viewer, "gpus/g gpu.healthy")
        assert [one["about"] for one in found] == ["gpus/g"]


async def test_what_leaves_the_state_as_it_was_is_no_event(
    tmp_path: Path,
) -> None:
    async with resources_rig(tmp_path, (GPUS,)) as rig:
        viewer = await rig.token("viewer", "gpus.viewer")
        for number in range(3):
            await rig.gpu("g", label=str(number))
        await rig.gpu("h")
        found = await _events(rig, viewer, "gpus/h gpu.healthy")
        assert [one["about"] for one in found] == ["gpus/g", "gpus/h"]
        await rig.remove_gpu("h")
        assert len(await _events(rig, viewer, "gpus/h gpu.deleted")) == 3


def _changes(store: Store, blueprint: Blueprint) -> tuple[ChangeRing, Catalogue]:
    states = StateEvents()
    resources = [
        CatalogueMember(resource=one, domain=blueprint.name, running=None) for one in blueprint.resources
    ]
    catalogue = Catalogue([*resources, *states.members(resources)])
    return ChangeRing(store, catalogue, states=states), catalogue


def test_every_server_tells_the_same_events() -> None:
    async def scene() -> None:
        feeds: dict[str, Catalogue] = {}

        async def work(server: VirtualServer) -> None:
            changes, feeds[server.name] = _changes(server.store, GPUS)
            await changes.run()

        async def report(store: Store, status: str) -> None:
            def change(draft: Draft) -> None:
                said = (Condition(type="Ready", status=status, reason="Said"),)
                draft.put(GPU, SCOPE, "g", spec=GpuSpec(uuid="u"), status=GpuStatus(), conditions=said)

            await store.transact(change, actor="test", action="test", touches=[GPU.key(SCOPE, "g")])

        def told(server: VirtualServer) -> list[str]:
            found = feeds[server.name].named("events").all(server.store)
            return [f"{one.called.name} {one.stored.spec.type}" for one in found]

        async with virtual_servers([*KERNEL_KINDS, *GPUS.kinds], here=work, active=work) as servers:
            one, two = [await servers.start(name) for name in ("one", "two")]
            for status in ("True", "False"):
                await report(one.store, status)
                await report(two.store, status)
            await until(lambda: len(told(one)) == len(told(two)) == 2)
            assert told(one) == told(two)
            assert [line.split()[1] for line in told(one)] == ["gpu.healthy", "gpu.unhealthy"]

    virtual_loop.run(scene())
