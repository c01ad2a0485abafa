"""The agent on an instance: enrols, then keeps a session with the server for as long as it lives.

Ties lives together and decides nothing itself: who we are is settled in `registration`, what
happens on a connection in `session`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.registration import InstanceRegistrar
from fleetplane.domains.instances.agent.reporter import watch_spot
from fleetplane.domains.instances.agent.session import STEADY_SECONDS, InstanceNode, InstanceSession
from fleetplane.domains.instances.agent.spot import SpotSource
from fleetplane.domains.instances.agent.transport import InstanceTransport
from fleetplane.node.certificates import Life
from fleetplane.node.connection import ConnectionAttempt, ConnectionRetries, KeepConnected
from fleetplane.node.link import LinkLost
from fleetplane.node.probes import Probes
from fleetplane.node.short_lived import CallFailed
from fleetplane.node.tasks import in_thread

HAND_OVER_SECONDS: Final = 10.0
"""For the connection with a renewed certificate to come up while the old one still carries the streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLine:
    """A connection, and how long the certificate lives that it was made with."""

    channel: grpc.aio.Channel
    life: Life


class InstanceAgent:
    """Runs until cancelled; only an identity that can never work ends it otherwise."""

    def __init__(
        self,
        *,
        identity: IdentityFolder,
        registrar: InstanceRegistrar,
        transport: InstanceTransport,
        node: InstanceNode,
        spot: SpotSource | None,
        spot_interval_seconds: float,
        health_address: str = "",
    ) -> None:
        self._identity = identity
        self._registrar = registrar
        self._transport = transport
        self._node = node
        self._spot = spot
        self._spot_interval_seconds = spot_interval_seconds
        self._channel: grpc.aio.Channel | None = None
        self._successor: ServerLine | None = None
        """A connection that was brought up before the last session ended."""
        self.probes = Probes(health_address, lambda: self.is_connected) if health_address else None
        self.sessions = 0

    def __repr__(self) -> str:
        return f"<InstanceAgent {self._node.instance_id} sessions={self.sessions}>"

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, on a connection that stands."""
        channel = self._channel
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def run(self) -> None:
        node = self._node
        if await in_thread(node.received.recover):
            node.log.info("patch_recovered")
        async with asyncio.TaskGroup() as tasks:
            if self._spot is not None:
                tasks.create_task(
                    watch_spot(
                        self._spot,
                        node.reporter,
                        interval_seconds=self._spot_interval_seconds,
                        clock=node.clock,
                        log=node.log,
                    )
                )
            tasks.create_task(self._transport.run())
            if self.probes is not None:
                tasks.create_task(self.probes.run(node.log))
            await self._keep_connected()

    async def _keep_connected(self) -> None:
        node = self._node
        await KeepConnected(
            endings=(LinkLost,),
            waits=ConnectionRetries(backoff=node.backoff, spread_seconds=node.spread_seconds),
            lost=self._lost,
            clock=node.clock,
            steady_seconds=STEADY_SECONDS,
        ).run(self._serve)

    async def _serve(self, attempt: ConnectionAttempt) -> None:
        """Serve on the connection that was handed over, or on a new one."""
        line, self._successor = self._successor, None
        self._successor = await self._session(line or await self._line(), attempt)

    def _lost(self, why: Exception, seconds: float) -> None:
        self._transport.learn(str(why))
        self._node.log.warning("server_lost", error=str(why), retry_in_seconds=round(seconds, 2))

    async def _line(self) -> ServerLine:
        """A connection as the identity folder allows it now."""
        # Asked each time: a certificate may have run out, or a new nonce been put there.
        try:
            await self._registrar.enrol()
            credentials = await asyncio.to_thread(self._identity.credentials)
        except CallFailed as error:  # the machine is short of something; it may pass
            raise LinkLost(error.message) from error
        return ServerLine(channel=self._transport.agent_channel(credentials), life=credentials.life)

    async def _session(self, line: ServerLine, attempt: ConnectionAttempt) -> ServerLine | None:
        """Serve on one connection; the one that takes its place, if that is up already."""
        successor: ServerLine | None = None

        async def hand_over() -> None:
            nonlocal successor
            successor = await self._ready_line()

        async with line.channel as channel:
            self.sessions += 1
            self._channel = channel
            try:
                await InstanceSession(channel, self._node, line.life).run(hand_over, attempt.established)
            except BaseException:
                if successor is not None:
                    await successor.channel.close()
                raise
            finally:
                self._channel = None
        return successor

    async def _ready_line(self) -> ServerLine | None:
        line = await self._line()
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await line.channel.channel_ready()
        except BaseException as error:
            await line.channel.close()
            if isinstance(error, TimeoutError):
                self._node.log.warning("hand_over_failed", seconds=HAND_OVER_SECONDS)
                return None
            raise
        return line
