"""A stream's events as bytes: built, signed over what they carry, and written. Pure but for the clock.

What is signed for is put into the message as the very bytes that were signed.
"""

from __future__ import annotations

import msgspec
from google.protobuf.any_pb2 import Any as AnyMessage

from fleetplane.domains.edge.agent.identity.keyring import DaemonIdentity, Keyring
from fleetplane.domains.edge.agent.tools.contract import (
    CommandOutcomeReport,
    ErrorKind,
    ProgramStream,
    ToolState,
)
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.domains.edge.wire.protobuf_types import duration_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.node.programs.run import TAIL_BYTES

MESSAGE_LIMIT = 4096
"""Characters of an error message."""
STRUCTURED_LIMIT_BYTES = 512 * 1024


class Speaker:
    """Makes one stream's events."""

    def __init__(self, keyring: Keyring, stream_id: str, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock
        self.stream_id = stream_id

    def __repr__(self) -> str:
        return f"<Speaker of {self._keyring.current.node_id} on {self.stream_id}>"

    def hello(self, capabilities: bytes, last_seen: str = "") -> bytes:
        sealed = self._sealed(EventKind.HELLO, envelope.capabilities_inner(capabilities))
        hello = tolerant_pb2.Hello(envelope=sealed, capabilities=capabilities, stream_id=self.stream_id)
        if last_seen:
            hello.last_seen_command_id = last_seen
        return tolerant_pb2.EdgeEvent(hello=hello).SerializeToString()

    def heartbeat(self, active_commands: int) -> bytes:
        beat = pb.Heartbeat(
            envelope=self._sealed(EventKind.HEARTBEAT),
            sent_at=timestamp(self._clock.now_ns()),
            active_commands=active_commands,
        )
        return pb.EdgeEvent(heartbeat=beat).SerializeToString()

    def capabilities(self, capabilities: bytes) -> bytes:
        sealed = self._sealed(EventKind.CAPABILITY_UPDATE, envelope.capabilities_inner(capabilities))
        update = tolerant_pb2.CapabilityUpdate(envelope=sealed, capabilities=capabilities)
        return tolerant_pb2.EdgeEvent(capability_update=update).SerializeToString()

    def result(self, command_id: str, result: bytes) -> bytes:
        sealed = self._sealed(EventKind.COMMAND_RESULT, envelope.result_inner(command_id, result))
        event = tolerant_pb2.CommandResult(envelope=sealed, command_id=command_id, result=result)
        return tolerant_pb2.EdgeEvent(command_result=event).SerializeToString()

    def progress(self, command_id: str, chunk: bytes) -> bytes:
        sealed = self._sealed(EventKind.COMMAND_PROGRESS, envelope.progress_inner(command_id, chunk))
        event = tolerant_pb2.CommandProgress(envelope=sealed, command_id=command_id, chunk=chunk)
        return tolerant_pb2.EdgeEvent(command_progress=event).SerializeToString()

    def _sealed(self, kind: EventKind, inner: bytes = b"") -> pb.SealNodeEnvelope:
        who: DaemonIdentity = self._keyring.current
        now_ms = self._clock.now_ns() // 1_000_000
        payload = envelope.encode(kind, now_ms, who.node_id, self.stream_id, inner)
        return pb.SealNodeEnvelope(
            node_security_token=who.token, signature=envelope.sign(who.key, payload), payload=payload
        )


def output_chunk(channel: ProgramStream, data: bytes, sequence: int) -> bytes:
    if channel is ProgramStream.STDERR:
        return pb.Chunk(stderr=data, sequence=sequence).SerializeToString()
    return pb.Chunk(stdout=data, sequence=sequence).SerializeToString()


def status_chunk(state: str, message: str) -> bytes:
    return pb.Chunk(status=pb.StatusUpdate(state=state, message=message[:512])).SerializeToString()


def encode_result(outcome: CommandOutcomeReport, *, deadline_seconds: float = 0.0) -> bytes:
    duration, payload = duration_of(outcome.seconds), _payload(outcome)
    message = outcome.message[:MESSAGE_LIMIT]
    match outcome.state:
        case ToolState.OK:
            ok = pb.EdgeResult.Ok(exit_code=outcome.exit_code, payload=payload, duration=duration)
            result = pb.EdgeResult(ok=ok)
        case ToolState.TIMED_OUT:
            late = pb.EdgeResult.TimedOut(deadline=duration_of(deadline_seconds), payload=payload)
            result = pb.EdgeResult(timed_out=late)
        case ToolState.CANCELLED:
            result = pb.EdgeResult(cancelled=pb.EdgeResult.Cancelled(reason=message, payload=payload))
        case ToolState.ERROR:
            failed = pb.EdgeResult.Err(
                code=outcome.kind,
                message=message,
                exit_code=outcome.exit_code,
                payload=payload,
                duration=duration,
            )
            result = pb.EdgeResult(err=failed)
    return result.SerializeToString()


def refusal(kind: ErrorKind, message: str) -> CommandOutcomeReport:
    return CommandOutcomeReport(state=ToolState.ERROR, kind=kind, message=message)


def _payload(outcome: CommandOutcomeReport) -> AnyMessage | None:
    if not (outcome.stdout or outcome.stderr or outcome.structured):
        return None
    output = tolerant_pb2.ToolOutput(
        stdout=outcome.stdout[-TAIL_BYTES:],
        stderr=outcome.stderr[-TAIL_BYTES:],
        stdout_truncated=len(outcome.stdout) > TAIL_BYTES,
        stderr_truncated=len(outcome.stderr) > TAIL_BYTES,
    )
    if outcome.structured is not None:
        document = msgspec.json.encode(outcome.structured)
        fits = len(document) <= STRUCTURED_LIMIT_BYTES
        output.structured_json = document if fits else b'{"error":"the answer is too large to send"}'
    packed = AnyMessage()
    packed.Pack(output)
    return packed
