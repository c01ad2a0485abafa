"""Daemons of the edge, as light as they can be played: a connection each, one stream on it, real signatures.

All of them live in one process and one thread; only dialling is done by several threads, because
a TLS handshake waits for the server twice. They believe the server without looking at its
signatures, which real daemons check and which would make the client the slower side.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.edge_population import Identity
from bench.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RECEIVE_BYTES,
    Connection,
    Crowd,
    OnMessage,
    framed,
    head,
    literal,
)
from bench.servers import Server
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2

CONNECT = "/aegis.cluster.v1.NodeClusterService/ConnectEdge"
DIALLERS = 16
OPENING_AT_ONCE = 500
CAPABILITIES = pb.EdgeCapabilities(
    os="linux", arch="x86_64", local_tools=["shell", "git"]
).SerializeToString()
STREAM = 1
"""The only one on a connection."""


class Secured(Connection):
    """A connection over TLS, if it is given a context for that."""

    __slots__ = ("_context",)

    def __init__(self, server: Server, on_message: OnMessage, context: ssl.SSLContext | None) -> None:
        self._context = context
        super().__init__(server, on_message)

    def _dial(self, server: Server) -> socket.socket:
        plain = super()._dial(server)
        return plain if self._context is None else self._context.wrap_socket(plain)

    def _receive(self) -> bytes | None:
        if self._context is None:
            return super()._receive()
        # What came may be for TLS itself, such as a ticket: then there is nothing to wait for.
        self.socket.setblocking(False)
        try:
            return self.socket.recv(RECEIVE_BYTES)
        except ssl.SSLWantReadError:
            return None
        finally:
            self.socket.setblocking(True)


COMMAND = "cccccccc-1111-4222-8333-dddddddddddd"


class Daemon(Secured):
    __slots__ = ("_identity", "_on_result", "_stream_id", "opened")

    def __init__(
        self,
        server: Server,
        identity: Identity,
        context: ssl.SSLContext | None,
        *,
        on_result: Callable[[], None],
        first_generation: bool = False,
    ) -> None:
        self.opened = False
        self._identity = identity
        self._stream_id = str(uuid.uuid4())
        self._on_result = on_result
        super().__init__(server, lambda _connection, _stream, message: self._command(message), context)
        inner = b"" if first_generation else envelope.capabilities_inner(CAPABILITIES)
        hello = tolerant_pb2.Hello(
            envelope=self._signed(EventKind.HELLO, inner),
            capabilities=CAPABILITIES,
            stream_id=self._stream_id,
        )
        fields = head(CONNECT, server.authority)
        if not first_generation:
            fields += literal(b"x-aegis-edge-dialect", b"documented")
        self.say(framed(HEADERS, END_HEADERS, STREAM, fields) + _message(tolerant_pb2.EdgeEvent(hello=hello)))

    def _signed(self, kind: EventKind, inner: bytes = b"") -> pb.SealNodeEnvelope:
        me = self._identity
        payload = envelope.encode(kind, time.time_ns() // 1_000_000, me.node_id, self._stream_id, inner)
        return pb.SealNodeEnvelope(
            node_security_token=me.token, signature=me.key.sign(payload), payload=payload
        )

    def heartbeat(self) -> bytes:
        """One as it goes over the wire, signed now and sent whenever."""
        beat = tolerant_pb2.Heartbeat(envelope=self._signed(EventKind.HEARTBEAT))
        return _message(tolerant_pb2.EdgeEvent(heartbeat=beat))

    def lines(self, number: int) -> list[bytes]:
        """Output as daemons of the first generation send it, an event for each line."""
        made = []
        for sequence in range(1, number + 1):
            text = b"a line of output that says something, number %d\n" % sequence
            inner = envelope.short_progress_inner(COMMAND, sequence=sequence, stderr=False, chunk=text)
            line = tolerant_pb2.CommandProgress(
                envelope=self._signed(EventKind.COMMAND_PROGRESS, inner),
                command_id=COMMAND,
                chunk=text,
                sequence=sequence,
            )
            made.append(_message(tolerant_pb2.EdgeEvent(command_progress=line)))
        return made

    def say(self, message: bytes) -> None:
        self.socket.sendall(message)

    def _command(self, raw: bytes) -> None:
        """Whatever it is asked to do, it has done."""
        command = pb.EdgeCommand.FromString(raw)
        if command.WhichOneof("command") == "invoke_tool":
            command_id = command.invoke_tool.command_id
            done = tolerant_pb2.CommandResult(
                envelope=self._signed(EventKind.COMMAND_RESULT, envelope.result_inner(command_id, DONE)),
                command_id=command_id,
                result=DONE,
            )
            self.say(_message(tolerant_pb2.EdgeEvent(command_result=done)))
            self._on_result()

    def _frame(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & END_STREAM:
                raise RuntimeError(f"the server turned a daemon away: {payload!r}")
            self.opened = True
        else:
            super()._frame(kind, flags, stream, payload)


def _done() -> bytes:
    made = pb.EdgeResult(ok=pb.EdgeResult.Ok(exit_code=0))
    made.ok.payload.Pack(tolerant_pb2.ToolOutput(stdout=b"done\n"))
    return made.SerializeToString()


DONE = _done()


def _message(event: tolerant_pb2.EdgeEvent) -> bytes:
    body = event.SerializeToString()
    return framed(DATA, 0, STREAM, struct.pack(">BI", 0, len(body)) + body)


def trusting() -> ssl.SSLContext:
    """Encrypts, and takes the server for the right one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Fleet:
    """Daemons that are connected to one server."""

    def __init__(self, server: Server, people: Crowd, *, tls: bool) -> None:
        self._server = server
        self.context = trusting() if tls else None
        self.people = people
        self.daemons: list[Daemon] = []
        self.results = 0

    def grow(self, identities: Sequence[Identity]) -> None:
        """Open so many streams more; all of them stand when this returns."""
        with ThreadPoolExecutor(DIALLERS) as diallers:
            for start in range(0, len(identities), OPENING_AT_ONCE):
                made = list(diallers.map(self._dial, identities[start : start + OPENING_AT_ONCE]))
                for daemon in made:
                    self.people.adopt(daemon)
                self.people.until(lambda made=made: all(daemon.opened for daemon in made))  # type: ignore[misc]
                self.daemons += made

    def replaced(self, identities: Sequence[Identity]) -> list[Daemon]:
        """The first of the daemons again, as ones of the first generation."""
        for daemon in self.daemons[: len(identities)]:
            self.people.forget(daemon)
            daemon.socket.close()
        with ThreadPoolExecutor(DIALLERS) as diallers:
            made = list(diallers.map(lambda one: self._dial(one, first_generation=True), identities))
        for daemon in made:
            self.people.adopt(daemon)
        self.people.until(lambda: all(daemon.opened for daemon in made))
        self.daemons[: len(identities)] = made
        return made

    def _dial(self, identity: Identity, *, first_generation: bool = False) -> Daemon:
        return Daemon(
            self._server, identity, self.context, on_result=self._answered, first_generation=first_generation
        )

    def _answered(self) -> None:
        self.results += 1

    def heartbeats(self, number: int) -> Iterable[tuple[Daemon, bytes]]:
        """So many, of all daemons in turns, ready to be sent."""
        return [
            (daemon, daemon.heartbeat())
            for turn in range(number)
            for daemon in (self.daemons[turn % len(self.daemons)],)
        ]
