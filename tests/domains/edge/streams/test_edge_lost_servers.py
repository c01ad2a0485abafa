"""What a server had sent to daemons when it died."""

from __future__ import annotations

import asyncio
from typing import Any

from support.shared import virtual_loop
from support.shared.commandkit import SCOPE, FakeCourier
from support.shared.presence_rig import cluster, until

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.streams.call_encoding import CHANNEL
from fleetplane.domains.edge.streams.live import DaemonPresences
from fleetplane.domains.edge.streams.tool_calls import Dispatcher, DispatchPolicy
from fleetplane.kernel.commands import Commands, CommandState, state_of


def test_what_cannot_be_repeated_is_lost_when_its_daemon_comes_from_a_server_that_died() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            courier = FakeCourier()
            no_sealer: Any = None  # nothing is sent
            dead = Commands(b.store, b.clock, channel=CHANNEL, courier=courier, whereabouts=b.where)
            await b.where.enter("node")
            courier.here.add("node")
            once = await dead.issue(SCOPE, "tool", ["node"], actor="boss", repeatable=False)
            again = await dead.issue(SCOPE, "tool", ["node"], actor="boss", repeatable=True)
            assert len(courier.delivered) == 2
            b.kill()
            dispatcher = Dispatcher(
                a.store,
                a.clock,
                presences=DaemonPresences(no_sealer),
                sealer=no_sealer,
                policy=DispatchPolicy(),
                whereabouts=a.where,
            )
            following = asyncio.create_task(dispatcher.ledger.run_here())
            await until(lambda: dispatcher.ledger.open_count == 2)
            await a.where.enter("node")
            await dispatcher.settle("node", PayloadDialect.DOCUMENTED)
            states = [state_of(dispatcher.ledger.targets(one)[0]) for one in (once, again)]
            assert states == [CommandState.FAILED, CommandState.WAITING]
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    virtual_loop.run(scene())
