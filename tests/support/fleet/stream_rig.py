"""A stream host with the smallest protocol there is, behind a real listener, and the official client.

The wire is that of proxies: a hello is a message with an `agent_id`; what follows is echoed in receipts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from fleetplane.fleet.streams.host import Entrance, StreamEnding, StreamHost, StreamPolicy
from fleetplane.fleet.streams.presence import Flight, Live, Presences
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, Unavailable
from fleetplane.kernel.sessions import Session, Sessions
from fleetplane.rpc import (
    Authentication,
    CallContext,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    open_listener,
)

LISTENER = "test"
_SERVICE = pb.DESCRIPTOR.services_by_name["AgentService"]


@dataclass(slots=True, kw_only=True, eq=False)
class Echo(Live[pb.MasterMessage, Flight]):
    number: int


@dataclass
class EchoProtocol:
    said: list[str] = field(default_factory=list)
    """What the host told, in order."""
    settle: Callable[[Echo], Any] | None = None
    """Awaited while a stream is settled."""
    fail_after_entering: bool = False
    before: Callable[[], Any] | None = None
    """Awaited while an agent that comes has no stream."""
    kept: set[str] = field(default_factory=set)
    """Agents whose open stream may not be superseded."""

    async def admit(
        self, first: pb.AgentMessage | None, _context: CallContext, enter: Entrance[pb.MasterMessage, Echo]
    ) -> Echo:
        if first is None:
            raise InvalidArgument("no hello came")
        number = len(self.said)

        def live(session: Session[pb.MasterMessage]) -> Echo:
            return Echo(agent=first.agent_id, session=session, since_ns=0, heard_ns=0, number=number)

        def check(older: Echo) -> None:
            if older.agent in self.kept:
                raise PermissionDenied("somebody else is here")

        found = await enter(
            first.agent_id,
            live,
            principal=first.agent_id,
            check=check,
            settle=self._settle_before,
            hello_at_ns=first.timestamp,
        )
        self.said.append("entered")
        if self.fail_after_entering:
            raise Unavailable("not now")
        return found

    async def _settle_before(self) -> None:
        self.said.append("settling")
        if self.before is not None:
            await self.before()

    def opened(self, live: Echo) -> None:
        live.session.offer(pb.MasterMessage(ack=pb.Ack(message_id="welcome")))

    async def arrived(self, live: Echo) -> None:
        self.said.append("arrived")

    async def take(self, live: Echo, message: pb.AgentMessage) -> None:
        if message.timestamp < 0:
            raise InvalidArgument("a moment before the beginning")
        live.session.offer(pb.MasterMessage(ack=pb.Ack(message_id=str(message.timestamp))))

    async def left(self, live: Echo) -> None:
        self.said.append("leaving")
        if self.settle is not None:
            await self.settle(live)
        self.said.append("left")

    def ending(self, live: Echo, reason: str, error: Exception | None) -> StreamEnding[pb.MasterMessage]:
        self.said.append(f"ended: {reason}")
        if error is not None:
            return StreamEnding(last=pb.MasterMessage(error=pb.Error(code="BAD")), error=error)
        return StreamEnding(error=None if reason == "ended" else Unavailable(reason))


class EchoService:
    def __init__(self, host: StreamHost[pb.AgentMessage, pb.MasterMessage, Echo]) -> None:
        self._host = host

    async def Stream(self, requests: AsyncIterator[pb.AgentMessage], context: CallContext) -> None:
        await self._host.serve(requests, context)

    async def ReportHealth(self, _request: Any, _context: CallContext) -> pb.Ack:
        return pb.Ack()

    async def ReportMetrics(self, _request: Any, _context: CallContext) -> pb.Ack:
        return pb.Ack()


@dataclass(kw_only=True)
class StreamRig:
    protocol: EchoProtocol
    presences: Presences[Echo]
    sessions: Sessions
    host: StreamHost[pb.AgentMessage, pb.MasterMessage, Echo]
    stub: Any

    async def open(self, agent: str) -> Any:
        """A call that has said hello; its answer is not read yet."""
        call = self.stub.Stream()
        await call.write(pb.AgentMessage(agent_id=agent))
        return call

    async def welcomed(self, agent: str) -> Any:
        call = await self.open(agent)
        async with asyncio.timeout(60):
            assert (await call.read()).ack.message_id == "welcome"
        return call


@asynccontextmanager
async def stream_rig(
    policy: StreamPolicy | None = None, *, lingering: bool = False
) -> AsyncIterator[StreamRig]:
    clock = SystemClock()
    protocol, presences, sessions = EchoProtocol(), Presences[Echo](lingering=lingering), Sessions()
    host: StreamHost[pb.AgentMessage, pb.MasterMessage, Echo] = StreamHost(
        protocol,
        stream="echo",
        presences=presences,
        sessions=sessions,
        clock=clock,
        policy=policy or StreamPolicy(),
    )
    rows = [
        MethodRow(
            path=f"/{_SERVICE.full_name}/{method.name}",
            listener=LISTENER,
            authentication=Authentication.ANONYMOUS,
            permission=None,
        )
        for method in _SERVICE.methods
    ]
    app = GrpcApp(
        listener=LISTENER,
        table=MethodTable(rows),
        access=AccessTable({}),
        clock=clock,
        authenticators={
            Authentication.ANONYMOUS: lambda _connection: Principal(name="anonymous", roles=frozenset())
        },
        statistics=CallStatistics(),
    )
    app.add_service(_SERVICE, EchoService(host))
    app.seal()
    spec = ListenerSpec(name=LISTENER, addresses=("127.0.0.1:0",), app=app)
    async with open_listener(spec, grace_seconds=2) as listener:
        address = listener.addresses[0].removeprefix("http://")
        async with grpc.aio.insecure_channel(address) as channel:
            yield StreamRig(
                protocol=protocol,
                presences=presences,
                sessions=sessions,
                host=host,
                stub=agent_pb2_grpc.AgentServiceStub(channel),
            )
        host.stop()
        await app.drain(2)
