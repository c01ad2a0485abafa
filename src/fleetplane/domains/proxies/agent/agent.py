"""The agent of one NGINX: keeps it serving without a server, and reports while connected.

Ties lives together and decides little itself. NGINX's life does not depend on the connection's:
a change goes on when the line breaks, and its outcome is told on the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import grpc.aio
import msgspec
import structlog

from fleetplane.domains.proxies.agent.commands import CommandHandler
from fleetplane.domains.proxies.agent.enrolment import (
    Credential,
    CredentialFile,
    ProxyEnroller,
    TokenSuperseded,
)
from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState, VersionStatus
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersions
from fleetplane.domains.proxies.agent.observer import Observer
from fleetplane.domains.proxies.agent.observing.takeover import HELD, Takeover
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox, Updates
from fleetplane.domains.proxies.agent.prober import UpstreamChange, UpstreamProber
from fleetplane.domains.proxies.agent.session import ProxyNode, ProxySession
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.node.connection import (
    SPREAD_SECONDS,
    ConnectionAttempt,
    ConnectionRetries,
    KeepConnected,
    RetryWait,
)
from fleetplane.node.link import LinkLost, ServerRefused
from fleetplane.node.logs.tail import FileTail

STEADY_SECONDS: Final = 10.0
"""A session that lasted this long was well; the next failure starts from the shortest wait."""

DOUBT_FAILURES: Final = 3
"""After so many in a row the certificate may be the reason: its authority retired, or its time over."""
RENEWAL_CHECK_SECONDS: Final = 3600.0
"""Certificates live for weeks."""
CONTENTION_FAILURES: Final = 5
"""Two agents with one token would take the stream from each other without end; this slows both down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAgentPolicy:
    backoff: Backoff = field(default_factory=lambda: Backoff(first_seconds=1.0, ceiling_seconds=20.0))
    spread_seconds: float = SPREAD_SECONDS
    """How much longer the wait after a session that lasted may be."""
    refused_seconds: float = 300.0
    """Before a server that does not want us is asked again."""
    supervise_seconds: float = 1.0
    drift_seconds: float = 30.0
    repair_drift: bool = False
    """Whether files that somebody changed by hand are written anew; else it is only told."""
    rotate_seconds: float = 10.0
    """Between looks at how long the logs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyWaits:
    """Before the next session: long after a refusal, never short while another takes our stream."""

    policy: ProxyAgentPolicy
    has_certificate: Callable[[], bool]

    def after(self, why: Exception, failures: int, *, jitter: float) -> RetryWait:
        if isinstance(why, ServerRefused):
            return RetryWait(
                seconds=self.policy.refused_seconds * (0.9 + 0.2 * jitter),
                failures=DOUBT_FAILURES if self.has_certificate() else 0,
            )
        if isinstance(why, TokenSuperseded):
            failures = max(failures, CONTENTION_FAILURES)
        retries = ConnectionRetries(backoff=self.policy.backoff, spread_seconds=self.policy.spread_seconds)
        return retries.after(why, failures, jitter=jitter)


class Bulletin:
    """News of the agent's, put where the server will hear of them."""

    def __init__(self, outbox: ProxyOutbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock

    def event(self, event_type: str, **data: str) -> None:
        identity = self._clock.token_bytes(16).hex()
        at_ms = self._clock.now_ns() // 1_000_000
        self._outbox.add(pb.Event(event_id=identity, event_type=event_type, timestamp=at_ms, data=data))

    def status(self, status: VersionStatus) -> None:
        self._outbox.add(to_wire(status))

    def server_changed(self, change: UpstreamChange) -> None:
        word = "upstream.server_up" if change.up else "upstream.server_down"
        self.event(word, upstream=change.upstream, server=change.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAgentParts:
    applier: VersionApplier
    releases: StagedVersions
    prober: UpstreamProber
    observer: Observer
    commander: CommandHandler
    updates: Updates
    outbox: ProxyOutbox
    bulletin: Bulletin
    tails: tuple[FileTail, ...]
    wake: asyncio.Event
    """Health is to be reported now."""
    takeover: Takeover | None = None
    """There where the agent was started beside an NGINX which is not its own."""


class ProxyAgent:
    """Runs until cancelled."""

    def __init__(
        self,
        *,
        parts: ProxyAgentParts,
        node: ProxyNode,
        credential: CredentialFile,
        token: str,
        connect: Callable[[Credential], grpc.aio.Channel],
        enroller: ProxyEnroller | None,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        policy: ProxyAgentPolicy | None = None,
    ) -> None:
        self._parts = parts
        self._node = node
        self._file = credential
        self._token = token
        self._connect = connect
        self._enroller = enroller
        self._clock = clock
        self._log = log
        self._policy = policy or ProxyAgentPolicy()
        self.sessions = 0
        self._credential: Credential | None = None
        """As it is on disk."""
        self._shown = Credential()
        """What the server is shown."""

    def __repr__(self) -> str:
        return f"<ProxyAgent sessions={self.sessions} {self._parts.applier!r}>"

    async def run(self) -> None:
        self._shown = self._file.load(self._token)
        self._credential = self._shown if self._shown.agent_id else None
        parts, takeover = self._parts, self._parts.takeover
        if takeover is not None:
            takeover.open()
        await parts.applier.open()
        if takeover is not None:
            await takeover.recover()
        if (last := parts.applier.last_status) is not None:
            parts.bulletin.status(last)
        parts.bulletin.event("agent.started")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_receipts())
            tasks.create_task(self._serve_updates())
            tasks.create_task(self._supervise())
            tasks.create_task(self._watch_drift())
            tasks.create_task(self._rotate_logs())
            tasks.create_task(self._renew_in_time())
            tasks.create_task(parts.prober.run())
            if takeover is not None:
                tasks.create_task(takeover.run())
            tasks.create_task(parts.commander.run())
            await self._stay_connected()

    async def _take_receipts(self) -> NoReturn:
        """Once the server has the last word about a version, it need not be kept for the next agent."""
        applier = self._parts.applier
        while True:
            payload = await self._parts.outbox.receipts.get()
            last = applier.last_status
            if isinstance(payload, pb.ConfigStatus) and last is not None and to_wire(last) == payload:
                await applier.forget_status(last)

    # NGINX.

    async def _serve_updates(self) -> NoReturn:
        parts = self._parts
        while True:
            update = await parts.updates.next()
            try:
                outcome = await self._bring(update)
            except OSError as error:  # a full disk, most likely
                outcome = ApplyOutcome(state=VersionState.FAILED, error=str(error))
                self._log.error("change_broke_off", version=update.version, error=str(error))
                await self._recover(update, outcome)
            self._log.info(
                "version_dealt_with", version=update.version, state=outcome.state, error=outcome.error
            )
            parts.prober.renew()
            parts.wake.set()

    async def _bring(self, update: pb.ConfigUpdate) -> ApplyOutcome:
        takeover = self._parts.takeover
        if takeover is None or takeover.is_ours:
            return await self._parts.applier.apply(update, self._told)
        if takeover.expects:
            outcome = await takeover.apply(update, self._told)
        else:
            outcome = ApplyOutcome(state=VersionState.FAILED, error=HELD)
        status = VersionStatus(
            config_id=update.config_id,
            version=update.version,
            state=outcome.state,
            error=outcome.error,
            applied_at_ms=self._clock.now_ns() // 1_000_000 if outcome.state is VersionState.SUCCESS else 0,
        )
        await self._told(status)
        return outcome

    async def _recover(self, update: pb.ConfigUpdate, outcome: ApplyOutcome) -> None:
        """Do what a new agent would do: take the journal's word for where we are, and go on from there."""
        failed = VersionStatus(
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

    async def _told(self, status: VersionStatus) -> None:
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
            revived = outcome.state is VersionState.SUCCESS
            if failures == 0:  # it died once, however often it cannot be started after that
                self._parts.bulletin.event("nginx.crashed")
            if revived or failures == 0:
                told = "nginx.started" if revived else "nginx.stopped"
                self._parts.bulletin.event(told, error=outcome.error)
            if revived:
                failures = 0
            if (last := self._parts.applier.last_status) is not None:
                self._parts.bulletin.status(last)
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
            if live is not parts.applier.live:
                continue  # its files go with it; what is in service by now is looked at the next time
            if drifted and not parts.observer.drifted:
                parts.bulletin.event("config.drift", release=live.name if live is not None else "")
                parts.wake.set()
            parts.observer.drifted = drifted
            if drifted and self._policy.repair_drift:
                await self._repair_drift()

    async def _repair_drift(self) -> None:
        """A repair that fails is tried again at the next look; until then the alert stays."""
        try:
            outcome = await self._parts.applier.repair()
        except OSError as error:
            outcome = ApplyOutcome(state=VersionState.FAILED, error=str(error))
            await self._parts.applier.open()
        if outcome.state is not VersionState.SUCCESS:
            self._log.error("drift_not_repaired", error=outcome.error)
            return
        live = self._parts.applier.live
        self._parts.bulletin.event("config.repaired", release=live.name if live is not None else "")
        self._parts.observer.drifted = False
        self._parts.wake.set()

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

    async def _stay_connected(self) -> None:
        await KeepConnected(
            endings=(ServerRefused, LinkLost),
            waits=ProxyWaits(policy=self._policy, has_certificate=lambda: bool(self._shown.certificate_pem)),
            lost=self._lost,
            clock=self._clock,
            steady_seconds=STEADY_SECONDS,
        ).run(self._serve)

    async def _serve(self, attempt: ConnectionAttempt) -> None:
        self._shown = self._credential or self._shown
        if self._enroller is not None:
            doubted = attempt.failures >= DOUBT_FAILURES
            self._shown = await self._enroller.ready(self._shown, doubted=doubted)
            self._credential = self._shown if self._shown.agent_id else None

        def registered(credential: Credential) -> None:
            attempt.established()
            self._registered(credential)

        async with self._connect(self._shown) as channel:
            await ProxySession(channel, self._node, self._shown, registered=registered).run()

    def _lost(self, why: Exception, seconds: float) -> None:
        pause = round(seconds, 2)
        if isinstance(why, ServerRefused):
            self._log.error("server_refuses", error=why.message, retry_in_seconds=pause)
        else:
            self._log.warning("link_lost", error=str(why), retry_in_seconds=pause)

    async def _renew_in_time(self) -> NoReturn:
        """A stream may last longer than the certificate that it began with; the next one needs a new one."""
        while True:
            await self._clock.sleep(RENEWAL_CHECK_SECONDS)
            if self._enroller is not None and self._credential is not None:
                held = self._credential
                renewed = await self._enroller.ready(held)
                if renewed is not held:  # else whoever connects may have a newer one by now
                    self._credential = renewed

    def _registered(self, credential: Credential) -> None:
        """The server knows us now, and by which id. A certificate that was renewed meanwhile is kept."""
        self.sessions += 1
        self._log.info("registered", agent=credential.agent_id)
        held = msgspec.structs.replace(self._credential or credential, agent_id=credential.agent_id)
        if held != self._credential:
            self._file.store(held)
            self._credential = held


def to_wire(status: VersionStatus) -> pb.ConfigStatus:
    return pb.ConfigStatus(
        config_id=status.config_id,
        version=status.version,
        status=status.state.value,
        error_message=status.error,
        applied_at=status.applied_at_ms,
        set_aside=status.set_aside,
    )
