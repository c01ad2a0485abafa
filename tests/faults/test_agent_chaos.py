"""Agents that break off, repeat themselves, mix things up and fall silent, while configuration changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from support.instances.agents_rig import BOSS, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.kinds.records import CONFIG_VERSION, DeploymentStatus
from fleetplane.domains.proxies.kinds.values import DeploymentState
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.events import EventType

AGENTS = 6
CHANGES = 12
STEPS = ("PENDING", "VALIDATING", "APPLYING", "SUCCESS")
POLICY = AgentPolicy(
    apply_seconds=0.5, debounce_seconds=0.01, reconnect_seconds=0.2, first_report_seconds=0.2
)


class Erratic:
    """Serves what it was last sent, and says so unreliably."""

    def __init__(self, agent: FakeAgent, seed: int) -> None:
        self.agent = agent
        self.random = random.Random(seed)
        self.version = 0
        self.calm = False

    async def live(self) -> None:
        while True:
            try:
                await self.agent.open()
                await self.agent.health(self.version)
                while self.calm or self.random.random() > 0.15:
                    await self.turn()
                self.agent.leave()
            except (EOFError, grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError) as error:
                if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            await asyncio.sleep(0.01)

    async def turn(self) -> None:
        try:
            async with asyncio.timeout(3.0 if self.calm else 0.1):  # on a machine that may stand still
                message = await self.agent.call.read()
        except TimeoutError:
            # Reading was given up half-way, which ends a call of this client: begin anew.
            raise EOFError from None
        if message is grpc.aio.EOF:
            raise EOFError
        if message.WhichOneof("payload") == "config_update":
            await self.apply(message.config_update)
        elif self.random.random() < 0.3:
            await self.agent.health(self.version)

    async def apply(self, update: pb.ConfigUpdate) -> None:
        self.version = max(self.version, update.version)
        said = list(STEPS)
        if not self.calm:
            said += self.random.choices(STEPS, k=2)
            self.random.shuffle(said)
            said = said[: self.random.randint(0, len(said))]
        await self.agent.status(update, *said)
        await self.agent.health(self.version)


async def change_a_lot(rig: Rig, source: random.Random) -> None:
    for number in range(CHANGES):
        host = await rig.host(f"h{number}.example")
        await asyncio.sleep(source.random() * 0.05)
        if source.random() < 0.3:
            await rig.hosts.delete(rig.scope, host.name, if_match=None, actor=BOSS)


@pytest.mark.parametrize("seed", range(3))
async def test_everyone_ends_up_at_the_newest_version_however_they_behave(tmp_path: Path, seed: int) -> None:
    async with agents_rig(tmp_path, policy=POLICY) as rig:
        fleet = [Erratic(await rig.agent(f"web-{n}"), seed * 100 + n) for n in range(AGENTS)]
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(one.live()) for one in fleet]
            await change_a_lot(rig, random.Random(seed))
            for one in fleet:
                one.calm = True
            newest = rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec.version
            await until(
                lambda: all(
                    rig.deployment_states(one.agent.agent_id).get(newest) == "success" for one in fleet
                ),
                seconds=60,
            )
            assert [one.version for one in fleet] == [newest] * AGENTS
            for life in lives:
                life.cancel()


async def test_a_final_state_is_final_in_every_revision_of_a_chaotic_run(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, policy=POLICY) as rig:
        one = Erratic(await rig.agent("web-01"), 7)
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(one.live())
            await rig.host("first.example")
            await until(lambda: rig.deployments(one.agent.agent_id))  # so that it is sent more than the last
            await change_a_lot(rig, random.Random(7))
            one.calm = True
            newest = rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec.version
            await until(
                lambda: rig.deployment_states(one.agent.agent_id).get(newest) == "success", seconds=60
            )
            life.cancel()
        page = await rig.store.history("proxy-deployment", "", after=0, until=rig.store.revision)
        last: dict[tuple[str, int], DeploymentStatus | None] = {}
        for event in page.events:
            if event.type is EventType.DELETED:
                continue
            sent = (event.resource.name, event.resource.spec.sent_at_ns)
            before = last.get(sent)
            if before is not None and before.state in (DeploymentState.SUCCESS, DeploymentState.ROLLED_BACK):
                assert event.resource.status == before
            last[sent] = event.resource.status
        assert len(last) > 1
