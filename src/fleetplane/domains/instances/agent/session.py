"""One connection to the server and the three streams on it.

Files and key requests come down, health reports go up. A stream that ends or fails is opened
again, later and later while it keeps failing; a connection that is lost ends the session, and a
new one begins from nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.empty_pb2 import Empty

from fleetplane.domains.instances.agent.files.folder import PatchRefused, ReceiveFolder
from fleetplane.domains.instances.agent.files.patch import FilePatch, PatchBroken, PatchReader, Transfer
from fleetplane.domains.instances.agent.identity.keys import KeyFolder
from fleetplane.domains.instances.agent.identity.renewal import CertificateKeeper
from fleetplane.domains.instances.agent.reporter import InstanceReporter
from fleetplane.domains.instances.agent.transport import CALL_LIMIT_SECONDS
from fleetplane.gen.nstance.v1 import agent_pb2, agent_pb2_grpc
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node import link
from fleetplane.node.certificates import Life
from fleetplane.node.connection import SPREAD_SECONDS, Follow, no_check_in, no_metadata
from fleetplane.node.link import LinkLost
from fleetplane.node.tasks import in_thread

LOST_CODES: Final = frozenset({grpc.StatusCode.UNAVAILABLE})
STEADY_SECONDS: Final = 10.0
"""A stream or session that lasted this long was well; the next failure starts from the shortest wait."""
GOODBYE_SECONDS: Final = 1.0
"""Seconds to end the report stream cleanly at shutdown, before the connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Before a stream that the server ended in good order is opened again."""

    files_seconds: float = 2.0
    keys_seconds: float = 2.0
    reports_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceNode:
    """What lasts from one session to the next."""

    instance_id: str
    received: ReceiveFolder
    keys: KeyFolder
    reporter: InstanceReporter
    keeper: CertificateKeeper
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    backoff: Backoff = field(default_factory=Backoff)
    spread_seconds: float = SPREAD_SECONDS
    """How much longer the wait after a good connection may be."""
    pauses: Pauses = field(default_factory=Pauses)
    check_in: Follow = no_check_in
    """Says which version this is, over each connection."""


class InstanceSession:
    def __init__(self, channel: grpc.aio.Channel, node: InstanceNode, life: Life) -> None:
        self._channel = channel
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)
        self._node = node
        self._life = life

    def __repr__(self) -> str:
        return f"<Session of {self._node.instance_id}>"

    async def run(self, hand_over: Callable[[], Awaitable[None]], established: Callable[[], None]) -> None:
        """Until a renewed certificate asks for a new connection. A lost one is an error, LinkLost.

        `established` is called once the connection stands. The streams stay open until `hand_over` returns:
        whoever comes next is ready by then.
        """
        pauses = self._node.pauses
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(self._tell_ready(established)),
                tasks.create_task(self._keep_open("files", self._files, pauses.files_seconds)),
                tasks.create_task(self._keep_open("keys", self._keys, pauses.keys_seconds)),
            ]
            if self._node.reporter.enabled:
                reports = self._keep_open("reports", self._reports, pauses.reports_seconds)
                streams.append(tasks.create_task(reports))
            await self._node.keeper.until_renewed(self._channel, self._life)
            await hand_over()
            for stream in streams:
                stream.cancel()

    async def _tell_ready(self, established: Callable[[], None]) -> None:
        await self._channel.channel_ready()
        established()
        await self._node.check_in(self._channel, no_metadata)

    async def _keep_open(
        self, name: str, stream: Callable[[], Awaitable[None]], pause_seconds: float
    ) -> NoReturn:
        node = self._node
        failures = 0
        while True:
            opened = node.clock.monotonic()
            try:
                await stream()
                failures, delay = 0, pause_seconds
                node.log.debug("stream_ended", stream=name)
            except (grpc.aio.AioRpcError, PatchBroken) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in LOST_CODES:
                    raise LinkLost(link.words(error)) from error
                failures = 1 if node.clock.monotonic() - opened > STEADY_SECONDS else failures + 1
                delay = node.backoff.delay_seconds(failures - 1, jitter=node.clock.random())
                node.log.warning(
                    "stream_failed", stream=name, error=_words(error), retry_in_seconds=round(delay, 2)
                )
            await node.clock.sleep(delay)

    # Files

    async def _files(self) -> None:
        call = self._stub.ReceiveFiles(Empty())
        reader = PatchReader()
        try:
            async for message in call:
                patch = reader.take(_transfer(message))
                if patch is not None:
                    await self._apply(patch)
            reader.end()
        finally:
            call.cancel()

    async def _apply(self, patch: FilePatch) -> None:
        """Take a patch. One that cannot be taken is reported, and the stream goes on."""
        node = self._node
        try:
            await in_thread(lambda: node.received.apply(patch))
        except PatchRefused as refused:
            node.log.warning("patch_refused", error=refused.message, config_hash=patch.config_hash)
            return
        except OSError as error:
            node.log.error("patch_not_written", error=str(error), config_hash=patch.config_hash)
            return
        node.log.info("patch_applied", files=sorted(patch.files), config_hash=patch.config_hash)
        node.reporter.wake()

    # Keys

    async def _keys(self) -> None:
        call = self._stub.ReceiveKeyRequests(Empty())
        try:
            async for request in call:
                if request.key_names:
                    await self._submit(list(request.key_names))
        finally:
            call.cancel()

    async def _submit(self, names: list[str]) -> None:
        """Make and hand in keys. What goes wrong is logged: the server asks again for what it lacks."""
        node = self._node
        try:
            keys = await in_thread(lambda: node.keys.public_keys(names))
        except (FleetplaneError, OSError) as error:
            node.log.warning("keys_not_made", names=names, error=str(error))
            return
        request = agent_pb2.PublicKeysRequest(
            instance_id=node.instance_id,
            keys=[
                agent_pb2.PublicKeySubmission(filename=name, public_key_pem=key) for name, key in keys.items()
            ],
        )
        try:
            await self._stub.SubmitPublicKeys(request, timeout=CALL_LIMIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in LOST_CODES:
                raise
            node.log.warning("keys_not_submitted", names=names, error=link.words(error))
            return
        node.log.info("keys_submitted", names=names)
        node.reporter.wake()

    # Health

    async def _reports(self) -> None:
        """Report now and then every interval, until the server ends the stream."""
        call = self._stub.SubmitHealthReport()
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(call))
            try:
                await ended.wait()  # not the call itself: that would cancel it together with us
            except asyncio.CancelledError:
                writing.cancel()
                await _say_goodbye(call)
                raise
            finally:
                writing.cancel()
        await call

    async def _write(self, call: grpc.aio.StreamUnaryCall[agent_pb2.HealthReportRequest, Empty]) -> None:
        # The call's own end, awaited beside us, says why a write failed.
        with suppress(*link.CALL_IS_OVER):
            while True:
                await call.write(await self._node.reporter.compose())
                await self._node.reporter.pause()


async def _say_goodbye(call: grpc.aio.StreamUnaryCall[agent_pb2.HealthReportRequest, Empty]) -> None:
    """End our half of the stream, so that the server sees an end and not a breakdown."""
    with suppress(*link.CALL_IS_OVER, TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await call.done_writing()
            await call
    call.cancel()


def _transfer(message: agent_pb2.FileTransfer) -> Transfer:
    return Transfer(
        filename=message.filename,
        content=message.content,
        dated=message.HasField("last_modified"),
        config_hash=message.config_hash,
    )


def _words(error: grpc.aio.AioRpcError | PatchBroken) -> str:
    return link.words(error) if isinstance(error, grpc.aio.AioRpcError) else error.message
