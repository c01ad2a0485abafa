"""Between the wire and the values inside, for both dialects. Pure.

Results and progress are written differently by daemons that follow the documented contract and by
those in the field; here their bytes are told apart and become one kind of value. Towards a daemon
only the pushed configuration and the answer to a rotation differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from fleetplane.domains.edge.kinds import Capabilities, NodeResources, PayloadDialect
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.protobuf_types import duration_of, mapping_of, seconds_of, struct_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp

CAPABILITY_ITEMS_LIMIT = 256
"""Tools, mount points, labels and runtimes, each: what a machine has is dozens."""
CAPABILITY_TEXT_LIMIT = 1024
"""Characters of one of them; a path is the longest."""
CODE_LIMIT = 128
MESSAGE_LIMIT = 8192
"""Characters kept of a daemon's message."""
STRUCTURED_DEPTH = 64
"""Levels of a tool's own JSON: what encodes it again, here and at readers, recurses."""

_VARINT, _LEN = 0, 2
_TIMEOUT, _CANCELLED, _NONZERO_EXIT = "timeout", "cancelled", "nonzero_exit"
DIALECT_FIELD = "x-aegis-edge-dialect"
"""The metadata field in which our own daemon declares its dialect."""


class ResultOutcome(StrEnum):
    OK = "ok"
    ERROR = "error"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended on its daemon."""

    outcome: ResultOutcome
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    structured: dict[str, Any] | None = None
    code: str = ""
    message: str = ""
    duration_seconds: float | None = None


class OutputChannel(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    STATUS = "status"


class ReportedStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: str = ""
    message: str = ""
    percent: float = 0.0


class CommandProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Something that came out of a running command."""

    stream: OutputChannel
    data: bytes = b""
    sequence: int | None = None
    """Of all chunks of a command, or of one of its streams, as the dialect has it; None if not told."""
    status: ReportedStatus | None = None


# Results.


def decode_result(raw: bytes) -> tuple[ToolResult, PayloadDialect]:
    dialect = result_dialect(raw)
    try:
        if dialect is PayloadDialect.LEGACY:
            return _legacy_result(legacy_pb2.LegacyEdgeResult.FromString(raw)), dialect
        return _documented_result(pb.EdgeResult.FromString(raw)), dialect
    except (DecodeError, json_format.Error, ValueError) as error:
        raise InvalidArgument(f"the result cannot be read: {error}", field="result") from error


def result_dialect(raw: bytes) -> PayloadDialect:
    """By which fields there are and how they are written.

    Safe, because a daemon in the field always sets its first field on success, which is a bool,
    and its sixth on failure.
    """
    fields = _fields(raw)
    if fields & {(1, _VARINT), (2, _VARINT)} or any(number in (5, 6, 7) for number, _ in fields):
        return PayloadDialect.LEGACY
    if fields & {(1, _LEN), (2, _LEN), (3, _LEN), (4, _LEN)}:
        return PayloadDialect.DOCUMENTED
    raise InvalidArgument("the result has no outcome", field="result")


def _fields(raw: bytes) -> set[tuple[int, int]]:
    """The numbers and wire types at the top of a message."""
    try:
        unknown = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError as error:
        raise InvalidArgument(f"the result cannot be read: {error}", field="result") from error
    return {(item.field_number, item.wire_type) for item in unknown}  # type: ignore[attr-defined]


def _legacy_result(result: legacy_pb2.LegacyEdgeResult) -> ToolResult:
    kind = result.error_kind
    exit_code: int | None = result.exit_code
    if result.ok:
        outcome = ResultOutcome.OK
    elif kind == _TIMEOUT:
        outcome = ResultOutcome.TIMED_OUT
    elif kind == _CANCELLED:
        outcome = ResultOutcome.CANCELLED
    else:
        outcome = ResultOutcome.ERROR
    if outcome is not ResultOutcome.OK and kind != _NONZERO_EXIT:
        exit_code = exit_code or None  # nothing ran to its end; 0 is only the field's default
    return ToolResult(
        outcome=outcome,
        exit_code=exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        structured=mapping_of(result.structured_result) if result.HasField("structured_result") else None,
        code="" if outcome is ResultOutcome.OK else kind[:CODE_LIMIT] or "unknown",
        message=result.error_message[:MESSAGE_LIMIT],
    )


def _documented_result(result: pb.EdgeResult) -> ToolResult:
    match result.WhichOneof("outcome"):
        case "ok":
            ok = result.ok
            return _with_output(
                ToolResult(
                    outcome=ResultOutcome.OK,
                    exit_code=ok.exit_code,
                    duration_seconds=seconds_of(ok.duration) if ok.HasField("duration") else None,
                ),
                ok.payload,
            )
        case "err":
            err = result.err
            failed = ToolResult(
                outcome=ResultOutcome.ERROR,
                exit_code=err.exit_code or None,
                code=err.code[:CODE_LIMIT] or "unknown",
                message=err.message[:MESSAGE_LIMIT],
                duration_seconds=seconds_of(err.duration) if err.HasField("duration") else None,
            )
            return _with_output(failed, err.payload)
        case "timed_out":
            late = result.timed_out
            message = f"no end within {seconds_of(late.deadline):g} s" if late.HasField("deadline") else ""
            timed_out = ToolResult(outcome=ResultOutcome.TIMED_OUT, code=_TIMEOUT, message=message)
            return _with_output(timed_out, late.payload)
        case "cancelled":
            stopped = result.cancelled
            cancelled = ToolResult(
                outcome=ResultOutcome.CANCELLED, code=_CANCELLED, message=stopped.reason[:MESSAGE_LIMIT]
            )
            return _with_output(cancelled, stopped.payload)
        case _:
            raise InvalidArgument("the result has no outcome", field="result")


def _with_output(result: ToolResult, payload: AnyMessage) -> ToolResult:
    """What a tool returned: ours in full, well-known types by their meaning, others as they are."""
    if not payload.type_url:
        return result
    output, text, raw, document = tolerant_pb2.ToolOutput(), StringValue(), BytesValue(), Struct()
    if payload.Unpack(output):
        structured = _structured(output.structured_json) if output.structured_json else None
        return msgspec.structs.replace(
            result, stdout=output.stdout, stderr=output.stderr, structured=structured
        )
    if payload.Unpack(text):
        return msgspec.structs.replace(result, stdout=text.value.encode())
    if payload.Unpack(raw):
        return msgspec.structs.replace(result, stdout=raw.value)
    if payload.Unpack(document):
        return msgspec.structs.replace(result, structured=mapping_of(document))
    return msgspec.structs.replace(result, stdout=payload.value, structured={"@type": payload.type_url})


def _structured(text: bytes) -> dict[str, Any]:
    """A tool's own JSON, if it is nested no deeper than what every reader behind us can follow."""
    try:
        found = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(f"structured output is nested deeper than {STRUCTURED_DEPTH} levels") from None
    level = [found]
    for _ in range(STRUCTURED_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return found if isinstance(found, dict) else {"value": found}
    raise ValueError(f"structured output is nested deeper than {STRUCTURED_DEPTH} levels")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# Progress.


def decode_progress(event: tolerant_pb2.CommandProgress) -> tuple[CommandProgress, PayloadDialect]:
    chunk = _documented_chunk(event)
    if chunk is None:
        stream = OutputChannel.STDERR if event.stderr else OutputChannel.STDOUT
        return CommandProgress(
            stream=stream, data=event.chunk, sequence=event.sequence
        ), PayloadDialect.LEGACY
    sequence = chunk.sequence or None
    match chunk.WhichOneof("kind"):
        case "stdout":
            return CommandProgress(
                stream=OutputChannel.STDOUT, data=chunk.stdout, sequence=sequence
            ), PayloadDialect.DOCUMENTED
        case "stderr":
            return CommandProgress(
                stream=OutputChannel.STDERR, data=chunk.stderr, sequence=sequence
            ), PayloadDialect.DOCUMENTED
        case _:
            said = chunk.status
            status = ReportedStatus(
                state=said.state[:CODE_LIMIT],
                message=said.message[:MESSAGE_LIMIT],
                percent=said.percent if math.isfinite(said.percent) else 0.0,
            )
            return CommandProgress(
                stream=OutputChannel.STATUS, sequence=sequence, status=status
            ), PayloadDialect.DOCUMENTED


def _documented_chunk(event: tolerant_pb2.CommandProgress) -> pb.Chunk | None:
    """The chunk as a message; None if its bytes are output as it is.

    Output may look like a message, so the surer signs go first: fields that only one dialect has,
    then what the daemon signed.
    """
    if event.HasField("sequence") or event.HasField("stderr"):
        return None
    signed = envelope.parse(event.envelope.payload)
    if signed is not None and signed.kind is envelope.EventKind.COMMAND_PROGRESS:
        short = envelope.short_progress_inner(event.command_id, sequence=0, stderr=False, chunk=event.chunk)
        if signed.inner == short:
            return None
    try:
        chunk = pb.Chunk.FromString(event.chunk)
    except DecodeError:
        return None
    return chunk if chunk.WhichOneof("kind") is not None else None


# Capabilities.


def decode_capabilities(raw: bytes) -> pb.EdgeCapabilities:
    try:
        return pb.EdgeCapabilities.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument(f"the capabilities cannot be read: {error}", field="capabilities") from error


def capabilities_of(said: pb.EdgeCapabilities) -> Capabilities:
    """What a daemon says of itself. Tags, which some send along, are not its to say."""
    labels = dict(said.custom_labels)
    return Capabilities(
        os=_text("os", said.os),
        arch=_text("arch", said.arch),
        local_tools=_texts("local_tools", said.local_tools),
        mount_points=_texts("mount_points", said.mount_points),
        labels=dict(
            zip(_texts("custom_labels", labels), _texts("custom_labels", labels.values()), strict=True)
        ),
        node=resources_of(said.node_capabilities),
    )


def resources_of(said: pb.NodeCapabilities) -> NodeResources:
    return NodeResources(
        gpu_count=said.gpu_count,
        vram_gb=said.vram_gb,
        cpu_cores=said.cpu_cores,
        memory_gb=said.available_memory_gb,
        runtimes=_texts("supported_runtimes", said.supported_runtimes),
    )


def node_capabilities(resources: NodeResources, tags: tuple[str, ...] = ()) -> pb.NodeCapabilities:
    return pb.NodeCapabilities(
        gpu_count=resources.gpu_count,
        vram_gb=resources.vram_gb,
        cpu_cores=resources.cpu_cores,
        available_memory_gb=resources.memory_gb,
        supported_runtimes=resources.runtimes,
        tags=tags,
    )


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if len(values) > CAPABILITY_ITEMS_LIMIT:
        raise InvalidArgument(
            f"{name} has {len(values)} entries, more than {CAPABILITY_ITEMS_LIMIT}", field=name
        )
    return tuple(_text(name, value) for value in values)


def _text(name: str, value: str) -> str:
    if len(value) > CAPABILITY_TEXT_LIMIT or "\0" in value:
        raise InvalidArgument(
            f"{name} must be text of at most {CAPABILITY_TEXT_LIMIT} characters", field=name
        )
    return value


# Towards a daemon.


def stated_dialect(stated: str | None) -> PayloadDialect | None:
    """The dialect that a call's metadata names; None if it names none.

    The library a caller was made with tells nothing: clients of the documented contract use the same.
    """
    return PayloadDialect(stated) if stated is not None and stated in tuple(PayloadDialect) else None


def dialect_of_hello(*, bearer: bool, short_form: bool) -> PayloadDialect | None:
    """What a first message tells of its daemon's dialect; None if it tells nothing.

    The contract asks for a bearer token with the call. Daemons in the field send none, and sign their
    hello in the short form of `envelope`, which the contract does not have.
    """
    if bearer:
        return PayloadDialect.DOCUMENTED
    return PayloadDialect.LEGACY if short_form else None


def invoke_tool(
    command_id: str,
    *,
    tool: str,
    args: Mapping[str, Any],
    security_context: str,
    seal: pb.SealEnvelope,
    deadline_seconds: float,
) -> pb.EdgeCommand:
    """The deadline goes out in whole seconds, rounded up: daemons in the field read nothing finer."""
    return pb.EdgeCommand(
        invoke_tool=pb.InvokeTool(
            command_id=command_id,
            security_context_name=security_context,
            seal_envelope=seal,
            tool_name=tool,
            args=struct_of(args, field="args"),
            deadline=Duration(seconds=math.ceil(deadline_seconds)),
        )
    )


def cancel(command_id: str, reason: str = "") -> pb.EdgeCommand:
    return pb.EdgeCommand(cancel=pb.Cancel(command_id=command_id, reason=reason))


def push_config(dialect: PayloadDialect, *, version: str, document: bytes) -> pb.EdgeCommand:
    """`document` is canonical JSON.

    Daemons in the field expect a Struct where the contract has bytes. Both are length-delimited, so
    a serialized Struct in the bytes field is what they read.
    """
    delta = document
    if dialect is PayloadDialect.LEGACY:
        config = msgspec.json.decode(document, type=dict[str, Any])
        delta = struct_of(config, field="config").SerializeToString()
    return pb.EdgeCommand(push_config=pb.PushConfig(config_delta=delta, version=version))


def drain() -> pb.EdgeCommand:
    return pb.EdgeCommand(drain=pb.Drain())


def shutdown(grace_seconds: float) -> pb.EdgeCommand:
    return pb.EdgeCommand(shutdown=pb.Shutdown(grace=duration_of(grace_seconds)))


def rotation_response(
    dialect: PayloadDialect, *, token: str, issued_at_ns: int, expires_at_ns: int, overlap_seconds: float
) -> pb.RotateEdgeKeyResponse:
    """Callers in the field read the second field as the expiry and the third as the overlap's end."""
    if dialect is PayloadDialect.LEGACY:
        return pb.RotateEdgeKeyResponse(
            node_security_token=token,
            issued_at=timestamp(expires_at_ns),
            expires_at=timestamp(issued_at_ns + round(overlap_seconds * 1e9)),
        )
    return pb.RotateEdgeKeyResponse(
        node_security_token=token,
        issued_at=timestamp(issued_at_ns),
        expires_at=timestamp(expires_at_ns),
        overlap_window=duration_of(overlap_seconds),
    )
