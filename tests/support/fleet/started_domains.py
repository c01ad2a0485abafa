"""Real running domains for tests of the resource API, without listeners and agents."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from support.instances.instances_lab import CONFIG_PATH, document

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.server import BoardDomain
from fleetplane.domains.edge.server import EdgeDomain
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.server import GpuDomain
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.domains.instances.server import InstanceDomain, InstanceOptions
from fleetplane.domains.proxies.rest.assembly import RestOptions
from fleetplane.domains.proxies.server import ProxyDomain
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.objects import LocalObjects

Start = Callable[[Kernel], Awaitable[Any]]


def started_domains(folder: Path, configuration: Mapping[str, Any] | None = None) -> dict[str, Start]:
    """How to start each; `configuration` is that of instances, by default one group of two workers."""

    async def edge(kernel: Kernel) -> EdgeDomain:
        return await EdgeDomain.create(kernel, EdgeSettings(), version="test")

    async def instances(kernel: Kernel) -> InstanceDomain:
        objects = LocalObjects(folder / "objects")
        await objects.put(CONFIG_PATH, json.dumps(configuration or document(2)).encode())
        store, master, clock = kernel.store, kernel.master, kernel.clock
        workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
        nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
        options = InstanceOptions(shard="local", state_directory=folder / "instances", environment={})
        domain = InstanceDomain(kernel, objects, nonces, workloads, options)
        await domain.groups.refresh()
        return domain

    async def proxies(kernel: Kernel) -> ProxyDomain:
        return await ProxyDomain.create(kernel, RestOptions(version="test"))

    async def boards(kernel: Kernel) -> BoardDomain:
        return BoardDomain(kernel, BoardOptions())

    async def gpus(kernel: Kernel) -> GpuDomain:
        return GpuDomain(kernel, GpuPolicy(), dialect=GpuDialect.SUPERSET, version="test", node="here")

    return {"edge": edge, "instances": instances, "proxies": proxies, "boards": boards, "gpus": gpus}
