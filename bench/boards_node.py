"""One simulated board: what its agent serves and says, light enough that five hundred fit on one core.

It speaks HTTP/2 by hand over Python's own TLS. Log lines come at a steady rate into a queue with a
bound, as on a real board: what the reader does not take in time goes, the oldest first, and the next
line that is sent tells how many went. Pins are numbers in memory.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent

QUEUE_ENTRIES: Final = 1000
"""Lines that wait for the reader, as on a board."""
UNSENT_BYTES: Final = 64 * 1024
"""Handed to the transport at most; what is beyond waits in the queue, where it is counted."""
PREFIX_BYTES: Final = 5
OK: Final = "0"
UNIMPLEMENTED: Final = "12"
_HEAD: Final = ((":status", "200"), ("content-type", "application/grpc"))


class Logs:
    """Lines of one board, from the first to the last that was made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[int] = deque()
        self._untold = 0
        self._due = 0.0
        self.made = 0
        self.sent = 0
        self.dropped = 0
        """Told to the reader."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def make(self, lines: float) -> None:
        """So many more; parts of a line are carried over."""
        self._due += lines
        while self._due >= 1.0:
            self._due -= 1.0
            self.made += 1
            self._waiting.append(self.made)
            if len(self._waiting) > QUEUE_ENTRIES:
                self._waiting.popleft()
                self._untold += 1

    def take(self, limit_bytes: int) -> bytes:
        """The next lines, framed as messages, as many as fit; at least one if there is one."""
        taken: list[bytes] = []
        size = 0
        while self._waiting and size < limit_bytes:
            number = self._waiting.popleft()
            entry = pb.LogEntry(
                level=pb.LogEntry.INFO,
                unit="kubelet.service",
                source="journal",
                hostname=self._name,
                message=f"{number} probe of container registry-proxy in kube-system/registry-proxy-7c9 ok",
                pid=812,
                cursor=f"j:{number}",
                dropped=self._untold,
            )
            entry.timestamp.GetCurrentTime()
            self.dropped += self._untold
            self._untold = 0
            self.sent += 1
            raw = entry.SerializeToString()
            taken.append(struct.pack(">BI", 0, len(raw)) + raw)
            size += len(raw) + PREFIX_BYTES
        return b"".join(taken)


class Node:
    """What a board's agent answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logs = Logs(name)
        self.calls = 0
        self.streams: set[LogStream] = set()
        self._pins: dict[int, pb.GPIORequest.GPIOState] = {}
        self._answers: Mapping[str, Callable[[bytes], bytes]] = {
            "/NodeAgent/ControlGPIO": self._gpio,
            "/NodeAgent/HealthCheck": lambda _: pb.HealthStatus(status="OK").SerializeToString(),
            "/NodeAgent/GetSystemMetrics": lambda _: measured().SerializeToString(),
            "/pi_agent.PiAgentService/ListConfiguredPins": self._list,
            "/pi_agent.PiAgentService/AgentHealth": lambda _: pi_agent.AgentHealthResponse(
                status="ok", gpio_available=True
            ).SerializeToString(),
        }

    def answer(self, path: str, request: bytes) -> bytes | None:
        """None for what it does not know."""
        self.calls += 1
        known = self._answers.get(path)
        return known(request) if known is not None else None

    def _gpio(self, raw: bytes) -> bytes:
        request = pb.GPIORequest.FromString(raw)
        action = request.action
        if action in (pb.GPIORequest.UNSPECIFIED, pb.GPIORequest.WRITE):
            self._pins[request.pin] = request.state
        elif action == pb.GPIORequest.RELEASE:
            self._pins.pop(request.pin, None)
        elif action == pb.GPIORequest.CONFIGURE:
            self._pins[request.pin] = request.state
        answer = pb.GPIOResponse(
            success=True,
            pin=request.pin,
            state=self._pins.get(request.pin, pb.GPIORequest.LOW),
            direction=request.direction or pi_agent.AGENT_GPIO_DIRECTION_OUTPUT,
            pull_mode=request.pull_mode,
        )
        answer.timestamp.GetCurrentTime()
        return answer.SerializeToString()

    def _list(self, _raw: bytes) -> bytes:
        direction = pi_agent.AGENT_GPIO_DIRECTION_OUTPUT
        pins = [
            pi_agent.GPIOPinState(pin=pin, direction=direction, value=value)
            for pin, value in self._pins.items()
        ]
        return pi_agent.ListConfiguredPinsResponse(pins=pins).SerializeToString()

    def tick(self, lines: float) -> None:
        """More lines, and off with them to whoever follows."""
        if self.streams:
            self.logs.make(lines)
            for stream in tuple(self.streams):
                stream.pump()

    def push(self) -> None:
        for stream in tuple(self.streams):
            stream.pump()


def measured() -> pb.SystemMetrics:
    """As a quiet board reports it."""
    metrics = pb.SystemMetrics(
        cpu_usage=12.5, memory_usage=41.0, temperature=48.3, disk_usage=63.0, uptime_seconds=86_400
    )
    metrics.timestamp.GetCurrentTime()
    for name in ("eth0", "wlan0"):
        metrics.interfaces.add(name=name, bytes_sent=10**9, bytes_recv=10**10, packets_sent=1, packets_recv=2)
    metrics.power.SetInParent()
    return metrics


class LogStream:
    """One reader of a board's logs."""

    def __init__(self, serving: Serving, stream: int) -> None:
        self._serving = serving
        self._stream = stream

    def pump(self) -> None:
        """As much as the reader's windows and the transport have room for."""
        serving, logs = self._serving, self._serving.node.logs
        while logs.waiting and (room := serving.room(self._stream)) > 0:
            serving.send(self._stream, logs.take(max(1, min(room, UNSENT_BYTES) // 2)))


class Serving(asyncio.Protocol):
    """One connection to a board."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        )
        self._transport: asyncio.Transport | None = None
        self._paths: dict[int, str] = {}
        self._bodies: dict[int, bytes] = {}
        self._unsent: dict[int, bytes] = {}
        self._logs: dict[int, LogStream] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._h2.initiate_connection()
        self._flush()

    def connection_lost(self, _error: Exception | None) -> None:
        for stream in self._logs.values():
            self.node.streams.discard(stream)
        self._logs.clear()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self._transport.close()
            return
        for event in events:
            self._handle(event)
        self._flush()

    def resume_writing(self) -> None:
        self.node.push()

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                head = {str(name): str(value) for name, value in event.headers}
                self._paths[event.stream_id] = head[":path"]
            case h2.events.DataReceived():
                self._bodies[event.stream_id] = self._bodies.get(event.stream_id, b"") + event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self._asked(event.stream_id)
            case h2.events.StreamReset():
                self._forget(event.stream_id)
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for stream in tuple(self._unsent):
                    self.send(stream, b"")
                self.node.push()

    def _asked(self, stream: int) -> None:
        path, body = self._paths.pop(stream), self._bodies.pop(stream, b"")[PREFIX_BYTES:]
        if path == "/NodeAgent/StreamLogs":
            self._h2.send_headers(stream, _HEAD)
            self._logs[stream] = logs = LogStream(self, stream)
            self.node.streams.add(logs)
            return
        answer = self.node.answer(path, body)
        self._h2.send_headers(stream, _HEAD)
        status = UNIMPLEMENTED
        if answer is not None:
            status = OK
            self._h2.send_data(stream, struct.pack(">BI", 0, len(answer)) + answer)
        self._h2.send_headers(stream, (("grpc-status", status),), end_stream=True)

    def _forget(self, stream: int) -> None:
        self._paths.pop(stream, None)
        self._bodies.pop(stream, None)
        self._unsent.pop(stream, None)
        if (logs := self._logs.pop(stream, None)) is not None:
            self.node.streams.discard(logs)

    # Log streams.

    def room(self, stream: int) -> int:
        """How much may be handed over now."""
        assert self._transport is not None
        if stream in self._unsent or self._transport.get_write_buffer_size() >= UNSENT_BYTES:
            return 0
        return self._h2.local_flow_control_window(stream)

    def send(self, stream: int, data: bytes) -> None:
        """Within the windows; what does not fit is kept for when they open, before anything else."""
        data = self._unsent.pop(stream, b"") + data
        while data:
            most = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if most <= 0:
                self._unsent[stream] = data
                break
            self._h2.send_data(stream, data[:most])
            data = data[most:]
        self._flush()

    def _flush(self) -> None:
        assert self._transport is not None
        if data := self._h2.data_to_send():
            self._transport.write(data)
