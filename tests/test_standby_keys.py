"""What a server that stands by reads: keys, whose changes it notices, and measurements of the active one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.shared.postgres_server import PostgresServer
from support.shared.telemetry_place import TelemetryPlace, asked, bodies, line

from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import FLEET
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.watchdog import Watchdog
from fleetplane.sections.process import TelemetrySettings
from fleetplane.sim.clock import VirtualClock
from fleetplane.standby_reads import StandbyReads, _Keys


async def test_a_key_that_changes_while_the_others_are_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, keys = VirtualClock(), _Keys()
    master = MasterKey(bytes(32), clock)
    load = Operators.load
    settings = StoreSettings(path=tmp_path / "s.db")
    async with Store.open(settings, kinds=KERNEL_KINDS, clock=clock) as store:
        await Authority.load_or_create(store, master, clock)
        await load(store, master, clock)

        async def changing(reader: Store, *rest: Any) -> Operators:
            store._applier.secret_changed(FLEET.secret)  # once the authority was read
            return await load(reader, *rest)

        monkeypatch.setattr(Operators, "load", changing)
        given: Any = SimpleNamespace(master=lambda *, may_create: master)
        reads = StandbyReads(SimpleNamespace(), given, (), clock, Watchdog())  # type: ignore[arg-type]
        standby: Any = SimpleNamespace(store=store)
        async with contextlib.AsyncExitStack() as stack:
            await reads._kernel(standby, stack, keys)
        assert keys.changed


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
        standby: Any = SimpleNamespace(store=store)
        reads = StandbyReads(settings, given, (measuring,), clock, Watchdog())
        kernel = await reads._kernel(standby, stack, _Keys())
        assert kernel.telemetry is not None
        active.offer(lines=[line(1)])
        await active.flush()
        assert await bodies(kernel.telemetry) == [1]
        assert kernel.telemetry.offer(lines=[line(2)])
        await kernel.telemetry.flush()
        assert (await active.lines(asked())).total == 2
        assert list(tmp_path.glob("telemetry.db*")) == [], "no file of its own"
