"""Daemons that come, go, answer and disappear in any order: nothing is left over, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.edge.edge_signer import legacy, ok
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.tool_calls import DispatchPolicy
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.commands import OPEN, Command, state_of
from fleetplane.kernel.errors import StorageFull

DAEMONS = 10
STEPS = 250


class Crowd:
    """A number of daemons, and what each has been asked and not answered."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.daemons: list[Daemon] = []
        self.legacy: set[str] = set()
        self.open: set[str] = set()
        self.asked: dict[str, list[str]] = {}
        self.commands: list[tuple[Command, list[Daemon]]] = []
        self.readers: list[asyncio.Task[None]] = []

    async def gather(self) -> None:
        for number in range(DAEMONS):
            daemon = await self.rig.daemon(legacy=number % 2 == 1)
            self.daemons.append(daemon)
            self.asked[daemon.node_id] = []
            if number % 2:
                self.legacy.add(daemon.node_id)

    async def step(self) -> None:
        daemon = self.random.choice(self.daemons)
        match self.random.randrange(10):
            case 0 | 1:
                await self.connect(daemon)  # also while the old stream is still there
            case 2 if daemon.node_id in self.open:
                daemon.leave()
                self.open.discard(daemon.node_id)
            case 3 | 4 | 5:
                chosen = self.random.sample(self.daemons, self.random.randint(1, 4))
                self.commands.append((await self.rig.issue(*chosen, deadline_seconds=1), chosen))
            case 6 if self.commands:
                command, _ = self.random.choice(self.commands)
                await self.rig.side.dispatcher.ledger.cancel(command.scope, command.name, actor="user/boss")
            case _ if daemon.node_id in self.open and self.asked[daemon.node_id]:
                await self.answer(daemon)

    async def connect(self, daemon: Daemon) -> None:
        is_legacy = daemon.node_id in self.legacy
        self.asked[daemon.node_id].clear()
        await (daemon.open_legacy() if is_legacy else daemon.open())
        self.open.add(daemon.node_id)
        self.readers.append(asyncio.create_task(self.read(daemon, daemon.call)))

    async def read(self, daemon: Daemon, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (raw := await call.read()) is not grpc.aio.EOF:
                command = pb.EdgeCommand.FromString(raw)
                if command.HasField("invoke_tool") and daemon.call is call:
                    self.asked[daemon.node_id].append(command.invoke_tool.command_id)

    async def answer(self, daemon: Daemon) -> None:
        command_id = self.asked[daemon.node_id].pop(0)
        field = daemon.node_id in self.legacy
        result = legacy(ok=True) if field else ok()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(self.random.randint(1, 2)):  # some say everything twice
                await daemon.answer(command_id, result, digest=not field)

    def unfinished(self) -> int:
        targets = self.rig.side.dispatcher.ledger.targets
        return sum(state_of(target) in OPEN for command, _ in self.commands for target in targets(command))


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_command_ends_and_nobody_is_left_behind(tmp_path: Path, seed: int) -> None:
    options = StreamOptions(dispatch=DispatchPolicy(grace_seconds=0.5, in_flight=2))
    async with streams_rig(tmp_path, options=options) as rig:
        crowd = Crowd(rig, seed)
        await crowd.gather()
        for _ in range(STEPS):
            await crowd.step()
        for daemon in crowd.daemons:
            if daemon.call is not None:
                daemon.leave()
        await until(lambda: len(rig.side.presences) == 0)
        await until(lambda: crowd.unfinished() == 0)
        assert len(rig.side.sessions) == 0
        # The ledger's index follows the store, a moment after the last outcome is durable.
        await until(lambda: rig.side.dispatcher.ledger.open_count == 0)
        await until(lambda: {rig.state(daemon) for daemon in crowd.daemons} == {"disconnected"})
        for command, chosen in crowd.commands:
            status = rig.side.dispatcher.ledger._command(command.scope, command.name).status
            assert status is not None
            assert sum(status.outcomes.values()) == len(chosen)
        await asyncio.gather(*crowd.readers)


async def test_a_full_disk_delays_what_is_written_about_daemons_and_cuts_nobody_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        refused: list[object] = []
        transact = rig.store.transact

        async def full(change: Any, **about: Any) -> Any:
            if about["action"] == "edge.state" and not refused:
                refused.append(about)
                raise StorageFull("no space left")
            return await transact(change, **about)

        monkeypatch.setattr(rig.store, "transact", full)
        await daemon.open()
        await until(lambda: refused)
        await until(lambda: rig.state(daemon) == "connected")
        daemon.leave()
