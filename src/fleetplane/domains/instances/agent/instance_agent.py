"""The agent on an instance: enrols, then keeps a session with the server for as long as it lives.

Ties lives together and decides nothing itself: who we are is settled in `registration`, what
happens on a connection in `session`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import grpc
import grpc.aio

from fleetplane.domains.instances.agent.identity_folder import Credentials, IdentityFolder
from fleetplane.domains.instances.agent.link import LinkLost
from fleetplane.domains.instances.agent.registration import Registrar
from fleetplane.domains.instances.agent.reporter import watch_spot
from fleetplane.domains.instances.agent.session import STEADY_SECONDS, Node, Session, to_the_end
from fleetplane.domains.instances.agent.spot import SpotSource


class InstanceAgent:
    """Runs until cancelled; only an identity that can never work ends it otherwise."""

    def __init__(
        self,
        *,
        identity: IdentityFolder,
        registrar: Registrar,
        connect: Callable[[Credentials], grpc.aio.Channel],
        node: Node,
        spot: SpotSource | None,
        spot_interval_seconds: float,
    ) -> None:
        self._identity = identity
        self._registrar = registrar
        self._connect = connect
        self._node = node
        self._spot = spot
        self._spot_interval_seconds = spot_interval_seconds
        self.sessions = 0

    def __repr__(self) -> str:
        return f"<InstanceAgent {self._node.instance_id} sessions={self.sessions}>"

    async def run(self) -> None:
        node = self._node
        if await to_the_end(node.received.recover):
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
            await self._keep_connected()

    async def _keep_connected(self) -> NoReturn:
        """Sessions, one after another; the waits between them grow until one lasts."""
        node = self._node
        failures = 0
        while True:
            # Asked each time: a certificate may have run out, or a new nonce been put there.
            await self._registrar.enrol()
            credentials = await asyncio.to_thread(self._identity.credentials)
            began = node.clock.monotonic()
            delay = 0.0
            try:
                await self._session(credentials)
            except* LinkLost as lost:
                failures = 1 if node.clock.monotonic() - began > STEADY_SECONDS else failures + 1
                delay = node.backoff.delay_seconds(failures - 1, jitter=node.clock.random())
                node.log.warning("server_lost", error=_first(lost), retry_in_seconds=round(delay, 2))
            await node.clock.sleep(delay)

    async def _session(self, credentials: Credentials) -> None:
        async with self._connect(credentials) as channel:
            self.sessions += 1
            await Session(channel, self._node, credentials.life).run()


def _first(group: BaseExceptionGroup[LinkLost]) -> str:
    """One cause in words. The others are that one seen from other streams."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
