"""What TLS listeners present and whom they trust, kept in step with the authority.

A listener's certificate and trust are made when it opens. They are made anew when the authority
takes a step, and once in a while, so that a server that runs for years does not end up with a
certificate that has run out. Calls that are open under an authority that was retired are ended
at once; everything else that is open goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

import structlog

from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import Authority, peer_identity
from fleetplane.rpc import Connection, GrpcApp, Listener, ListenerSpec

log = structlog.get_logger(__name__)

RENEW_SECONDS = 30 * 86_400.0
"""A listener's certificate lives for 397 days."""
RETRY = Backoff(first_seconds=1.0, ceiling_seconds=60.0)


class Presenting:
    def __init__(
        self,
        authority: Authority,
        specs: Callable[[], Iterable[ListenerSpec]],
        apps: Iterable[GrpcApp],
        clock: Clock,
    ) -> None:
        """`specs` says how every listener would be opened now.

        To be made before the listeners are: a step that the authority takes while they open counts, too.
        """
        self._authority = authority
        self._listeners: dict[str, Listener] = {}
        self._specs = specs
        self._apps = tuple(apps)
        self._clock = clock
        self._stepped = asyncio.Event()
        authority.subscribe(self._on_step)

    def __repr__(self) -> str:
        return f"<Presenting {', '.join(self._listeners)}>"

    def opened(self, listeners: Iterable[Listener]) -> None:
        """These are open, before `run`."""
        self._listeners = {listener.name: listener for listener in listeners}

    def _on_step(self) -> None:
        for app in self._apps:
            app.end_calls_where(self._refused)
        self._stepped.set()

    def _refused(self, connection: Connection) -> bool:
        shown = connection.certificates
        return bool(shown) and not self._authority.accepts(peer_identity(shown).issuer_key_id)

    async def run(self) -> NoReturn:
        """Renew listeners when there is a reason to, until cancelled."""
        failures = 0
        while True:
            wait = (
                RETRY.delay_seconds(failures - 1, jitter=self._clock.random()) if failures else RENEW_SECONDS
            )
            await self._step_or(wait)
            self._stepped.clear()
            try:
                await self._renew()
                failures = 0
            except (OSError, SettingsError) as error:
                failures += 1
                log.error("listener.not_renewed", error=str(error))

    async def _step_or(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            waits = [
                tasks.create_task(self._stepped.wait()),
                tasks.create_task(self._clock.sleep(seconds)),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _renew(self) -> None:
        for spec in self._specs():
            if spec.tls is not None and spec.name in self._listeners:
                await self._listeners[spec.name].renew(spec.tls)
