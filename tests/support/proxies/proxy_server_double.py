"""A double of the server that NGINX agents talk to, on our own gRPC layer with real TLS.

It holds what a test wants to know and does what a test tells it to; it has no opinions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    TlsFiles,
    open_listener,
)

SERVICE = "nxmesh.agent.v1.AgentService"
LISTENER = "proxy-agents"
TOKEN = "nxmesh_agent_test"
AGENT_ID = "770e8400-e29b-41d4-a716-446655440003"


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


class ProxyServerDouble:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        ca = ThrowawayCa()
        self.authority = folder / "ca.crt"
        self.authority.write_bytes(ca.pem)
        self._certificate, self._key = ca.server(folder)
        self._port = free_port()  # it may go and come back
        self._stack = contextlib.AsyncExitStack()
        self._app: GrpcApp | None = None
        self._queues: list[asyncio.Queue[pb.MasterMessage]] = []
        # What a test may set
        self.known_token = TOKEN
        self.lineage = ""
        self.log_columns = False
        """Whether it takes the access log by column, as servers of this version do."""
        self.acknowledges = True
        self.refused_logs = 0
        """So many batches of log lines are refused in words."""
        self.refused_statuses = 0
        """So many final words about versions are refused."""
        # What a test may look at
        self.registrations: list[pb.RegistrationRequest] = []
        self.bearers: list[str] = []
        self.health: list[pb.HealthReport] = []
        self.statuses: list[pb.ConfigStatus] = []
        self.events: list[pb.Event] = []
        self.metrics: list[pb.MetricsBatch] = []
        self.log_batches: list[pb.LogBatch] = []
        self.messages: list[pb.AgentMessage] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def states(self, version: int) -> list[str]:
        return [
            pb.ConfigApplyStatus.Name(status.status) for status in self.statuses if status.version == version
        ]

    def results(self) -> dict[str, dict[str, str]]:
        """What came of commands, by their ids."""
        return {
            event.data["command_id"]: dict(event.data)
            for event in self.events
            if event.event_type == "command.result"
        }

    def lines(self) -> list[pb.LogEntry]:
        """Of the access log, each id once, as a server would keep them."""
        entries = {
            entry.fields["id"]: entry
            for batch in self.log_batches
            for entry in batch.entries
            if entry.level == "access"
        }
        return list(entries.values())

    def send(self, **payload: Any) -> None:
        self._queues[-1].put_nowait(pb.MasterMessage(timestamp=1, **payload))

    async def start(self) -> None:
        app = GrpcApp(
            listener=LISTENER,
            table=MethodTable(
                [
                    MethodRow(
                        path=f"/{SERVICE}/Stream",
                        listener=LISTENER,
                        authentication=Authentication.ANONYMOUS,
                        permission=None,
                    )
                ]
            ),
            access=AccessTable({}),
            authenticators={Authentication.ANONYMOUS: lambda _: Principal(name="anyone", roles=frozenset())},
            clock=SystemClock(),
            statistics=CallStatistics(),
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.AgentMessage.FromString,
            response_serializer=pb.MasterMessage.SerializeToString,
        )
        app.add_registered_method_handlers(SERVICE, {"Stream": handler})
        app.seal()
        tls = TlsFiles(certificate=self._certificate, key=self._key)
        spec = ListenerSpec(name=LISTENER, addresses=(self.address,), app=app, tls=tls)
        await self._stack.enter_async_context(open_listener(spec, grace_seconds=0.2))
        self._app = app

    async def stop(self) -> None:
        """Go away like a process that was killed: streams break off."""
        if self._app is not None:
            await self._app.drain(0.0)
            self._app = None
        await self._stack.aclose()
        self._queues = []

    async def _stream(self, requests: AsyncIterator[pb.AgentMessage], context: Any) -> None:
        first = await anext(requests)
        outgoing: asyncio.Queue[pb.MasterMessage] = asyncio.Queue()
        self._queues.append(outgoing)  # who sees the registration may send something at once
        self.registrations.append(first.registration)
        self.bearers.append(dict(context.invocation_metadata()).get("authorization", ""))
        good = first.registration.token == self.known_token
        response = pb.RegistrationResponse(
            agent_id=AGENT_ID if good else "",
            success=good,
            error_message="" if good else "unknown token",
            heartbeat_interval_seconds=30,
            lineage=self.lineage,
            log_columns=self.log_columns,
        )
        await context.write(pb.MasterMessage(timestamp=1, registration_response=response))
        if not good:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(outgoing, context))
            async for message in requests:
                self._take(message, outgoing)
            writing.cancel()

    async def _write(self, outgoing: asyncio.Queue[pb.MasterMessage], context: Any) -> None:
        while True:
            await context.write(await outgoing.get())

    def _take(self, message: pb.AgentMessage, outgoing: asyncio.Queue[pb.MasterMessage]) -> None:
        self.messages.append(message)
        receipt, fault = "", ""
        match message.WhichOneof("payload"):
            case "health":
                self.health.append(message.health)
            case "config_status":
                self.statuses.append(status := message.config_status)
                receipt = f"{status.config_id}:{status.version}:{pb.ConfigApplyStatus.Name(status.status)}"
                if self.refused_statuses and status.status == pb.SUCCESS:
                    self.refused_statuses -= 1
                    fault = "not now"
            case "event":
                self.events.append(message.event)
                receipt = message.event.event_id
            case "metrics":
                self.metrics.append(message.metrics)
                receipt = str(message.timestamp)
            case "logs":
                receipt = str(message.timestamp)
                if self.refused_logs:
                    self.refused_logs -= 1
                    fault = "not now"
                else:
                    self.log_batches.append(message.logs)
        if receipt and self.acknowledges:
            ack = pb.Ack(message_id=receipt, success=not fault, error_message=fault)
            outgoing.put_nowait(pb.MasterMessage(timestamp=1, ack=ack))


@contextlib.asynccontextmanager
async def proxy_server(folder: Path) -> AsyncIterator[ProxyServerDouble]:
    double = ProxyServerDouble(folder)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
