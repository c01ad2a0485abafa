"""Keeping the server informed, and the identity fresh. Without the server everything else goes on.

Two things run side by side: one writes a report at every heartbeat, whether or not anyone takes it; the
other registers when something has changed, renews the certificate when a third of its life is left, and
delivers reports in order. When nothing was heard from the server for long enough, pins that are configured
for that are made safe, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
import structlog

from fleetplane.domains.boards.agent import registration as link
from fleetplane.domains.boards.agent.desired.keeper import DesiredKeeper
from fleetplane.domains.boards.agent.gpio.chip import HardwareFault
from fleetplane.domains.boards.agent.health import CheckStatus
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder, Membership
from fleetplane.domains.boards.agent.registration import BoardRegistrar, BoardSelf
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.domains.boards.agent.wire import messages as wire_messages
from fleetplane.domains.boards.agent.wire import metrics as wire_metrics
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.node.certificates import ConnectionCredentials
from fleetplane.node.connection import (
    SPREAD_SECONDS,
    ConnectionAttempt,
    ConnectionRetries,
    Follow,
    KeepConnected,
    no_check_in,
    no_metadata,
)
from fleetplane.node.outbox import Outbox
from fleetplane.node.tasks import beside

RETRY: Final = Backoff(first_seconds=1.0, ceiling_seconds=60.0)
REFUSED_RETRY: Final = Backoff(first_seconds=30.0, ceiling_seconds=600.0)
"""After an answer that will hardly be another next time: someone has to do something first."""
RENEW_AGAIN_SECONDS: Final = 60.0
GOODBYE_SECONDS: Final = 2.0
REPORTS_LIMIT: Final = 120
"""While the server is away: an hour of them, some 2 KB each."""


def seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, kw_only=True)
class BoardReporter:
    node: BoardAgentState
    folder: BoardIdentityFolder
    membership: Membership
    describe: Callable[[], Awaitable[BoardSelf]]
    """What the node would say of itself now."""
    identity_changed: Callable[[], Awaitable[None]]
    """There is a new certificate on disk, or another authority."""
    revocations_came: Callable[[bytes], Awaitable[bool]]
    """The server sent a list of revocations; whether it was taken up."""
    revocation_list: Callable[[], int]
    """The number of the list that holds here."""
    keeper: DesiredKeeper
    """Runs and drives what the server wants here."""
    log: structlog.typing.FilteringBoundLogger
    loss_after_seconds: float
    check_in: Follow = no_check_in
    """Says which version this is, over each connection."""
    since_boot: Callable[[], float] = seconds_since_boot
    retry: Backoff = RETRY
    refused_retry: Backoff = REFUSED_RETRY
    spread_seconds: float = SPREAD_SECONDS
    """How much longer the wait after a good connection may be."""
    outbox: Outbox[int, pb.HealthReport] = field(default_factory=lambda: Outbox(limit=REPORTS_LIMIT))
    """By their sequence numbers."""
    _sequence: int = 0
    _heard_at: float = field(init=False)
    _lost: bool = False
    _unsafe: bool = False
    """The server is lost, and pins are still to be made safe for that."""
    _renewed_at: float | None = None
    _attempt: ConnectionAttempt | None = None
    _unpresented: bool = False
    """There is an identity on disk of which `identity_changed` has not been told with success."""
    _registered: bool = False
    """In this run: a server brings pins back to what they should be when an agent registers."""

    def __post_init__(self) -> None:
        self._heard_at = self.node.clock.monotonic()

    async def run(self) -> None:
        """Report until cancelled; then tell the server that this node leaves."""
        self.keeper.on_news(self._tell)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="boards/reports")
                tasks.create_task(self._watch(), name="boards/contact")
                tasks.create_task(self._deliver(), name="boards/delivery")
        finally:
            await self._say_goodbye()

    # Writing.

    async def _write(self) -> None:
        await self.node.sampler.first()
        while True:
            self._keep(self.report())
            await self.node.clock.sleep(self.membership.heartbeat_seconds)

    def _tell(self) -> None:
        """Report at once: something about what is kept running is news."""
        if self.node.sampler.latest is not None:
            self._keep(self.report())

    def _keep(self, report: pb.HealthReport) -> None:
        self.outbox.put(report.sequence, report)

    def report(self, status: pi.NodeStatus | None = None) -> pb.HealthReport:
        node, now_ns = self.node, self.node.clock.now_ns()
        health, snapshot = node.health(), node.sampler.latest
        if status is None:
            status = pi.NODE_STATUS_NOT_READY if health.status is CheckStatus.FAILED else pi.NODE_STATUS_READY
        report = pb.HealthReport(
            name=self.membership.name,
            status_text=health.status,
            source="agent",
            status=status,
            timestamp=timestamp(now_ns),
            version=node.version,
            uptime=wire_messages.uptime(node.uptime_seconds),
            checks=wire_messages.health_checks(health, now_ns=now_ns),
            sequence=self._next_sequence(),
            revocation_list=self.revocation_list(),
            applied=self.keeper.applied(),
        )
        if snapshot is not None:
            report.metrics.CopyFrom(wire_metrics.flat(snapshot, detail=True))
            report.boot_id = snapshot.board.boot_id
            report.os_version = snapshot.board.os_version
            report.kernel_version = snapshot.board.kernel_version
        return report

    def _next_sequence(self) -> int:
        """Grows while the machine is up, over restarts of the agent too: it follows the time since boot."""
        self._sequence = max(self._sequence + 1, int(self.since_boot() * 1000))
        return self._sequence

    # Watching over the contact.

    async def _watch(self) -> None:
        while True:
            silent = self.node.clock.monotonic() - self._heard_at
            if silent < self.loss_after_seconds:
                await self.node.clock.sleep(self.loss_after_seconds - silent)
                continue
            if not self._lost:
                self._lost = self._unsafe = True
                self.log.warning("server.lost", seconds=round(silent), waiting=len(self.outbox))
            if self._unsafe:
                with contextlib.suppress(HardwareFault):  # silent or overloaded: tried again below
                    await self.node.pins.control_lost()
                    self._unsafe = False
            await self.node.clock.sleep(min(1.0, self.loss_after_seconds))

    def _heard(self) -> None:
        if self._attempt is not None:
            self._attempt.established()
        self._heard_at = self.node.clock.monotonic()
        if self._lost:
            self._lost = self._unsafe = False
            self.log.info("server.found", waiting=len(self.outbox))
            self.keeper.drive_again()  # what was made safe meanwhile

    # Delivering.

    async def _deliver(self) -> None:
        """The waits begin anew after a connection on which the server answered."""
        await KeepConnected(
            endings=(FleetplaneError,),
            waits=ConnectionRetries(
                backoff=self.retry, refused=self.refused_retry, spread_seconds=self.spread_seconds
            ),
            lost=self._not_delivered,
            clock=self.node.clock,
        ).run(self._connected)

    def _not_delivered(self, why: Exception, seconds: float) -> None:
        pause = round(seconds, 2)
        if isinstance(why, link.RefusedByServer):
            self.log.error("server.refuses", error=str(why), retry_in_seconds=pause)
        else:
            waiting = len(self.outbox)
            self.log.warning("server.out_of_reach", error=str(why), waiting=waiting, retry_in_seconds=pause)

    async def _connected(self, attempt: ConnectionAttempt) -> None:
        """Deliver over one connection; returns when another identity asks for another one."""
        self._attempt = attempt
        await self._present()
        identity = await asyncio.to_thread(self.folder.credentials)
        if self._now() >= identity.life.end:
            await self._come_back(identity)
            return
        async with self._channel(identity) as channel:
            if await self._register_if_due(channel, identity):
                return
            async with beside([self.check_in(channel, no_metadata)]):
                await self._report(channel, identity)

    async def _report(self, channel: grpc.aio.Channel, identity: ConnectionCredentials) -> None:
        stub = boards_pb2_grpc.ControlPlaneStub(channel)
        while not await self._register_if_due(channel, identity):
            sequence, report = await self.outbox.oldest()
            try:
                answer = await stub.ReportHealth(report, timeout=link.CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self.log.error("report.refused", error=error.details())
                    self.outbox.confirmed(sequence)  # it would hold up all that follow
                raise link.translated(error) from error
            self.outbox.confirmed(sequence)
            self._heard()
            if answer.revocation_list and await self.revocations_came(answer.revocation_list):
                self._keep(self.report())  # so that it is seen at once who has it
            if answer.HasField("desired"):
                await self.keeper.take(answer.desired)

    async def _register_if_due(self, channel: grpc.aio.Channel, identity: ConnectionCredentials) -> bool:
        """Whether that brought a new identity."""
        me = await self.describe()
        renew = self._now() >= identity.life.renewal_at() and self._may_renew_again()
        if self._registered and me.digest() == self.membership.registered and not renew:
            return False
        return await self._register(channel, me, renew=renew)

    def _may_renew_again(self) -> bool:
        """A server that issues certificates which are old already is not asked all the time."""
        now = self.node.clock.monotonic()
        if self._renewed_at is not None and now - self._renewed_at < RENEW_AGAIN_SECONDS:
            return False
        self._renewed_at = now
        return True

    async def _register(self, channel: grpc.aio.Channel, me: BoardSelf, *, renew: bool) -> bool:
        registrar = BoardRegistrar(self.folder, self.node.clock)
        self.membership, changed = await registrar.update(channel, me, self.membership, renew=renew)
        self._registered = True
        self._heard()
        self.log.info("server.registered", node=self.membership.node_id, renewed=renew)
        self._unpresented |= changed
        await self._present()
        return changed

    async def _present(self) -> None:
        """Have a new identity taken up. If that fails, it is tried again with the next connection."""
        if self._unpresented:
            await self.identity_changed()
            self._unpresented = False

    async def _come_back(self, identity: ConnectionCredentials) -> None:
        """Our certificate ran out while we were away: our key is known still, but someone has to approve."""
        self.log.warning("certificate.expired", server=self.membership.server)
        channel = link.anonymous_channel(
            self.membership.server, identity.authority_pem, server_name=self.membership.server_name
        )
        async with channel:
            await self._register(channel, await self.describe(), renew=True)

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(FleetplaneError, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                identity = await asyncio.to_thread(self.folder.credentials)
                async with self._channel(identity) as channel:
                    goodbye = self.report(pi.NODE_STATUS_MAINTENANCE)
                    await boards_pb2_grpc.ControlPlaneStub(channel).ReportHealth(
                        goodbye, timeout=GOODBYE_SECONDS
                    )

    def _channel(self, identity: ConnectionCredentials) -> grpc.aio.Channel:
        return link.own_channel(self.membership.server, identity, server_name=self.membership.server_name)

    def _now(self) -> float:
        return self.node.clock.now_ns() / 1e9
