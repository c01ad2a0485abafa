"""One stream to the server: register, then talk until it breaks.

Everything that must outlive the stream is elsewhere; a new session starts from what is so now and
from what the server has not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import grpc
import grpc.aio
import msgspec
import structlog

from fleetplane.domains.proxies.agent.commands import CommandHandler
from fleetplane.domains.proxies.agent.enrolment import Credential, TokenSuperseded, translated
from fleetplane.domains.proxies.agent.log_shipping import Shipper
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.node import link
from fleetplane.node.connection import Follow, no_check_in
from fleetplane.node.link import LinkLost, ServerRefused
from fleetplane.node.writer import StreamWriter

REGISTRATION_SECONDS: Final = 10.0
RECEIPT_SECONDS: Final = 30.0
"""Seconds after which an unacknowledged batch is sent again; its ids make repetitions harmless."""
HEARTBEAT_SECONDS: Final = 30.0
METRICS_SECONDS: Final = 15.0
GOODBYE_SECONDS: Final = 1.0
SAY_AGAIN_TURNS: Final = 5
WAKE_GAP_SECONDS: Final = 0.2
"""Between two health reports, however much happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReports:
    """How the things a session tells of itself are made, at the moment they are sent."""

    health: Callable[[], Awaitable[pb.HealthReport]]
    metrics: Callable[[], Awaitable[pb.MetricsBatch]]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Health that should not wait for its turn."""
    metrics_seconds: float = METRICS_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyNode:
    """What lasts from one session to the next."""

    introduction: pb.RegistrationRequest
    """Without the token."""
    offer: Callable[[pb.ConfigUpdate], None]
    learn_lineage: Callable[[str], None]
    """Called with the lineage of the server's store, where the server sends it."""
    commander: CommandHandler
    outbox: ProxyOutbox
    reports: SessionReports
    shippers: tuple[Shipper, ...]
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    say_again_seconds: float = 5.0
    """Before a message that the server could not take is sent once more."""
    check_in: Follow = no_check_in
    """Says which version this is, over each connection."""
    last_stamp: list[int] = field(default_factory=lambda: [0])

    def stamp(self) -> int:
        """Now in milliseconds, but never the same twice: receipts name messages by it."""
        self.last_stamp[0] = max(self.clock.now_ns() // 1_000_000, self.last_stamp[0] + 1)
        return self.last_stamp[0]


class ProxySession:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        node: ProxyNode,
        credential: Credential,
        *,
        registered: Callable[[Credential], None],
    ) -> None:
        self._node = node
        self._channel = channel
        self._registered = registered
        self._credential = credential
        self._agent_id = credential.agent_id
        self._heartbeat_seconds = HEARTBEAT_SECONDS
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        # The certificate of the connection says who we are; before there is one, the token does.
        self._shown = (("authorization", f"Bearer {credential.token}"),) if credential.token else ()
        self._call = stub.Stream(metadata=self._shown)
        self._writer: StreamWriter[pb.AgentMessage] = StreamWriter(self._call, translated)
        self._receipts: dict[str, asyncio.Future[str]] = {}
        self._refusals: dict[str, int] = {}
        self._log_columns = False
        self.established = False

    def __repr__(self) -> str:
        return f"<Session of {self._agent_id or 'nobody yet'} established={self.established}>"

    async def run(self) -> NoReturn:
        """Until the stream breaks (LinkLost) or the server wants us no more (Refused)."""
        ends: list[BaseException] = []
        try:
            await self._register()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run())
                tasks.create_task(self._flush())
                tasks.create_task(self._beat())
                tasks.create_task(self._measure())
                tasks.create_task(self._node.check_in(self._channel, lambda: self._shown))
                for shipper in self._node.shippers:
                    shipping = shipper.run(self._deliver, self._agent_id, columns=self._log_columns)
                    tasks.create_task(shipping)
                await self._listen()
        except* (grpc.aio.AioRpcError, LinkLost, ServerRefused) as group:
            ends = list(link.causes(group))
        finally:
            await self._say_goodbye()
        raise link.most_telling(ends, (ServerRefused, TokenSuperseded, LinkLost), translated)

    async def _register(self) -> None:
        introduction = pb.RegistrationRequest()
        introduction.CopyFrom(self._node.introduction)
        introduction.token = self._credential.token
        message = pb.AgentMessage(registration=introduction)
        self._stamp(message)
        await self._writer.first(message)
        try:
            async with asyncio.timeout(REGISTRATION_SECONDS):
                answer = await self._call.read()
        except TimeoutError as error:
            raise LinkLost("the server does not answer the registration") from error
        if not isinstance(answer, pb.MasterMessage):
            raise translated(await link.ending(self._call))
        response = answer.registration_response
        if answer.WhichOneof("payload") != "registration_response":
            raise LinkLost("the server answered the registration with something else")
        if not response.success:
            raise await self._refusal(response.error_message or "the registration was refused")
        self._agent_id = response.agent_id
        if response.heartbeat_interval_seconds > 0:
            self._heartbeat_seconds = float(response.heartbeat_interval_seconds)
        self._node.learn_lineage(response.lineage)
        self._log_columns = response.log_columns
        self.established = True
        self._registered(msgspec.structs.replace(self._credential, agent_id=response.agent_id))

    async def _refusal(self, words: str) -> LinkLost | ServerRefused:
        """What a refused registration means: the status that follows it says whether to come again soon."""
        try:
            async with asyncio.timeout(REGISTRATION_SECONDS):
                found = translated(await link.ending(self._call))
        except TimeoutError:
            return ServerRefused(words)
        return found if isinstance(found, TokenSuperseded) else ServerRefused(words)

    # Reading.

    async def _listen(self) -> None:
        while isinstance(message := await self._call.read(), pb.MasterMessage):
            match message.WhichOneof("payload"):
                case "config_update":
                    self._node.offer(message.config_update)
                case "command":
                    self._node.commander.take(message.command)
                case "ack":
                    self._take_receipt(message.ack)
                case "error":
                    self._node.log.warning(
                        "server_says", code=message.error.code, message=message.error.message
                    )
                case _:
                    self._node.log.debug("message_not_understood")
        raise translated(await link.ending(self._call))

    def _take_receipt(self, ack: pb.Ack) -> None:
        fault = "" if ack.success else (ack.error_message or "refused")
        if (waiting := self._receipts.pop(ack.message_id, None)) is not None:
            if not waiting.done():
                waiting.set_result(fault)
        elif not fault:
            self._node.outbox.acknowledged(ack.message_id)
        else:
            self._node.log.warning("server_refused_message", id=ack.message_id, error=fault)
            self._say_again(ack.message_id)

    def _say_again(self, receipt: str) -> None:
        """The server could not take it now. What it will never take waits for the next session, at most."""
        turns = self._refusals.get(receipt, 0) + 1
        self._refusals[receipt] = turns
        if turns <= SAY_AGAIN_TURNS and self._node.outbox.again(receipt):
            again_in = self._node.say_again_seconds * turns
            asyncio.get_running_loop().call_later(again_in, self._node.outbox.wake)

    # Writing.

    async def _send(self, message: pb.AgentMessage, waiting: asyncio.Future[str] | None = None) -> str:
        """Send a message; returns the id under which it will be acknowledged to `waiting`."""
        receipt = self._stamp(message)
        if waiting is not None:
            self._receipts[receipt] = waiting  # before it is sent: the answer may be quick
        await self._writer.send(message)
        return receipt

    def _stamp(self, message: pb.AgentMessage) -> str:
        message.agent_id = self._agent_id
        message.timestamp = self._node.stamp()
        return str(message.timestamp)

    async def _flush(self) -> NoReturn:
        """Send what the server has not acknowledged, everything once on a new stream."""
        outbox = self._node.outbox
        outbox.new_stream()
        while True:
            for receipt, payload in outbox.unsent():
                outbox.sent(receipt, payload)  # before it is: the answer may be quick
                if isinstance(payload, pb.Event):
                    await self._send(pb.AgentMessage(event=payload))
                else:
                    await self._send(pb.AgentMessage(config_status=payload))
            await outbox.changed()

    async def _beat(self) -> NoReturn:
        reports, clock = self._node.reports, self._node.clock
        while True:
            await self._send(pb.AgentMessage(health=await reports.health()))
            await clock.sleep(WAKE_GAP_SECONDS)
            pause = self._heartbeat_seconds * (0.9 + 0.2 * clock.random()) - WAKE_GAP_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await reports.wake.wait()
            reports.wake.clear()

    async def _measure(self) -> NoReturn:
        while True:
            metrics = await self._node.reports.metrics()
            await self._send(pb.AgentMessage(metrics=metrics))
            await self._node.clock.sleep(self._node.reports.metrics_seconds)

    async def _deliver(self, batch: pb.LogBatch) -> str:
        """Send log lines and wait until the server has them; what it has against them otherwise."""
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        while True:
            receipt = await self._send(pb.AgentMessage(logs=batch), waiting)
            try:
                async with asyncio.timeout(RECEIPT_SECONDS):
                    return await asyncio.shield(waiting)
            except TimeoutError:
                self._receipts.pop(receipt, None)

    async def _say_goodbye(self) -> None:
        """End our half first, so that the server sees an end and not a breakdown."""
        with suppress(*link.CALL_IS_OVER, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._call.done_writing()
        self._call.cancel()
