"""A server that stands by notices keys that change while it reads them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import FLEET
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
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
        reads = StandbyReads(SimpleNamespace(), given, (), clock)  # type: ignore[arg-type]
        standby: Any = SimpleNamespace(store=store)
        async with contextlib.AsyncExitStack() as stack:
            await reads._kernel(standby, stack, keys)
        assert keys.changed
