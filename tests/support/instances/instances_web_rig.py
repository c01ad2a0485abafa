"""The lab of instances with its web listener, and short words for those who look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry
from support.instances.instances_lab import TENANT, Lab, document, lab

from fleetplane.domains.instances.access import VIEWER
from fleetplane.domains.instances.kinds import Instance, InstanceStatus
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.kernel.access import Role
from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.web.ops import OpsApp

OTHER = "umbrella"
SECONDS = 60.0
Json = dict[str, Any]


def two_tenants(size: int = 2) -> Json:
    """The lab's document, with a group of the same name for another tenant, and patience with silence."""
    wanted = document(size, shard={"health_check_interval": "60s"})
    wanted["groups"][OTHER] = {"workers": {"template": "worker", "size": 1}}
    return wanted


@dataclass(slots=True, kw_only=True)
class Viewer:
    """Someone with a token."""

    http: httpx.AsyncClient
    headers: dict[str, str]

    async def ask(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(f"/v1/instances{path}", headers={**self.headers, **headers})

    async def get(self, path: str) -> Json:
        answer = await self.ask(path)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found


@dataclass(slots=True, kw_only=True)
class Web:
    lab: Lab
    http: httpx.AsyncClient

    @property
    def instances(self) -> Instances:
        return Instances(self.lab.kernel.store)

    async def viewer(
        self, name: str = "ada", *, tenant: str = TENANT, says: str = "", role: str = VIEWER
    ) -> Viewer:
        """With a token of one tenant, or of none; `says` is what they put into the header."""
        token = await self.lab.kernel.operators.tokens.create(
            name, roles=frozenset({Role(role)}), scope=f"tenant/{tenant}" if tenant else "", actor="test"
        )
        headers = {"authorization": f"Bearer {token}", **({"x-tenant-id": says} if says else {})}
        return Viewer(http=self.http, headers=headers)

    async def provisioned(self, count: int, *, tenant: str = TENANT) -> list[Instance]:
        """So many instances of a tenant that the provider has made, oldest first."""
        async with asyncio.timeout(SECONDS):
            while len(found := [one for one in self.instances.all(tenant) if _is_made(one)]) < count:
                await asyncio.sleep(0.01)
        return sorted(found, key=lambda one: one.created_revision)

    async def change(self, name: str, **fields: Any) -> None:
        """Let something have happened to an instance."""

        def changed(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, **fields)

        assert await self.instances.step(TENANT, name, changed, action="test")


def _is_made(instance: Instance) -> bool:
    return instance.status is not None and bool(instance.status.provider_id)


@asynccontextmanager
async def web(folder: Path, wanted: Json | None = None) -> AsyncIterator[Web]:
    async with lab(folder, wanted or two_tenants()) as found:
        ops = OpsApp(CollectorRegistry(), version="0")
        ops.mount(found.domain.routes)
        spec = ListenerSpec(name="web", addresses=("127.0.0.1:0",), app=ops, http1=True)
        async with (
            open_listener(spec, grace_seconds=2) as listener,
            httpx.AsyncClient(base_url=listener.addresses[0], timeout=SECONDS, trust_env=False) as http,
        ):
            yield Web(lab=found, http=http)
