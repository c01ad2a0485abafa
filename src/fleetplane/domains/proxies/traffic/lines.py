"""Lines of the access log, from agents to the database and back. Pure.

A line is a row of texts in the order of `FIELDS`, and lies so in the file: without names, which would be half
of it. Agents send batches by column where they can, which spares both sides a map for every line; from others
a row is read out of each line's map. What is in no field is not kept.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.ports import LEVELS, AccessLogEntry, ErrorLogEntry
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.domains.proxies.traffic.fields import ACCESS, FIELDS, PLACE, Row, plain_fields, row_of
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.telemetry import FoundLine, LogRecord
from fleetplane.kernel.values.times import NS, spelled

AHEAD_NS = 300 * NS
"""How far an agent's clock may run ahead of ours; what is later than that happened now."""
TEXT_LIMIT = 256
"""Of what lines are found by, in characters: hosts and methods are whatever a visitor sent."""
BATCH_LIMIT = 20_000
"""Lines of one batch: agents send 500."""
ERRORS: Final = "error"
_METHOD, _HOST, _STATUS = (PLACE[name] for name in ("method", "host", "status"))
_SEVERITIES: Final = {level: rank for rank, level in enumerate(LEVELS)}
_UNRANKED: Final = _SEVERITIES["info"]
"""Of levels that are an agent's own."""
_ENCODER: Final = msgspec.json.Encoder()


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """A batch by column. Fields that we do not know are left out."""

    time: list[int]
    """Milliseconds."""
    id: list[str]
    fields: dict[str, list[str]]


_COLUMNS: Final = msgspec.msgpack.Decoder(Columns)


def lines_of(agent: Agent, batch: pb.LogBatch, now_ns: int) -> list[LogRecord]:
    made = [line_of(agent, entry, number, now_ns) for number, entry in enumerate(batch.entries)]
    if batch.columns:
        made += _by_column(agent, batch.columns, now_ns)
    return made


def _by_column(agent: Agent, packed: bytes, now_ns: int) -> Iterator[LogRecord]:
    try:
        said = _COLUMNS.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"cannot be read: {error}", field="logs.columns") from error
    count = len(said.time)
    if count > BATCH_LIMIT:
        raise InvalidArgument(f"has {count} lines; the limit is {BATCH_LIMIT}", field="logs.columns")
    if any(len(column) != count for column in (said.id, *said.fields.values())):
        raise InvalidArgument("has columns of different lengths", field="logs.columns")
    missing = [""] * count
    rows = zip(*(said.fields.get(name, missing) for name in FIELDS), strict=True)
    seqs = said.fields.get("seq", missing)
    return _requests(agent, zip(said.time, said.id, rows, seqs, strict=True), now_ns)


def _requests(agent: Agent, said: Iterable[tuple[int, str, Row, str]], now_ns: int) -> Iterator[LogRecord]:
    scope, source, encode = agent.scope, agent.name, _ENCODER.encode
    for number, (time, given, row, seq) in enumerate(said):
        identity = given or _numbered(agent, time, number, f"{row[_METHOD]} {row}")
        yield LogRecord(
            scope=scope,
            stream=ACCESS,
            source=source,
            at_ns=moment_ns(time, now_ns),
            identity=identity,
            sequence=integer(seq),
            code=integer(row[_STATUS]),
            subject=row[_HOST][:TEXT_LIMIT],
            action=row[_METHOD][:TEXT_LIMIT],
            detail=row,
            body=encode((identity, row)),
        )


def line_of(agent: Agent, entry: pb.LogEntry, number: int, now_ns: int) -> LogRecord:
    plain = None if entry.fields.get("id") else plain_fields(entry.message, entry.fields)
    if entry.level == ACCESS or plain is not None:
        row = row_of(entry.fields if plain is None else plain)
        identity = entry.fields.get("id", "") or _numbered(agent, entry.timestamp, number, entry.message)
        seq = entry.fields.get("seq", "") or _unless_numbered(entry, number)
        (line,) = _requests(agent, [(entry.timestamp, identity, row, seq)], now_ns)
        return line
    fields = dict(entry.fields)
    seq = fields.pop("seq", "") or _unless_numbered(entry, number)
    identity = fields.pop("id", "") or _numbered(agent, entry.timestamp, number, entry.message)
    return LogRecord(
        scope=agent.scope,
        stream=ERRORS,
        source=agent.name,
        at_ns=moment_ns(entry.timestamp, now_ns),
        identity=identity,
        sequence=integer(seq),
        code=_SEVERITIES.get(entry.level, _UNRANKED),
        subject=fields.get("source", "")[:TEXT_LIMIT],
        action=entry.level[:TEXT_LIMIT],
        body=_ENCODER.encode(
            _NamedLine(id=identity, message=entry.message, level=entry.level[:TEXT_LIMIT], fields=fields)
        ),
    )


def moment_ns(value: int, now_ns: int) -> int:
    at_ns = wire.moment_ns(value)
    return now_ns if at_ns is None or at_ns > now_ns + AHEAD_NS else at_ns


def _numbered(agent: Agent, time: int, number: int, message: str) -> str:
    """Agents that do not number their lines send a batch again as it was."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{agent.name} {time} {number} {message}"))


def _unless_numbered(entry: pb.LogEntry, number: int) -> str:
    """The place in its batch of a line without an id, which comes again at the same place, if it does."""
    return "" if entry.fields.get("id") else str(number + 1)


class _NamedLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that lies in the file with names: of the error log, and of the access log before it had rows."""

    id: str
    message: str = ""
    level: str = ""
    """Of what is no request."""
    fields: dict[str, str] = {}


_NAMED: Final = msgspec.json.Decoder(_NamedLine)
_ROWS: Final = msgspec.json.Decoder(tuple[str, list[str]])


def _read(body: bytes) -> tuple[str, Mapping[str, str]]:
    if body.startswith(b"["):
        identity, row = _ROWS.decode(body)
        return identity, dict(zip(FIELDS, row, strict=False))  # a row from before may be shorter
    kept = _NAMED.decode(body)
    return kept.id, kept.fields


def access_entry(found: FoundLine) -> AccessLogEntry:
    identity, fields = _read(found.body)
    said = fields.get
    return AccessLogEntry(
        id=identity,
        agent_id=found.source,
        timestamp=spelled(found.at_ns),
        remote_addr=said("remote_addr", ""),
        method=said("method", ""),
        uri=said("uri", ""),
        protocol=said("protocol", ""),
        host=said("host", ""),
        status=integer(said("status", "")),
        body_bytes_sent=integer(said("body_bytes_sent", "")),
        response_time_ms=_number(said("response_time_ms", "")),
        user_agent=said("user_agent", ""),
        referer=said("referer", ""),
        request_id=said("request_id", ""),
    )


def error_entry(found: FoundLine) -> ErrorLogEntry:
    kept = _NAMED.decode(found.body)
    return ErrorLogEntry(
        id=kept.id,
        agent_id=found.source,
        timestamp=spelled(found.at_ns),
        level=kept.level,
        message=kept.message,
        source=kept.fields.get("source", ""),
    )


def integer(text: str) -> int:
    """0 for what is no number: NGINX writes `-` where it has none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
