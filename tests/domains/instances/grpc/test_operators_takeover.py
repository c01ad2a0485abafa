"""A server that dies between what was written down and what was done leaves its successor to finish it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.instances.instances_at_servers import Here, domain_at, quiet_document
from support.instances.operator_rig import CONFIG_PATH, TENANT, new_id
from support.shared.virtual_loop import run
from support.shared.virtual_servers import VirtualServer, until, virtual_servers

from fleetplane.domains.blueprint import prepare_both, run_both
from fleetplane.domains.instances.providers.contract import ProviderContext
from fleetplane.domains.instances.providers.mock.provider import MockFault, MockProvider
from fleetplane.domains.instances.server import BLUEPRINT
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects

NEVER_SECONDS = 10_000.0


def test_an_instance_that_the_dead_server_had_just_asked_for_is_the_successor_s(tmp_path: Path) -> None:
    async def all_of_it() -> None:
        objects = LocalObjects(tmp_path / "objects")
        await objects.put(CONFIG_PATH, json.dumps(quiet_document()).encode())
        providers: dict[str, MockProvider] = {}
        calling: asyncio.Future[Here] = asyncio.get_running_loop().create_future()

        async def here(server: VirtualServer) -> None:
            store = server.standby.store.reader()
            domain = await domain_at(tmp_path, store, objects, None)
            await domain.prepare_here()
            if server.name == "three":
                calling.set_result(Here(store=store, domain=domain))
            await domain.run_here()

        async def active(server: VirtualServer) -> None:
            context = ProviderContext(clock=server.store.clock, state_directory=tmp_path / "mock")
            provider = providers[server.name] = MockProvider(context)
            provider.configure({"state_file": "machines"})  # what both of them see
            if server.name == "one":  # the machine is made, and nobody hears of it
                lost = MockFault(
                    operation="create_instance", count=0, after=True, delay_seconds=NEVER_SECONDS
                )
                provider.script(lost)
            domain = await domain_at(tmp_path, server.store, objects, provider)
            await prepare_both(domain)
            await run_both(domain)

        kinds = (*KERNEL_KINDS, *BLUEPRINT.kinds)
        async with virtual_servers(kinds, here=here, active=active) as servers:
            one = await servers.start("one")
            await until(lambda: "one" in providers)
            await servers.start("two")
            await servers.start("three")
            operator, name = await calling, new_id()
            asked: asyncio.Task[Any] = asyncio.create_task(operator.create(name, group="web"))
            await until(lambda: list(providers["one"].instances) == [name])
            assert not asked.done()
            one.kill()
            answer = await asked
            assert (answer.instance_id, answer.status) == (name, "running")
            assert list(providers["two"].instances) == [name]
            (kept,) = operator.instances()
            assert kept.status is not None
            assert kept.status.provider_id == providers["two"].instances[name].provider_id
            assert [group.key for group in (await operator.call("ListGroups")).groups] == ["api", "web"]
            assert TENANT in kept.scope

    run(all_of_it())
