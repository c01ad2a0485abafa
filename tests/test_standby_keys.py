"""What a server that stands by reads of what the active one measured."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.shared.postgres_server import PostgresServer
from support.shared.telemetry_place import TelemetryPlace, asked, bodies, line

from fleetplane.kernel.boundary import Failures
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sections.process import TelemetrySettings
from fleetplane.server.serving import RunningServer
from fleetplane.sim.clock import VirtualClock


async def test_a_server_that_stands_by_tells_what_the_active_one_measured_and_takes_what_agents_say_there(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    clock, url = VirtualClock(), postgres.database()
    master = MasterKey(bytes(32), clock)
    async with (
        Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=clock) as store,
        TelemetryPlace(path=tmp_path / "active.db", url=url).opened() as active,
        contextlib.AsyncExitStack() as stack,
    ):
        await Authority.load_or_create(store, master, clock)
        await Operators.load(store, master, clock)
        given: Any = SimpleNamespace(master=lambda *, may_create: master)
        settings: Any = SimpleNamespace(
            data_dir=str(tmp_path), store=SimpleNamespace(url=url), telemetry=TelemetrySettings()
        )
        measuring: Any = SimpleNamespace(keeps_telemetry=True)
        nobody: Any = None
        serving = RunningServer(
            settings,
            given,
            (measuring,),
            clock,
            announce=nobody,
            turn=nobody,
            failures=Failures(),
            stop=asyncio.Event(),
        )
        kernel = await serving._kernel(store, stack)
        assert kernel.telemetry is not None
        active.offer(lines=[line(1)])
        await active.flush()
        assert await bodies(kernel.telemetry) == [1]
        assert kernel.telemetry.offer(lines=[line(2)])
        await kernel.telemetry.flush()
        assert (await active.lines(asked())).total == 2
        assert list(tmp_path.glob("telemetry.db*")) == [], "no file of its own"
