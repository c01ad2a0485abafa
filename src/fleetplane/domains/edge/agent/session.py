"""One stream to the server: say hello, then talk until it breaks, or until we are to leave.

Everything that must outlive the stream is elsewhere. The stream has one writer at a time; a command
is believed only with the server's proof; a configuration is in force before the next command is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
import structlog

from fleetplane.domains.edge.agent import events
from fleetplane.domains.edge.agent.commands.commands import CommandWork
from fleetplane.domains.edge.agent.commands.journal import ResultOutbox
from fleetplane.domains.edge.agent.config.layers import DaemonConfiguration
from fleetplane.domains.edge.agent.endpoint import translated
from fleetplane.domains.edge.agent.events import Speaker
from fleetplane.domains.edge.agent.identity import keyring as identity
from fleetplane.domains.edge.agent.identity.keyring import DaemonIdentity, Keyring
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.agent.server_proof import NotTheServer, ServerCheck
from fleetplane.domains.edge.wire.protobuf_types import seconds_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, SettingsError, Unavailable
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.node import link
from fleetplane.node.connection import Follow, no_check_in
from fleetplane.node.link import LinkLost, ServerRefused
from fleetplane.node.tasks import in_thread, unless
from fleetplane.node.writer import StreamWriter

METHOD: Final = "/aegis.cluster.v1.NodeClusterService/ConnectEdge"
HELLO_SECONDS: Final = 20.0
GOODBYE_SECONDS: Final = 3.0
LOOK_AGAIN_SECONDS: Final = 600.0
"""Seconds between checks of the machine's capabilities; changes are reported."""
LONGEST_GRACE_SECONDS: Final = 3600.0


@dataclass(slots=True, kw_only=True)
class Leaving:
    """The daemon has to end; how long its commands may still take."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    grace_seconds: float = 0.0
    reason: str = ""

    def ask(self, *, grace_seconds: float, reason: str) -> None:
        if not self.asked.is_set():
            self.grace_seconds = min(max(grace_seconds, 0.0), LONGEST_GRACE_SECONDS)
            self.reason = reason
            self.asked.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonNode:
    """What lasts from one session to the next."""

    folder: StateFolder
    configuration: DaemonConfiguration
    keyring: Keyring
    server_key: bytes
    tolerate_unsigned: Callable[[], bool]
    work: CommandWork
    outbox: ResultOutbox
    leaving: Leaving
    capabilities: Callable[[], pb.EdgeCapabilities]
    """Blocking."""
    last_command: Callable[[], str]
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    look_again: asyncio.Event = field(default_factory=asyncio.Event)
    """What the daemon can do may have changed."""
    check_in: Follow = no_check_in
    """Says which version this is, over each connection."""


async def take_over_identity(node: DaemonNode) -> bool:
    """Another program may have renewed our token or rotated our key; whether one has."""
    if await in_thread(node.folder.signature) == node.keyring.seen:
        return False
    try:
        found, seen = await in_thread(lambda: _settled_identity(node))
    except Unavailable:
        return False  # it is being changed: what comes of that is found at the next look
    except FleetplaneError as error:
        node.log.warning("identity_not_read", error=error.message)
        return False
    node.keyring.current, node.keyring.seen = found, seen
    node.log.info("identity_taken_over")
    return True


def _settled_identity(node: DaemonNode) -> tuple[DaemonIdentity, tuple[tuple[int, int], ...]]:
    """A key and its token, and the signature of both: never one that is new and one that is not yet."""
    with node.folder.changing_identity():
        return identity.load(node.folder, node.configuration.current), node.folder.signature()


class _Left(Exception):
    """We are done here."""


class DaemonSession:
    def __init__(
        self, channel: grpc.aio.Channel, node: DaemonNode, *, on_established: Callable[[], None]
    ) -> None:
        self._node = node
        self._channel = channel
        self._on_established = on_established
        self._speaker = Speaker(node.keyring, new_uuid(node.clock), node.clock)
        self._check = ServerCheck(
            server_key=node.server_key,
            tolerate_unsigned=node.tolerate_unsigned(),
            node_id=node.keyring.current.node_id,
            stream_id=self._speaker.stream_id,
            clock=node.clock,
        )
        metadata = (
            ("x-aegis-edge-dialect", "documented"),
            ("authorization", f"Bearer {node.keyring.current.token}"),
        )
        # Bytes in, bytes out: what is signed must be what is carried.
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)(metadata=metadata)
        self._writer: StreamWriter[bytes] = StreamWriter(self._call, translated)
        self._told = b""
        self._telling = asyncio.Lock()  # capabilities that were looked at later are told later
        self._draining: asyncio.Event = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._flushing = asyncio.Lock()  # each result goes out once on a stream
        self._done_talking = False
        self.established = False

    def __repr__(self) -> str:
        return f"<Session {self._speaker.stream_id} established={self.established}>"

    async def run(self) -> None:
        """Until we have left. Raises LinkLost, Refused or NotTheServer when it ends otherwise."""
        node, ends = self._node, list[BaseException]()
        try:
            if not await unless(node.leaving.asked, self._hello()):
                self._done_talking = True
                return
            node.outbox.attach(self)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run())
                tasks.create_task(self._flush())
                tasks.create_task(self._beat())
                tasks.create_task(self._look_again())
                tasks.create_task(self._say_drained())
                tasks.create_task(self._leave())
                tasks.create_task(node.check_in(self._channel, self._bearer))
                await self._listen()
        except* (grpc.aio.AioRpcError, LinkLost, ServerRefused, NotTheServer, _Left) as group:
            ends = list(link.causes(group))
        finally:
            node.outbox.detach(self)
            node.work.draining = node.leaving.asked.is_set()  # the next stream is told anew
            self._call.cancel()
        if not self._done_talking:
            raise link.most_telling(ends, (NotTheServer, ServerRefused, LinkLost), translated)

    def _bearer(self) -> Sequence[tuple[str, str]]:
        return (("authorization", f"Bearer {self._node.keyring.current.token}"),)

    async def _hello(self) -> None:
        node = self._node
        self._told = (await in_thread(node.capabilities)).SerializeToString()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await self._writer.first(self._speaker.hello(self._told, node.last_command()))
                await self._call.initial_metadata()
        except TimeoutError as error:
            raise LinkLost("the server does not answer our hello") from error
        except grpc.aio.AioRpcError as error:
            raise translated(error) from error
        if self._call.done():
            raise translated(await link.ending(self._call))
        self.established = True
        self._on_established()
        node.log.info("connected", stream=self._speaker.stream_id, node=node.keyring.current.node_id)

    # Reading.

    async def _listen(self) -> None:
        while isinstance(raw := await self._call.read(), bytes):
            if not self._done_talking:
                await self._obey(self._check.command(raw))
        if self._done_talking:
            raise _Left
        raise translated(await link.ending(self._call))

    async def _obey(self, command: pb.EdgeCommand) -> None:
        node = self._node
        match command.WhichOneof("command"):
            case "invoke_tool":
                node.work.take(command.invoke_tool)
            case "cancel":
                node.log.info("cancel_asked", command=command.cancel.command_id)
                node.work.cancel(command.cancel.command_id, command.cancel.reason)
            case "push_config":
                await self._configure(command.push_config)
            case "drain":
                node.log.info("drain_asked")
                node.work.draining = True
                await self._status("drain", "draining", "")
                self._draining.set()
            case "shutdown":
                grace = seconds_of(command.shutdown.grace)
                node.log.info("shutdown_asked", grace_seconds=grace)
                node.leaving.ask(grace_seconds=grace, reason="the daemon is shut down by the server")
            case _:
                node.log.debug("command_not_understood")

    async def _configure(self, push: pb.PushConfig) -> None:
        node = self._node
        try:
            await in_thread(lambda: node.configuration.push(push.version, push.config_delta))
        except (SettingsError, OSError) as error:
            why = error.message if isinstance(error, FleetplaneError) else str(error)
            node.log.warning("config_refused", version=push.version[:64], reason=why)
            await self._status(push.version, "config-refused", why)
            return
        node.log.info("config_applied", version=push.version[:64])
        node.work.look_again()
        await self._status(push.version, "config-applied", push.version)
        await self._tell_capabilities()
        self._beat_now.set()  # the interval may be another

    # Writing.

    async def send_progress(self, command_id: str, chunk: bytes) -> None:
        """Output of a command; when the stream breaks there is nobody left to hear it."""
        with suppress(LinkLost):
            await self._writer.send(self._speaker.progress(command_id, chunk))

    async def _status(self, subject: str, state: str, message: str) -> None:
        await self._writer.send(self._speaker.progress(subject, events.status_chunk(state, message)))

    async def _flush(self) -> None:
        while True:
            await self._flush_once()
            await self._node.outbox.changed()

    async def _flush_once(self) -> None:
        async with self._flushing:
            for command_id, result in self._node.outbox.unsent():
                await self._writer.send(self._speaker.result(command_id, result))
                self._node.outbox.went_out(command_id, result)

    async def _beat(self) -> None:
        node = self._node
        while True:
            seconds = node.configuration.current.heartbeat_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds * (0.9 + 0.1 * node.clock.random())):
                    await self._beat_now.wait()
            self._beat_now.clear()
            await take_over_identity(node)
            await self._writer.send(self._speaker.heartbeat(node.work.active))
            node.outbox.settle()

    async def _look_again(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await self._node.look_again.wait()
            self._node.look_again.clear()
            await self._tell_capabilities()

    async def _tell_capabilities(self) -> None:
        async with self._telling:
            now = (await in_thread(self._node.capabilities)).SerializeToString()
            if now != self._told:
                self._told = now
                await self._writer.send(self._speaker.capabilities(now))

    async def _say_drained(self) -> None:
        while True:
            await self._draining.wait()
            self._draining.clear()
            await self._node.work.drained()
            await self._status("drain", "drained", "")
            await self._tell_capabilities()

    async def _leave(self) -> None:
        """Stop, tell what came of it, and end our half first: the server sees an end and not a breakdown."""
        node = self._node
        await node.leaving.asked.wait()
        await node.work.stop(grace_seconds=node.leaving.grace_seconds, reason=node.leaving.reason)
        await self._flush_once()
        self._done_talking = True
        with suppress(*link.CALL_IS_OVER):
            await self._call.done_writing()
        await node.clock.sleep(GOODBYE_SECONDS)  # for the server to end its half
        raise _Left
