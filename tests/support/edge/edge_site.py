"""A real server process with edge daemons around it, and operators who call it from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_identity_rig import claims_of
from support.edge.edge_signer import Identity
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.h2_grpc import GrpcFailed
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.clients.owner_client import OperatorsClient
from fleetplane.domains.edge.agent.assembly import Reach
from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2
from fleetplane.kernel.clock import SystemClock

SECONDS = 60.0
PREFIX = "/v1/edge"
ADMIN = "edge.admin"
OPEN_DOOR = ("--set", "edge.attests_per_minute=0")
"""For tests that enrol more daemons from one address than a server lets in by itself."""
_numbers = itertools.count(1)


def a_tenant() -> str:
    """Of its own for each test that shares a server with others."""
    return f"t-{uuid.uuid4().hex[:12]}"


async def until(condition: Callable[[], Any], *, seconds: float = SECONDS) -> Any:
    """What the condition comes to, once that is true; it may be one that has to be awaited.

    Asked more seldom the longer it takes: an operator may call a thousand times a minute.
    """
    pause = 0.02
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            found = await found if isinstance(found, Awaitable) else found
            if found:
                return found
            pause = min(pause * 1.1, 0.2)
            await asyncio.sleep(pause)


@dataclass(slots=True, kw_only=True)
class Rest:
    """REST as one operator calls it, for one tenant."""

    http: httpx.AsyncClient
    tenant: str

    async def call(self, method: str, path: str, body: object = None, **more: Any) -> httpx.Response:
        more.setdefault("json", body)
        return await self.http.request(method, PREFIX + path, **more)

    async def get(self, path: str, **more: Any) -> Any:
        return _content(await self.call("GET", path, **more))

    async def post(self, path: str, body: object = None, **more: Any) -> Any:
        return _content(await self.call("POST", path, body, **more))

    async def invite(self, name: str = "", **more: Any) -> str:
        made = await self.post("/enrollment-tokens", {"name": name, **more})
        return str(made["token"])

    async def host(self, node_id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.get(f"/hosts/{node_id}")
        return found

    async def connected(self, *node_ids: str) -> None:
        for node_id in node_ids:
            await until(lambda: self._is(node_id, "Connected"))  # noqa: B023

    async def _is(self, node_id: str, status: str) -> bool:
        return bool((await self.host(node_id))["status"] == status)

    async def start(self, target: object = "all", **more: Any) -> str:
        """A run that goes on by itself; its id."""
        script = more.pop("script", None)
        body = {"target": target, "tool": "cmd.run", "args": {"command": "true"}, **more}
        if script is not None:
            body["args"] = {"command": "/bin/sh", "args": ["-c", script]}
        made = await self.post("/fleet/invoke", body, headers={"accept": "application/json"})
        return str(made["fleet_command_id"])

    async def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.get(f"/fleet/runs/{run_id}")
        return found

    async def ended(self, run_id: str, *, seconds: float = SECONDS) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            found = await self.run(run_id)
            return found if found["ended_at"] is not None else None

        found: dict[str, Any] = await until(over, seconds=seconds)
        return found

    async def do(self, target: object = "all", **more: Any) -> dict[str, Any]:
        return await self.ended(await self.start(target, **more))

    @asynccontextmanager
    async def events(self, path: str, **more: Any) -> AsyncIterator[AsyncIterator[Event]]:
        """Server-sent events, for as long as they come."""
        more.setdefault("headers", {})
        more["headers"] = {"accept": "text/event-stream", **more["headers"]}
        async with self.http.stream(more.pop("method", "GET"), PREFIX + path, **more) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                answer.raise_for_status()
            yield _events(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    mark: str
    kind: str
    data: dict[str, Any]


async def _events(answer: httpx.Response) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        name, colon, value = line.partition(": ")
        if line and colon and name:
            fields[name] = value
        elif not line and "data" in fields:
            yield Event(
                mark=fields.get("id", ""), kind=fields.get("event", ""), data=json.loads(fields["data"])
            )
            fields = {}


def _content(answer: httpx.Response) -> Any:
    assert answer.status_code < 300, f"{answer.status_code}: {answer.text}"
    return answer.json() if answer.content else None


@dataclass(slots=True, kw_only=True)
class Site:
    server: ServerProcess
    data_dir: Path
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def edge(self) -> str:
        return self.server.address("edge", "http").removeprefix("http://")

    def token(self, *roles: str, tenant: str = "") -> str:
        """An operator's, with these roles; of all tenants if none is named."""
        request = operators_pb2.CreateTokenRequest(
            name=f"test-{next(_numbers)}-{uuid.uuid4().hex[:6]}", roles=roles or (ADMIN,), tenant=tenant
        )
        with OperatorsClient(self.data_dir, call_seconds=SECONDS) as owner:
            return str(owner.call("CreateToken", request).token)

    @asynccontextmanager
    async def rest(
        self, tenant: str, *roles: str, token: str | None = None, **headers: str
    ) -> AsyncIterator[Rest]:
        shown = self.token(*roles, tenant=tenant) if token is None else token
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(
            base_url=self.server.web, timeout=SECONDS, headers={"authorization": f"Bearer {shown}", **given}
        ) as http:
            yield Rest(http=http, tenant=tenant)

    async def shipped(self, rest: Rest, name: str = "", **options: Any) -> ShippedDaemon:
        options.setdefault("heartbeat_seconds", 0.5)
        options.setdefault("wait_scale", 0.05)
        return await ShippedDaemon.enroll(self.edge, await rest.invite(name), **options)

    async def ours(self, rest: Rest, folder: Path, name: str = "") -> StateFolder:
        state = StateFolder(folder)
        enroller = Enroller(folder=state, connect=Reach().channel, clock=SystemClock())
        await enroller.enrol(EnrolmentRequest(token=await rest.invite(name)))
        return state


def identity_of(daemon: ShippedDaemon, tenant: str) -> Identity:
    """What a daemon has on its disk, for those who sign events by hand."""
    return Identity(
        node_id=daemon.node_id,
        tenant=tenant,
        key=daemon.key,
        token=daemon.token,
        token_id=str(claims_of(daemon.token)["jti"]),
    )


@contextmanager
def site(data_dir: Path, *arguments: str) -> Iterator[Site]:
    with running_server(data_dir, "--set", "only=edge", *OPEN_DOOR, *arguments) as server:
        yield Site(server=server, data_dir=data_dir)


@asynccontextmanager
async def restarting(data_dir: Path, *arguments: str) -> AsyncIterator[Site]:
    """The same beside an event loop that has daemons to run meanwhile."""
    opened = site(data_dir, *arguments)
    here = await asyncio.to_thread(opened.__enter__)
    try:
        yield here
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


async def refused(call: Awaitable[object]) -> int:
    """The gRPC code with which something is refused."""
    try:
        await call
    except GrpcFailed as error:
        return error.code
    except grpc.aio.AioRpcError as error:
        return int(error.code().value[0])
    raise AssertionError("it was not refused")


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def outcomes(run: dict[str, Any]) -> Sequence[str]:
    return sorted(one["outcome"] for one in run["per_node"])
