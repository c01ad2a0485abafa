"""What of a server faces its clients: applications, listeners, and who watches over both.

The same on leader and follower; which calls each of them answers is decided by the gate before them
(`read_gate.py`).

A listener's certificate and trust are made when it opens (`Presenting`). They are made anew when the
authority takes a step, and once in a while, so that a server that runs for years does not end up with a
certificate that has run out. Calls that are open under an authority that was retired are ended
at once; everything else that is open goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import structlog
from prometheus_client import CollectorRegistry

from fleetplane import __version__
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import Authority, peer_identity
from fleetplane.kernel.stalls import Watchdog
from fleetplane.rpc import Connection, GrpcApp, Listener, ListenerSpec, open_listener
from fleetplane.rpc.introspection import HealthBoard
from fleetplane.rpc.listening.sockets import connections_of
from fleetplane.rpc.listening.warden import ConnectionLimiter, ConnectionLimiterCollector
from fleetplane.server import endpoints
from fleetplane.server.grpc_apps import compose, cut_off
from fleetplane.server.read_gate import ReadGate
from fleetplane.settings import Settings
from fleetplane.web.metrics_page import MetricsPage
from fleetplane.web.ops import OpsApp, OwnerSocket

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


WEB = "web"
OWNER = "operator/local"
"""The name of the owner's principal at REST routes, in audit entries and revocations."""


class Front:
    """To be made when all domains are prepared, and opened once."""

    def __init__(
        self,
        settings: Settings,
        kernel: Kernel,
        blueprints: Sequence[Blueprint],
        domains: Sequence[Domain],
        registry: CollectorRegistry,
        *,
        gate: ReadGate | None,
        watchdog: Watchdog,
    ) -> None:
        self._settings = settings
        self._authority = kernel.authority
        self._domains = domains
        self._watchdog = watchdog
        page = MetricsPage(
            registry,
            token=settings.metrics.token,
            needs_token=endpoints.is_web_remote(settings),
            clock=kernel.clock,
        )
        self.ops = OpsApp(registry, version=__version__, metrics=page)
        mounts = (mount for domain in domains for mount in domain.routes)
        self.ops.mount(mounts if gate is None else map(gate.mount, mounts))
        self.health = HealthBoard()
        self.apps = compose(blueprints, domains, kernel.calls, kernel.clock, self.health, gate)
        kernel.revocations.subscribe(lambda revoked: cut_off(self.apps.values(), revoked))
        roles = {role for blueprint in blueprints for role in blueprint.operator_roles}
        self._owner = OwnerSocket(
            self.apps[endpoints.ADMIN],
            self.ops,
            token=kernel.operators.in_process(Principal(name=OWNER, roles=frozenset(roles))),
        )
        self.presenting = Presenting(kernel.authority, self._specs, self.apps.values(), kernel.clock)
        self.listeners: list[Listener] = []
        self.warden = ConnectionLimiter()
        registry.register(ConnectionLimiterCollector(self.warden))

    def __repr__(self) -> str:
        return f"<Front {', '.join(one.name for one in self.listeners)}>"

    @property
    def addresses(self) -> dict[str, list[str]]:
        return {listener.name: listener.addresses for listener in self.listeners}

    def _specs(self) -> list[ListenerSpec]:
        """How every listener is opened, with certificates made now."""
        settings = self._settings
        grpc = endpoints.grpc(settings, self.apps, self._domains, self._authority, owner=self._owner)
        web = endpoints.web(settings, self.ops, self._authority)
        found = (endpoints.within_budget(settings, spec) for spec in (web, *grpc))
        return [replace(spec, watchdog=self._watchdog) for spec in found]

    async def open(
        self, stack: contextlib.AsyncExitStack, *, grace_seconds: float, stands_by: bool = False
    ) -> None:
        """Open every listener that is not open yet until the stack ends, or raise.

        A server that `stands_by` opens those on which every server answers something. It must open the web
        listener alone: another process may have the other addresses, until it is this server's turn.
        """
        specs = self._specs()
        connections = connections_of([spec.connections for spec in specs])
        known = {listener.name for listener in self.listeners}
        for spec, number in zip(specs, connections, strict=True):
            if spec.name in known or (stands_by and not self._is_served_anywhere(spec.name)):
                continue
            opening = open_listener(replace(spec, connections=number), grace_seconds=grace_seconds)
            try:
                self.listeners.append(await stack.enter_async_context(opening))
            except SettingsError as error:
                if not stands_by or spec.name == WEB:
                    raise
                log.warning("standby.listener_not_opened", listener=spec.name, error=error.message)
                continue
            self.warden.tend(self.listeners[-1].tend(), self.listeners[-1].door)
        self.presenting.opened(self.listeners)

    def _is_served_anywhere(self, listener: str) -> bool:
        return listener == WEB or self.apps[listener].is_served_anywhere

    def stop_accepting(self) -> None:
        for listener in self.listeners:
            listener.stop_accepting()

    async def drain(self, grace_seconds: float) -> None:
        """End calls, each in the way that its protocol calls clean."""
        async with asyncio.TaskGroup() as draining:
            for app in self.apps.values():
                draining.create_task(app.drain(grace_seconds))
