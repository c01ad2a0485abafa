"""Short verbs for tests that write through the resource API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from support.fleet.resources_rig import ResourcesRig, resources_rig
from support.fleet.started_domains import Start

from fleetplane.domains.blueprint import Blueprint, Kernel
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.proxies.kinds.records import OrganizationSpec
from fleetplane.domains.proxies.serving.certificates import (
    LETS_ENCRYPT,
    SELF_SIGNED,
    Certificates,
    OfferedIssuers,
)
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.named import AccessLists, Streams
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces

ACME, OTHER = "/tenants/acme", "/tenants/other"


class PlansRig:
    """A caller of the resource API."""

    def __init__(self, rig: ResourcesRig, token: str) -> None:
        self.rig = rig
        self.store = rig.store
        self._token = token

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, **query: Any
    ) -> httpx.Response:
        return await self.rig.client.request(
            method,
            f"/apis/v1{path}",
            json=body,
            params=query or None,
            headers={"authorization": f"Bearer {self._token}", **(headers or {})},
        )

    async def plan(self, *objects: dict[str, Any], **body: Any) -> dict[str, Any]:
        answer = await self.call("POST", "/plans", {"objects": objects, **body})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def apply(self, plan: dict[str, Any]) -> httpx.Response:
        return await self.call("POST", f"/plans/{plan['id']}/apply")

    async def applied(self, *objects: dict[str, Any], **body: Any) -> dict[str, Any]:
        answer = await self.apply(await self.plan(*objects, **body))
        assert answer.status_code == 200, answer.text
        done: dict[str, Any] = answer.json()
        return done

    async def names(self, plural: str, scope: str = "/") -> list[str]:
        answer = await self.call("GET", f"/{plural}", scope=scope)
        return [one["metadata"]["name"] for one in answer.json()["items"]]


def group(name: str, scope: str = ACME, **spec: Any) -> dict[str, Any]:
    return {"kind": "edge-group", "metadata": {"name": name, "scope": scope}, "spec": spec}


def layer(config: dict[str, Any], scope: str = ACME) -> dict[str, Any]:
    return {
        "kind": "edge-config",
        "metadata": {"name": "tenant", "scope": scope},
        "spec": {"config": config},
    }


def steps(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(one["operation"], one["kind"], one["name"]) for one in plan["steps"]]


@asynccontextmanager
async def plans_rig(
    folder: Path,
    blueprints: Sequence[Blueprint] = (EDGE,),
    *,
    roles: Sequence[str] = ("edge.admin",),
    started: Mapping[str, Start] | None = None,
) -> AsyncIterator[PlansRig]:
    """`started` makes real running domains; of others there is what their writers use."""
    folder.mkdir(exist_ok=True)
    async with resources_rig(folder, blueprints, running=_running, started=started) as rig:
        yield PlansRig(rig, await rig.token("writer", *roles))


def _running(kernel: Kernel) -> dict[str, Any]:
    """What of the running domains their writers use."""
    store, clock = kernel.store, kernel.clock
    vault = Vault(store, kernel.master)
    workspaces = Workspaces(store, vault)
    return {
        "proxies": SimpleNamespace(
            workspaces=workspaces,
            hosts=Hosts(store, clock, workspaces),
            streams=Streams(store, clock, workspaces),
            access_lists=AccessLists(store, clock, workspaces),
            certificates=Certificates(
                store, clock, workspaces, vault, OfferedIssuers(providers=(LETS_ENCRYPT, SELF_SIGNED))
            ),
        ),
        "boards": SimpleNamespace(
            clusters=Clusters(store), nodes=SimpleNamespace(devices=Devices(store, clock))
        ),
    }


async def organization(rig: PlansRig, slug: str) -> str:
    """An organisation of proxies, which is a tenant; its id."""
    store, clock = rig.store, rig.rig.kernel.clock
    places = TenancyPlaces(store, clock, Workspaces(store, Vault(store, rig.rig.kernel.master)))
    spec = OrganizationSpec(name=slug, slug=slug)
    return (await places.create_organization(spec, owner="someone", actor="tester")).name


async def another(rig: PlansRig, name: str, *roles: str, tenant: str = "") -> PlansRig:
    """Another caller of the same server."""
    return PlansRig(rig.rig, await rig.rig.token(name, *roles, tenant=tenant))
