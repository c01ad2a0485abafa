"""The daemon: keeps a session with its server for as long as it lives, and its identity good.

Ties lives together and decides little itself: how long to wait before the next try, and what to do
about a server that does not know our token any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from fleetplane.domains.edge.agent.identity.rotation import Rotator
from fleetplane.domains.edge.agent.server_proof import NotTheServer
from fleetplane.domains.edge.agent.session import DaemonNode, DaemonSession, take_over_identity
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node.connection import SPREAD_SECONDS, ConnectionAttempt, KeepConnected, RetryWait
from fleetplane.node.link import LinkLost, ServerRefused
from fleetplane.node.tasks import in_thread

STEADY_SECONDS: Final = 30.0
"""A session that lasted this long was a good one: the waits begin anew."""
RENEWAL_LOOK_SECONDS: Final = 30.0
"""Between looks at what is due. Clocks jump, files are replaced; looking costs nothing."""
RENEWAL_PAUSE_SECONDS: Final = 60.0
"""After a renewal that failed; a token is renewed long before its end."""


def wait_seconds(waits: tuple[float, ...], failures: int, *, jitter: float) -> float:
    """Before the next try: along the list and then its last entry, between half and the whole of it. Pure."""
    return waits[min(failures, len(waits) - 1)] * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """For tests, which have less time."""

    steady_seconds: float = STEADY_SECONDS
    renewal_look_seconds: float = RENEWAL_LOOK_SECONDS
    renewal_pause_seconds: float = RENEWAL_PAUSE_SECONDS
    wait_scale: float = 1.0


class Daemon:
    """Runs until it is asked to leave; only a state that can never work ends it otherwise."""

    def __init__(
        self,
        node: DaemonNode,
        *,
        connect: Callable[[], grpc.aio.Channel],
        rotator: Rotator,
        pace: Pace | None = None,
    ) -> None:
        self._node = node
        self._connect = connect
        self._rotator = rotator
        self._pace = pace or Pace()
        self.sessions = 0
        self.ended = False

    def __repr__(self) -> str:
        return f"<Daemon {self._node.keyring.current.node_id} sessions={self.sessions}>"

    async def run(self) -> None:
        node = self._node
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(node.work.run())
            renewing = tasks.create_task(self._stay_good())
            await self._stay_connected()
            await node.work.stop(grace_seconds=node.leaving.grace_seconds, reason=node.leaving.reason)
            renewing.cancel()
            working.cancel()
        self.ended = True

    def reload(self) -> None:
        """Read the configuration anew; one that cannot be used leaves the one before in force."""
        try:
            self._node.configuration.load()
        except FleetplaneError as error:
            self._node.log.error("config_not_reloaded", error=error.message)
        else:
            self._node.log.info("config_reloaded")
            self._node.work.look_again()
            self._node.look_again.set()

    # The server.

    async def _stay_connected(self) -> None:
        node = self._node
        await KeepConnected(
            endings=(LinkLost, ServerRefused, NotTheServer),
            waits=self,
            lost=self._lost,
            clock=node.clock,
            steady_seconds=self._pace.steady_seconds,
            leaving=node.leaving.asked,
        ).run(self._serve)

    async def _serve(self, attempt: ConnectionAttempt) -> None:
        why = attempt.after
        if isinstance(why, ServerRefused) and why.code is grpc.StatusCode.UNAUTHENTICATED:
            # Our token ran out while we were away, or a rotation was cut short; the key may still be good.
            await self._mend()
        async with self._connect() as channel:
            self.sessions += 1
            await DaemonSession(channel, self._node, on_established=attempt.established).run()

    def after(
        self,
        why: Exception,  # noqa: ARG002  # however it ended, the configured waits apply
        failures: int,
        *,
        jitter: float,
    ) -> RetryWait:
        """The waits that the configuration names, which may have changed since the last one."""
        waits = self._node.configuration.current.edge.stream_reconnect_backoff_secs
        seconds = wait_seconds(waits, failures, jitter=jitter)
        if failures == 0:  # many daemons may have lost the same server
            seconds += SPREAD_SECONDS * jitter
        seconds *= self._pace.wait_scale
        return RetryWait(seconds=seconds, failures=failures + 1)

    def _lost(self, why: Exception, seconds: float) -> None:
        reason = why.reason if isinstance(why, FleetplaneError) else ""
        self._node.log.warning(
            "session_ended", error=str(why), reason=reason, retry_in_seconds=round(seconds, 2)
        )

    async def _mend(self) -> None:
        if await take_over_identity(self._node):
            return  # that may be all it takes
        try:
            await self._rotator.recover()
            await self._rotator.refresh()
        except (FleetplaneError, OSError) as error:
            self._node.log.warning("token_not_renewed", error=str(error))
        else:
            self._node.log.info("token_renewed")

    # Our identity.

    async def _stay_good(self) -> None:
        node = self._node
        while True:
            pause = self._pace.renewal_look_seconds
            try:
                if await in_thread(self._rotation_due):
                    await self._rotator.rotate()
                elif self._renewal_due():
                    await self._rotator.refresh()
                    node.log.info("token_renewed")
            except (FleetplaneError, OSError) as error:
                node.log.warning("renewal_failed", error=str(error))
                pause = self._pace.renewal_pause_seconds
            await node.clock.sleep(pause * (0.8 + 0.4 * node.clock.random()))

    def _renewal_due(self) -> bool:
        due = self._node.keyring.current.renew_at()
        return due is not None and self._node.clock.now_ns() / 1e9 >= due

    def _rotation_due(self) -> bool:
        every = self._node.configuration.current.edge.rotate_key_every_secs
        with suppress(OSError):
            age = self._node.clock.now_ns() / 1e9 - self._node.folder.key.stat().st_mtime
            return every > 0 and age >= every
        return False
