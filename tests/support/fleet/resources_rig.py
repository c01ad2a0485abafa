"""The resource API on a real store, without the domains' machinery: tests put what is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx

from fleetplane.domains.blueprint import Blueprint, Kernel, run_both
from fleetplane.domains.edge.kinds import EDGE_NODE, Capabilities, NodeSpec, NodeState, NodeStatus
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
from fleetplane.domains.fleetwide import FleetwideDomain, members_of
from fleetplane.domains.gpus.kinds import GPU, SCOPE, GpuSpec, GpuStatus
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.fleet.api import ResourceApi
from fleetplane.fleet.feeds.ring import RING_EVENTS
from fleetplane.fleet.resources.changes import ChangeRing
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.resources import Condition, Kind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.rpc import CallStatistics

VIEWER, EDGE_ADMIN = "gpus.viewer", "edge.admin"


class ResourcesRig:
    """One server's resource API, and what tests do with it."""

    def __init__(self, kernel: Kernel, api: ResourceApi) -> None:
        self.kernel = kernel
        self.store = kernel.store
        self.api = api
        self.app = next(iter(api.routes)).app
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://rig")

    def forget_ring(self) -> None:
        """As after a restart: what happened before is in the log only."""
        changes = ChangeRing(self.store, self.api.catalogue)
        ring = self.api.changes.ring
        ring._ring.clear()
        ring._base = 0
        ring._floor = changes.ring._floor
        ring.revision = changes.ring.revision

    async def token(self, name: str, *roles: str, tenant: str = "") -> str:
        return await self.kernel.operators.tokens.create(
            name,
            roles=frozenset(map(Role, roles)),
            scope=f"tenant/{tenant}" if tenant else "",
            actor="tester",
        )

    async def get(self, path: str, token: str, **query: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.client.get(f"/apis/v1{path}", headers=headers, params=query or None)

    async def post(self, path: str, token: str, body: object = None, **headers: str) -> httpx.Response:
        headers["authorization"] = f"Bearer {token}"
        return await self.client.post(f"/apis/v1{path}", headers=headers, json=body)

    async def put(self, kind: Kind[Any, Any], scope: str, name: str, **content: Any) -> int:
        done = await self.store.transact(
            lambda draft: draft.put(kind, scope, name, **content),
            actor="tester",
            action="put",
            touches=[kind.key(scope, name)],
        )
        return int(done.value.revision)

    async def remove(self, kind: Kind[Any, Any], scope: str, name: str) -> None:
        await self.store.transact(
            lambda draft: draft.delete(kind, scope, name),
            actor="tester",
            action="delete",
            touches=[kind.key(scope, name)],
        )

    async def gpu(self, name: str, status: str = "True", **labels: str) -> int:
        return await self.put(
            GPU,
            SCOPE,
            name,
            spec=GpuSpec(uuid=f"GPU-{name}"),
            status=GpuStatus(),
            labels=labels,
            conditions=(Condition(type="Ready", status=status, reason="Said", writer="p"),),
        )

    async def remove_gpu(self, name: str) -> None:
        await self.remove(GPU, SCOPE, name)

    async def node(self, tenant: str, name: str, state: str = "connected", **tags: str) -> int:
        status = NodeStatus(state=NodeState(state), since_ns=10**18, capabilities=Capabilities(labels=tags))
        spec = NodeSpec(
            display_name=f"the {name}",
            public_key=b"k" * 32,
            token_id="hidden-token-id",
            token_expires_at_ns=2 * 10**18,
            enrolled_at_ns=10**18,
        )
        return await self.put(EDGE_NODE, f"tenant/{tenant}", name, spec=spec, status=status)


@asynccontextmanager
async def resources_rig(
    folder: Path,
    blueprints: Sequence[Blueprint] = (GPUS, EDGE),
    *,
    ring_events: int = RING_EVENTS,
    running: Callable[[Kernel], Mapping[str, Any]] = lambda _kernel: {},
    started: Mapping[str, Callable[[Kernel], Awaitable[Any]]] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[ResourcesRig]:
    """`running` makes what stands for running domains, by name; `started` makes real ones of `blueprints`."""
    clock = SystemClock()
    kinds = dict.fromkeys((*KERNEL_KINDS, *(kind for one in (*blueprints, FLEETWIDE) for kind in one.kinds)))
    settings = StoreSettings(path=folder / "state.db")
    async with Store.open(settings, kinds=tuple(kinds), clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        kernel = Kernel(
            store=store,
            clock=clock,
            calls=CallStatistics(),
            master=master,
            authority=await Authority.load_or_create(store, master, clock),
            revocations=Revocations(store, clock),
            operators=await Operators.load(store, master, clock),
            telemetry=telemetry,
        )
        named = {one.name for one in blueprints}
        made = {name: await make(kernel) for name, make in (started or {}).items() if name in named}
        domains = {**_computing_nothing(kernel), **running(kernel), **made}
        pairs: list[tuple[Blueprint, Any]] = [(one, domains.get(one.name)) for one in blueprints]
        fleetwide = FleetwideDomain(kernel, [pair for pair in pairs if pair[0].name in made], version="test")
        pairs.append((FLEETWIDE, fleetwide))
        api = ResourceApi(
            kernel,
            members_of(pairs),
            (one.grants for one, _ in pairs),
            version="test",
            ring_events=ring_events,
            explanations=fleetwide.explanations,
            switch=fleetwide.switch,
        )
        await api.take_over()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(run_both(api))
            rig = ResourcesRig(kernel, api)
            async with rig.client:
                yield rig
            serving.cancel()


def _computing_nothing(kernel: Kernel) -> dict[str, Any]:
    """What stands for domains that compute objects or hear agents, where a test starts none."""
    groups = SimpleNamespace(loaded=None, views=dict, configuration=None)
    unheard = SimpleNamespace(heard_at_ns=lambda _node: None, sighting=lambda _agent: None)
    boards = SimpleNamespace(presence=SimpleNamespace(last_seen_ns=lambda _board: None))
    return {
        "edge": SimpleNamespace(streams=unheard),
        "proxies": SimpleNamespace(presences=unheard),
        "boards": SimpleNamespace(core=boards),
        "gpus": SimpleNamespace(leases=list, stored_gpus=list, applied_settings=dict),
        "instances": SimpleNamespace(groups=groups, store=kernel.store),
    }


class WatchReader:
    """Reads one watch as an ASGI server would pass it on, as fast as the test asks for it."""

    def __init__(self, rig: ResourcesRig, token: str, query: Mapping[str, str], path: str = "/watch") -> None:
        self._rig = rig
        self._scope = {
            "type": "http",
            "method": "GET",
            "path": f"/apis/v1{path}",
            "raw_path": f"/apis/v1{path}".encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "query_string": urlencode(query).encode(),
            "headers": [(b"authorization", f"Bearer {token}".encode())],
            "client": ("127.0.0.1", 1),
            "server": ("rig", 80),
        }
        self.status = 0
        self.ended = asyncio.Event()
        self._left = asyncio.Event()
        self._free = asyncio.Semaphore(0)
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._buffer = b""
        self._asked = False

    async def serve(self) -> None:
        await self._rig.app(self._scope, self._receive, self._send)
        self.ended.set()
        self._chunks.put_nowait(b"")

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self._free.acquire()  # a server whose client does not read waits here
        self._chunks.put_nowait(message.get("body", b""))

    async def next(self) -> tuple[str, str, Any]:
        """The next event: its type, its id and its data; an empty type at the end."""
        async with asyncio.timeout(60):
            while not (fields := await self._fields()):
                pass  # a sign of life, which is no event
        if not fields["event"]:
            return "", "", None
        return fields["event"], fields.get("id", ""), json.loads(fields["data"])

    async def _fields(self) -> dict[str, str]:
        """Of the next block; an empty event at the end."""
        while b"\n\n" not in self._buffer:
            self._free.release()
            chunk = await self._chunks.get()
            if not chunk and self.ended.is_set():
                return {"event": ""}
            self._buffer += chunk
        block, _, self._buffer = self._buffer.partition(b"\n\n")
        return dict(line.split(": ", 1) for line in block.decode().splitlines() if line[0] != ":")

    async def until(self, wanted: str) -> list[tuple[str, str]]:
        """Types and names of the events before the next of a type."""
        found: list[tuple[str, str]] = []
        while True:
            word, _, data = await self.next()
            if word == wanted:
                return found
            assert word, f"the watch ended before {wanted}"
            found.append((word, data["metadata"]["name"] if "metadata" in data else ""))

    def leave(self) -> None:
        self._left.set()
        self._free.release()


@asynccontextmanager
async def watched(rig: ResourcesRig, token: str, **query: str) -> AsyncIterator[WatchReader]:
    """An open watch, left at the end."""
    reader = WatchReader(rig, token, query)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(reader.serve())
        yield reader
        reader.leave()
        async with asyncio.timeout(60):
            await asyncio.wait([serving])
