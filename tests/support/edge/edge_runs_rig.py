"""Runs over daemons that answer when they are told to: a real store, and a courier that takes notes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from support.shared.commandkit import FakeCourier

from fleetplane.domains.blueprint import prepare_both, run_both
from fleetplane.domains.edge.kinds import EDGE_NODE, EdgeNode, NodeSpec, tenant_scope
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, EdgeGroups
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.channel import (
    EDGE_RUN,
    EdgeChannel,
    EdgeRun,
    EdgeRuns,
    NodesOf,
    ToolRequest,
)
from fleetplane.domains.edge.streams.call_encoding import CHANNEL, ToolOutcome, encode_outcome
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.records import RunState, Summary
from fleetplane.fleet.runs.runs import Runs
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Commands, CommandState
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.store import Draft, Store, StoreSettings

TENANT = "acme"
SCOPE = tenant_scope(TENANT)
NODES = [str(uuid.UUID(int=number)) for number in range(1, 7)]


class Rig:
    def __init__(self, store: Store, courier: FakeCourier) -> None:
        self.store, self.courier = store, courier
        clock = SystemClock()
        self.ledger = Commands(store, clock, channel=CHANNEL, courier=courier)
        self.groups = EdgeGroups(store, clock)
        nodes = NodesOf(
            list=lambda tenant: store.list(EDGE_NODE, tenant_scope(tenant)),
            get=self.get,
            is_connected=courier.is_present,
        )
        channel = EdgeChannel(ledger=self.ledger, groups=self.groups, nodes=nodes)
        self.runs: EdgeRuns = Runs(store, clock, channel)
        self.driving: asyncio.Task[None] | None = None

    async def die(self) -> None:
        """Drive no run any more."""
        if self.driving is not None:
            self.driving.cancel()
            await asyncio.gather(self.driving, return_exceptions=True)

    def get(self, tenant: str, node_id: str) -> EdgeNode:
        found = self.store.get(EDGE_NODE, tenant_scope(tenant), node_id)
        if found is None:
            raise NotFound("there is no such daemon")
        return found

    async def enrol(self, *names: str, tenant: str = TENANT) -> None:
        def change(draft: Draft) -> None:
            for number, name in enumerate(names):
                spec = NodeSpec(
                    display_name=f"host-{number}",
                    public_key=bytes(32),
                    token_id="t",
                    token_expires_at_ns=0,
                    enrolled_at_ns=number,
                    tags=("even",) if number % 2 == 0 else (),
                )
                draft.put(EDGE_NODE, tenant_scope(tenant), name, spec=spec)

        keys = [EDGE_NODE.key(tenant_scope(tenant), name) for name in names]
        await self.store.transact(change, actor="test", action="enrol", touches=keys)

    async def start(self, target: str = "all", tenant: str = TENANT, **policy: object) -> EdgeRun:
        order = RunOrder(
            scope=tenant_scope(tenant),
            target=targets.parse(target),
            call=ToolRequest(tool="cmd.run", args_json=b"{}", security_context="zaru-free"),
            policy=RunPolicy(**policy),  # type: ignore[arg-type]
            actor="operator/test",
        )
        return await self.runs.start(order)

    @property
    def sent(self) -> list[str]:
        return [target for target, _, _ in self.courier.delivered]

    @property
    def commands_sent(self) -> set[str]:
        return {command for _, _, command in self.courier.delivered}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def sent_to(self, number: int) -> list[str]:
        await self.until(lambda: len(self.sent) >= number)
        return self.sent

    async def end(
        self, run: EdgeRun, node: str, outcome: CommandState = CommandState.OK, **result: object
    ) -> None:
        kept = encode_outcome(ToolOutcome(**result))  # type: ignore[arg-type]
        assert await self.ledger.ended(node, run.name, outcome, result=kept)

    async def over(self, run: EdgeRun) -> tuple[RunState, Summary]:
        def ended() -> bool:
            current = self.runs.get(SCOPE, run.name)
            return current.status is not None and current.status.ended_at_ns is not None

        await self.until(ended)
        current = self.runs.get(SCOPE, run.name)
        assert current.status is not None
        summary = self.runs.summary(current)
        counts = [summary.ok, summary.err, summary.timed_out, summary.cancelled, summary.not_started]
        assert sum(counts) == current.spec.targets, "every target is accounted for"
        return current.status.state, summary


@asynccontextmanager
async def rig_in(folder: Path, courier: FakeCourier) -> AsyncIterator[Rig]:
    kinds = (EDGE_NODE, EDGE_GROUP, EDGE_RUN, COMMAND, COMMAND_TARGET)
    async with Store.open(StoreSettings(path=folder / "s.db"), kinds=kinds, clock=SystemClock()) as store:
        rig = Rig(store, courier)
        rig.ledger.recover()
        await rig.ledger.all_lost(detail="edge_disconnected")
        await prepare_both(rig.runs)
        rig.driving = asyncio.create_task(run_both(rig.runs))
        yield rig
        await rig.die()
