"""The agent of one NGINX: keeps it served whether or not there is a server, and talks while there is.

Ties lives together and decides little itself. NGINX's life does not depend on the connection's:
a change goes on when the line breaks, and its outcome is told on the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import grpc.aio
import structlog

from fleetplane.domains.proxies.agent.applier import Applier, Outcome
from fleetplane.domains.proxies.agent.commands import Commander
from fleetplane.domains.proxies.agent.credential import Credential, CredentialFile
from fleetplane.domains.proxies.agent.health import Change
from fleetplane.domains.proxies.agent.journal import State, Status
from fleetplane.domains.proxies.agent.link import LinkLost, Refused, Superseded
from fleetplane.domains.proxies.agent.observer import Observer
from fleetplane.domains.proxies.agent.outbox import Outbox, Payload
from fleetplane.domains.proxies.agent.prober import Prober
from fleetplane.domains.proxies.agent.releases import Releases
from fleetplane.domains.proxies.agent.session import Node, Session
from fleetplane.domains.proxies.agent.tail import Tail
from fleetplane.domains.proxies.agent.updates import Updates
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock

STEADY_SECONDS: Final = 10.0
"""A session that lasted this long was well; the next failure starts from the shortest wait."""

CONTENTION_FAILURES: Final = 5
"""Two agents with one token would take the stream from each other without end; this slows both down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    backoff: Backoff = field(default_factory=lambda: Backoff(first_seconds=1.0, ceiling_seconds=20.0))
    refused_seconds: float = 300.0
    """Before a server that does not want us is asked again."""
    supervise_seconds: float = 1.0
    drift_seconds: float = 30.0
    rotate_seconds: float = 10.0
    """Between looks at how long the logs are."""


class Bulletin:
    """News of the agent's, put where the server will hear of them."""

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock

    def event(self, event_type: str, **data: str) -> None:
        identity = self._clock.token_bytes(16).hex()
        at_ms = self._clock.now_ns() // 1_000_000
        self._outbox.put(pb.Event(event_id=identity, event_type=event_type, timestamp=at_ms, data=data))

    def status(self, status: Status) -> None:
        self._outbox.put(to_wire(status))

    def server_changed(self, change: Change) -> None:
        word = "upstream.server_up" if change.up else "upstream.server_down"
        self.event(word, upstream=change.upstream, server=change.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    applier: Applier
    releases: Releases
    prober: Prober
    observer: Observer
    commander: Commander
    updates: Updates
    outbox: Outbox
    bulletin: Bulletin
    tails: tuple[Tail, ...]
    wake: asyncio.Event
    """Health is to be reported now."""


class ProxyAgent:
    """Runs until cancelled."""

    def __init__(
        self,
        *,
        parts: Parts,
        node: Node,
        credential: CredentialFile,
        token: str,
        connect: Callable[[], grpc.aio.Channel],
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        policy: AgentPolicy | None = None,
    ) -> None:
        self._parts = parts
        self._node = node
        self._file = credential
        self._token = token
        self._connect = connect
        self._clock = clock
        self._log = log
        self._policy = policy or AgentPolicy()
        self.sessions = 0
        self._credential: Credential | None = None
        """As it is on disk."""

    def __repr__(self) -> str:
        return f"<ProxyAgent sessions={self.sessions} {self._parts.applier!r}>"

    async def run(self) -> NoReturn:
        credential = self._file.load(self._token)
        self._credential = credential if credential.agent_id else None
        parts = self._parts
        await parts.applier.open()
        if (last := parts.applier.last_status) is not None:
            parts.bulletin.status(last)
        parts.bulletin.event("agent.started")
        async with asyncio.TaskGroup() as tasks:
            parts.outbox.on_receipt = lambda payload: _settle(tasks, parts.applier, payload)
            tasks.create_task(self._serve_updates())
            tasks.create_task(self._supervise())
            tasks.create_task(self._watch_drift())
            tasks.create_task(self._rotate_logs())
            tasks.create_task(parts.prober.run())
            tasks.create_task(parts.commander.run())
            await self._stay_connected(credential)

    # NGINX.

    async def _serve_updates(self) -> NoReturn:
        parts = self._parts
        while True:
            update = await parts.updates.next()
            try:
                outcome = await parts.applier.apply(update, self._told)
            except OSError as error:  # a full disk, most likely
                outcome = Outcome(state=State.FAILED, error=str(error))
                self._log.error("change_broke_off", version=update.version, error=str(error))
                await self._recover(update, outcome)
            self._log.info(
                "version_dealt_with", version=update.version, state=outcome.state, error=outcome.error
            )
            parts.prober.renew()
            parts.wake.set()

    async def _recover(self, update: pb.ConfigUpdate, outcome: Outcome) -> None:
        """Do what a new agent would do: take the journal's word for where we are, and go on from there."""
        failed = Status(
            config_id=update.config_id, version=update.version, state=outcome.state, error=outcome.error
        )
        self._parts.bulletin.status(failed)
        attempt = 0
        while True:
            try:
                await self._parts.applier.open()
                break
            except OSError as error:
                self._log.error("recovery_failed", error=str(error))
                delay = self._policy.backoff.delay_seconds(attempt, jitter=self._clock.random())
                attempt += 1
                await self._clock.sleep(delay)
        if (last := self._parts.applier.last_status) is not None:
            self._parts.bulletin.status(last)

    async def _told(self, status: Status) -> None:
        self._parts.bulletin.status(status)

    async def _supervise(self) -> NoReturn:
        """Start our NGINX again when it dies; later and later if it will not stay."""
        failures = 0
        while True:
            await self._clock.sleep(self._policy.supervise_seconds)
            outcome = await self._parts.applier.revive()
            if outcome is None:
                failures = 0
                continue
            revived = outcome.state is State.SUCCESS
            self._parts.bulletin.event("nginx.crashed")
            self._parts.bulletin.event("nginx.started" if revived else "nginx.stopped", error=outcome.error)
            self._parts.wake.set()
            if not revived:
                failures += 1
                await self._clock.sleep(
                    self._policy.backoff.delay_seconds(failures, jitter=self._clock.random())
                )

    async def _watch_drift(self) -> NoReturn:
        parts = self._parts
        while True:
            await self._clock.sleep(self._policy.drift_seconds)
            live = parts.applier.live
            drifted = live is not None and await asyncio.to_thread(parts.releases.drifted, live)
            if drifted and not parts.observer.drifted and live is parts.applier.live:
                parts.bulletin.event("config.drift", release=live.name if live is not None else "")
                parts.wake.set()
            parts.observer.drifted = drifted

    async def _rotate_logs(self) -> NoReturn:
        while True:
            await self._clock.sleep(self._policy.rotate_seconds)
            for tail in self._parts.tails:
                try:
                    if tail.due:
                        await self._parts.applier.reopen_logs(tail.rotate)
                    await asyncio.to_thread(tail.retire)
                except OSError as error:
                    self._log.warning("log_not_rotated", log=repr(tail), error=str(error))

    # The server.

    async def _stay_connected(self, credential: Credential) -> NoReturn:
        failures = 0
        while True:
            began = self._clock.monotonic()
            async with self._connect() as channel:
                session = Session(channel, self._node, credential, registered=self._registered)
                try:
                    await session.run()
                except Refused as error:
                    delay = self._policy.refused_seconds * (0.9 + 0.2 * self._clock.random())
                    failures = 0
                    self._log.error("server_refuses", error=error.message, retry_in_seconds=round(delay, 2))
                except LinkLost as error:
                    lasted = self._clock.monotonic() - began
                    failures = 0 if session.established and lasted > STEADY_SECONDS else failures
                    if isinstance(error, Superseded):
                        failures = max(failures, CONTENTION_FAILURES)
                    delay = self._policy.backoff.delay_seconds(failures, jitter=self._clock.random())
                    failures += 1
                    self._log.warning("link_lost", error=error.message, retry_in_seconds=round(delay, 2))
            credential = self._credential or credential
            await self._clock.sleep(delay)

    def _registered(self, credential: Credential) -> None:
        """The server knows us now, and by which id."""
        self.sessions += 1
        self._log.info("registered", agent=credential.agent_id)
        if credential != self._credential:
            self._file.store(credential)
            self._credential = credential


def _settle(tasks: asyncio.TaskGroup, applier: Applier, payload: Payload) -> None:
    """The server has the last word about a version: it need not be kept for the next agent."""
    last = applier.last_status
    if isinstance(payload, pb.ConfigStatus) and last is not None and to_wire(last) == payload:
        tasks.create_task(applier.forget_status(last))


def to_wire(status: Status) -> pb.ConfigStatus:
    return pb.ConfigStatus(
        config_id=status.config_id,
        version=status.version,
        status=status.state.value,
        error_message=status.error,
        applied_at=status.applied_at_ms,
    )
