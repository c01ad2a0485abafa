"""Which document is in force when several are read at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

from support.instances.instances_lab import CONFIG_PATH, TENANT, document

from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.server import BLUEPRINT
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.objects.port import StoredObject
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

TURNS = 50
"""Of the event loop: more than it takes to read a document that is at hand."""


class SlowObjects(LocalObjects):
    """In memory; the answer to the first question is long on its way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.body = b""
        self.asked, self.arrives = asyncio.Event(), asyncio.Event()

    async def get(self, path: str) -> StoredObject | None:
        if path != CONFIG_PATH:
            return None
        found = StoredObject(body=self.body, etag=hashlib.sha256(self.body).hexdigest(), modified_at_ns=0)
        if not self.asked.is_set():
            self.asked.set()
            await self.arrives.wait()
        return found


async def test_a_document_that_was_read_earlier_does_not_replace_a_later_one(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "state.db")
    kinds = (*KERNEL_KINDS, *BLUEPRINT.kinds)
    async with Store.open(settings, kinds=kinds, clock=VirtualClock()) as store, asyncio.timeout(60):
        objects = SlowObjects(tmp_path / "objects")
        groups = Groups(store, Instances(store), objects, shard="local", drain_on_scale_down=True)
        objects.body = json.dumps(document(1)).encode()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(groups.refresh())
            await objects.asked.wait()
            objects.body = json.dumps(document(2)).encode()
            tasks.create_task(groups.refresh())
            for _ in range(TURNS):
                await asyncio.sleep(0)
            objects.arrives.set()
        assert groups.sizes(TENANT) == {"workers": 2}
