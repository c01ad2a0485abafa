from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.instances.kinds import KINDS, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists
from fleetplane.kernel.store import Store, StoreSettings

SPEC = InstanceSpec(cluster="c", shard="s", group="g", template="t", prefix="wkr")


async def test_an_id_is_one_instances_across_all_tenants_until_it_is_purged(tmp_path: Path) -> None:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KINDS, clock=SystemClock()) as store:
        instances = Instances(store)
        await instances.record("acme", "wkr1", SPEC, InstanceStatus())
        for tenant in ("acme", "rival"):
            with pytest.raises(AlreadyExists):
                await instances.record(tenant, "wkr1", SPEC, InstanceStatus())

        await instances.purge("acme", "wkr1")
        assert (await instances.record("rival", "wkr1", SPEC, InstanceStatus())).name == "wkr1"
