"""Sends NGINX's logs to the server: lines are parsed, counted and sent batch by batch.

The next batch is sent once the one before it was acknowledged. That is all the back-pressure: a slow server
is sent less, and lines not yet sent stay in the log's own files.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

import msgspec
import structlog

from fleetplane.domains.proxies.nginx.upstreams import UPSTREAM_PREFIX
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.node.logs.tail import FileTail, LineBatch, TailedLine

_NAMESPACE: Final = uuid.UUID("6f0f2b1e-7c0d-5d3a-9a54-0a2f2c1c7a11")
_ERROR: Final = re.compile(
    r"^(?P<time>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) \[(?P<level>\w+)\] (?P<pid>\d+)#\d+: (?P<words>.*)$"
)
_COPIED: Final = (
    "remote_addr",
    "method",
    "uri",
    "protocol",
    "host",
    "status",
    "body_bytes_sent",
    "bytes_sent",
    "request_length",
    "user_agent",
    "referer",
    "request_id",
    "virtual_host_id",
    "stream_id",
    "cache_status",
    "upstream_statuses",
    "location",
    "upstream_id",
)
BUCKETS_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def entry_id(agent_id: str, place: str) -> str:
    """The id of a line: the same whenever it is sent, so that repetitions are recognised."""
    return str(uuid.uuid5(_NAMESPACE, f"{agent_id}:{place}"))


def sequence(place: str) -> str:
    """The number of a line among those of its log: which of two of one moment was written first."""
    generation, _, offset = place.partition(":")[2].partition(":")
    return str(((int(generation) & 0x7F) << 32) + int(offset) + 1)


class AccessLogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the access log; every field is text, and may be empty or `-`."""

    time: str = ""
    remote_addr: str = ""
    method: str = ""
    uri: str = ""
    protocol: str = ""
    host: str = ""
    status: str = ""
    body_bytes_sent: str = ""
    bytes_sent: str = ""
    request_length: str = ""
    request_time: str = ""
    upstream_response_time: str = ""
    user_agent: str = ""
    referer: str = ""
    request_id: str = ""
    virtual_host_id: str = ""
    stream_id: str = ""
    """Of a connection that a stream passed on; empty for requests."""
    cache_status: str = ""
    upstream_statuses: str = ""
    """Of every server that was tried."""
    location: str = ""
    upstream_id: str = ""


_DECODER: Final = msgspec.json.Decoder(AccessLogLine)


def parse_request(text: bytes) -> AccessLogLine | None:
    """None for what is no line of ours. Bytes that are not UTF-8 come from visitors, and are replaced."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return _DECODER.decode(text.decode("utf-8", "replace").encode())
    except msgspec.MsgspecError:
        return None


def access_entry(request: AccessLogLine, *, identity: str, seq: str = "") -> pb.LogEntry:
    fields = {name: value for name in _COPIED if (value := getattr(request, name))}
    if seq:
        fields["seq"] = seq
    if request.upstream_id:
        fields["upstream_id"] = _upstream(request)
    fields["id"] = identity
    fields["response_time_ms"] = _milliseconds(request.request_time)
    if upstream := _upstream_milliseconds(request):
        fields["upstream_response_time_ms"] = upstream
    return pb.LogEntry(
        timestamp=_moment(request),
        level="access",
        message=_told(request),
        fields=fields,
    )


def access_columns(
    requests: Sequence[AccessLogLine], identities: Sequence[str], seqs: Sequence[str]
) -> bytes:
    """The same by field, for servers that take it so. Fields that are empty in every line are left out."""
    fields = {name: [getattr(request, name) for request in requests] for name in _COPIED}
    fields["seq"] = list(seqs)
    fields["upstream_id"] = [_upstream(request) for request in requests]
    fields["response_time_ms"] = [_milliseconds(request.request_time) for request in requests]
    fields["upstream_response_time_ms"] = [_upstream_milliseconds(request) for request in requests]
    told = {name: column for name, column in fields.items() if any(column)}
    times = [_moment(request) for request in requests]
    return msgspec.msgpack.encode({"time": times, "id": identities, "fields": told})


def _upstream(request: AccessLogLine) -> str:
    """NGINX knows the group of servers by a name that is made of its id."""
    return request.upstream_id.removeprefix(UPSTREAM_PREFIX)


def _moment(request: AccessLogLine) -> int:
    return round(_number(request.time) * 1000)


def _upstream_milliseconds(request: AccessLogLine) -> str:
    """Several attempts are separated by commas and colons; the last one answered."""
    if request.upstream_response_time in ("", "-"):
        return ""
    last = re.split(r"[,:]\s*", request.upstream_response_time)[-1].strip(" -")
    return _milliseconds(last) if last else ""


def _told(request: AccessLogLine) -> str:
    if request.stream_id:
        return f"{request.method} {request.uri}"
    return f"{request.method} {request.uri} {request.protocol}"


def error_entry(text: bytes, *, identity: str, seq: str = "") -> pb.LogEntry | None:
    found = _ERROR.match(text.decode("utf-8", "replace"))
    if found is None:
        return None
    local = dt.datetime.strptime(found["time"], "%Y/%m/%d %H:%M:%S").astimezone()
    return pb.LogEntry(
        timestamp=round(local.timestamp() * 1000),
        level=found["level"],
        message=found["words"],
        fields={"source": "nginx_error", "pid": found["pid"], "id": identity} | ({"seq": seq} if seq else {}),
    )


def requests_of(lines: Iterable[TailedLine], agent_id: str) -> Iterator[tuple[AccessLogLine, str, str]]:
    """What can be read, with the id of each line and its number in the log."""
    for line in lines:
        if (request := parse_request(line.text)) is not None:
            yield request, entry_id(agent_id, line.place), sequence(line.place)


def access_batch(
    requests: Sequence[AccessLogLine], identities: Sequence[str], seqs: Sequence[str], *, columns: bool
) -> pb.LogBatch:
    if columns and requests:
        return pb.LogBatch(columns=access_columns(requests, identities, seqs))
    rows = zip(requests, identities, seqs, strict=True)
    return pb.LogBatch(
        entries=[access_entry(request, identity=identity, seq=seq) for request, identity, seq in rows]
    )


def error_entries(lines: Iterable[TailedLine], agent_id: str) -> Iterator[pb.LogEntry]:
    for line in lines:
        identity, seq = entry_id(agent_id, line.place), sequence(line.place)
        if (entry := error_entry(line.text, identity=identity, seq=seq)) is not None:
            yield entry


class LoggedTraffic(msgspec.Struct, kw_only=True):
    """What the access log adds up to. Only ever grows; kept from one agent to the next."""

    responses: dict[str, int] = {}
    """By `class host-id`, such as `2xx 880e8400-...`."""
    request_bytes: int = 0
    response_bytes: int = 0
    durations: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_SECONDS) + 1))
    """Requests per bucket, the last for those slower than all."""
    duration_seconds: float = 0.0
    unreadable: int = 0

    def count(self, request: AccessLogLine) -> None:
        """Requests only: a connection of a stream may have carried thousands of them, or none."""
        if request.stream_id:
            return
        status = request.status
        code_class = f"{status[0]}xx" if status[:1] in ("1", "2", "3", "4", "5") else "other"
        key = f"{code_class} {request.virtual_host_id}"
        self.responses[key] = self.responses.get(key, 0) + 1
        self.request_bytes += int(_number(request.request_length))
        self.response_bytes += int(_number(request.bytes_sent))
        seconds = _number(request.request_time)
        self.duration_seconds += seconds
        bucket = next((i for i, edge in enumerate(BUCKETS_SECONDS) if seconds <= edge), len(BUCKETS_SECONDS))
        self.durations[bucket] += 1

    def copy(self) -> LoggedTraffic:
        return msgspec.structs.replace(self, responses=dict(self.responses), durations=list(self.durations))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0.0 <= number < 1e15 else 0.0


def _milliseconds(text: str) -> str:
    return f"{_number(text) * 1000:g}"


def read_traffic(note: str) -> LoggedTraffic:
    """What was counted before; nothing if there is no note or it is of another make."""
    try:
        traffic = msgspec.json.decode(note, type=LoggedTraffic)
    except msgspec.MsgspecError:
        return LoggedTraffic()
    return traffic if len(traffic.durations) == len(BUCKETS_SECONDS) + 1 else LoggedTraffic()


ATTEMPTS: Final = 6
"""For a batch that the server refuses in words. Then it goes, lest it hold up all that follow."""

Deliver = Callable[[pb.LogBatch], Awaitable[str]]
"""Send a batch and wait for its receipt; what the server had against it, empty if nothing."""


@dataclass(frozen=True, slots=True)
class Parcel:
    message: pb.LogBatch
    lines: int
    note: str = ""
    """To be remembered together with the place in the log."""


class ShippedLog(Protocol):
    tail: FileTail

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:
        """`columns`: whether the server takes the access log by field."""

    def done(self) -> None: ...


class AccessLog:
    """Its lines are also counted, each once: the sums are kept in the same file as the place."""

    def __init__(self, tail: FileTail) -> None:
        self.tail = tail
        self.traffic = read_traffic(tail.note)
        self._next = self.traffic

    def __repr__(self) -> str:
        return f"<AccessLog {self.tail!r}>"

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:
        traffic: LoggedTraffic = self.traffic.copy()
        requests, identities, seqs = [], [], []
        for request, identity, seq in requests_of(batch.lines, agent_id):
            requests.append(request)
            identities.append(identity)
            seqs.append(seq)
            traffic.count(request)
        traffic.unreadable += len(batch.lines) - len(requests)
        self._next = traffic
        note = msgspec.json.encode(traffic).decode()
        return Parcel(access_batch(requests, identities, seqs, columns=columns), len(requests), note)

    def done(self) -> None:
        self.traffic = self._next


class ErrorLog:
    def __init__(self, tail: FileTail) -> None:
        self.tail = tail

    def __repr__(self) -> str:
        return f"<ErrorLog {self.tail!r}>"

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:  # noqa: ARG002  # few lines
        message = pb.LogBatch(entries=error_entries(batch.lines, agent_id))
        return Parcel(message, len(message.entries))

    def done(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippingPolicy:
    pause_seconds: float = 1.0
    """Between looks at a log that has nothing new, or little."""
    backoff: Backoff = field(default_factory=lambda: Backoff(first_seconds=0.5, ceiling_seconds=10.0))


class Shipper:
    def __init__(
        self,
        log: ShippedLog,
        *,
        clock: Clock,
        logger: structlog.typing.FilteringBoundLogger,
        policy: ShippingPolicy | None = None,
    ) -> None:
        self._log = log
        self._clock = clock
        self._logger = logger
        self._policy = policy or ShippingPolicy()
        self.refused_lines = 0

    def __repr__(self) -> str:
        return f"<Shipper {self._log!r} refused={self.refused_lines}>"

    @property
    def refused_files(self) -> tuple[str, ...]:
        """Files under the log's names that are no logs."""
        return self._log.tail.refused

    async def run(self, deliver: Deliver, agent_id: str, *, columns: bool = False) -> NoReturn:
        """Ship lines over one connection; the next one begins after the last acknowledged line."""
        while True:
            full = False
            try:
                batch = await asyncio.to_thread(self._log.tail.read)
                full = batch.full
                if batch.lines:
                    await self._ship(self._log.pack(batch, agent_id, columns=columns), batch, deliver)
            except (
                OSError
            ) as error:  # a file that just went, or a full disk: what was not committed comes again
                self._logger.warning("log_not_read", log=repr(self._log), error=str(error))
            if not full:
                await self._clock.sleep(self._policy.pause_seconds)

    async def _ship(self, parcel: Parcel, batch: LineBatch, deliver: Deliver) -> None:
        if parcel.lines and (fault := await self._deliver(parcel.message, deliver)):
            self.refused_lines += parcel.lines
            self._logger.error("log_lines_refused", lines=parcel.lines, error=fault)
        self._log.tail.commit(batch, parcel.note)
        self._log.done()

    async def _deliver(self, message: pb.LogBatch, deliver: Deliver) -> str:
        fault = ""
        for attempt in range(ATTEMPTS):
            if not (fault := await deliver(message)):
                return ""
            jitter = self._clock.random()
            await self._clock.sleep(self._policy.backoff.delay_seconds(attempt, jitter=jitter))
        return fault
