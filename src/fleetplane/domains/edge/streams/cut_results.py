"""Results that are too large to be taken as a whole: what can be told from their beginning. Pure.

A daemon in the field repeats all of a command's output in its result. How the command ended stands before
that, and so does the envelope; what stands after it, such as why something failed, is lost with the rest.
The output itself was streamed before, and its end is kept from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.wire.messages import ResultOutcome, ToolResult
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2

CUT = "result_cut"
_VARINT, _LEN = 0, 2
_EVENT_RESULT, _ENVELOPE, _COMMAND_ID, _RESULT = 3, 1, 2, 3
_ARMS = {1: ResultOutcome.OK, 2: ResultOutcome.ERROR, 3: ResultOutcome.TIMED_OUT, 4: ResultOutcome.CANCELLED}
"""The documented dialect's, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    event: tolerant_pb2.CommandResult
    """Envelope and command, without a result."""
    said: ToolResult
    dialect: PayloadDialect


@dataclass(frozen=True, slots=True)
class _WireField:
    number: int
    kind: int
    value: int
    """Of a number; else where the content begins."""
    end: int
    """Where the content ends, which may be beyond what is there."""


def read(head: bytes, size: int) -> CutResult | None:
    """What the beginning of an event says; None if it is not a result, or breaks off before it says how."""
    outer = next(_fields(head, 0, size), None)
    if outer is None or (outer.number, outer.kind) != (_EVENT_RESULT, _LEN):
        return None
    event = tolerant_pb2.CommandResult()
    for found in _fields(head, outer.value, outer.end):
        content = head[found.value : found.end]
        whole = found.end <= len(head)
        try:
            match found.number:
                case 1 if whole:
                    event.envelope.ParseFromString(content)
                case 2 if whole:
                    event.command_id = content.decode()
                case 3 if event.command_id and event.HasField("envelope"):
                    said, dialect = _outcome(head, found, size)
                    return CutResult(event=event, said=said, dialect=dialect)
                case _:
                    return None
        except (DecodeError, UnicodeDecodeError):
            return None
    return None


def _outcome(head: bytes, result: _WireField, size: int) -> tuple[ToolResult, PayloadDialect]:
    mark = f"the result had {size} bytes and was cut"
    ok, exit_code = False, 0
    for found in _fields(head, result.value, result.end):
        if found.kind == _LEN and found.number in _ARMS and not (ok or exit_code):
            # Output before any number: of the documented dialect, or of one in the field that failed.
            code = next((one.value for one in _fields(head, found.value, found.end) if _is_code(one)), None)
            outcome = _ARMS[found.number] if found.number in (1, 2) else ResultOutcome.ERROR
            if found.number in (1, 2):
                said = ToolResult(
                    outcome=outcome,
                    exit_code=code or 0,
                    message=mark,
                    code="" if outcome is ResultOutcome.OK else CUT,
                )
                return said, PayloadDialect.DOCUMENTED
            break
        if found.kind != _VARINT:
            break
        if found.number == 1:
            ok = bool(found.value)
        elif found.number == 2:
            exit_code = found.value - (1 << 64) if found.value >= 1 << 63 else found.value
    if ok:
        return ToolResult(outcome=ResultOutcome.OK, exit_code=exit_code, message=mark), PayloadDialect.LEGACY
    why = "nonzero_exit" if exit_code else CUT
    said = ToolResult(outcome=ResultOutcome.ERROR, exit_code=exit_code or None, code=why, message=mark)
    return said, PayloadDialect.LEGACY


def _is_code(field: _WireField) -> bool:
    return (field.number, field.kind) == (1, _VARINT)


def _fields(data: bytes, at: int, end: int) -> Iterator[_WireField]:
    """The fields of a message that may break off; ends where nothing more can be read."""
    end = min(end, 1 << 62)
    while at < min(end, len(data)):
        tag, at = _varint(data, at)
        if tag is None:
            return
        number, kind = tag >> 3, tag & 7
        value, after = _varint(data, at) if kind in (_VARINT, _LEN) else (None, at)
        if value is None:
            return
        if kind == _VARINT:
            yield _WireField(number, kind, value, after)
            at = after
        else:
            yield _WireField(number, kind, after, after + value)
            at = after + value


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return None, at
