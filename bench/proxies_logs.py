"""Access logs of proxies: lines taken from agents per second, and an hour asked for among five million.

**Taking.** Agents are official gRPC clients over TLS, on the other core, that have everything to send
ready as bytes: batches of 500 lines, as the product's agent sends them (by column, and beside it line by
line, as older agents do), a few unacknowledged at a time, six lines in each millisecond. A batch that is
refused because the server's queue is full is sent again, as agents do. The clock runs until the last line can
be asked for; the processor's time is the server's, for everything: TLS, decoding, writing, summing up.

**Asking.** Five million lines of one day are put into the server's file by the server's own writer before
it starts; sending them would take minutes and show nothing else. The question is asked over
REST, with the number of all matches, which is part of every answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec

from bench import servers
from bench.figures import Effort, Row, alone
from bench.proxies_rollout import PASSWORD, _post, _workspace, settings
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec
from fleetplane.domains.proxies.traffic.lines import line_of
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.telemetry import LogRecord, TelemetryLimits
from fleetplane.kernel.telemetry.sqlite import database
from fleetplane.kernel.telemetry.sqlite.writing import SqliteSeriesWriter

STREAM = "/nxmesh.agent.v1.AgentService/Stream"
AGENTS = 4
SENT_LINES = 200_000
BATCH_LINES = 500
UNACKNOWLEDGED = 8
"""Batches of one agent on their way."""
KEPT_LINES = 5_000_000
WRITTEN_AT_ONCE = 10_000
SPAN_NS = 24 * 3600 * 10**9
QUESTIONS = 5
LINES_PER_MILLISECOND = 6
"""Of each agent, as 24,000 a second of four are."""
LEAST_LINES_PER_SECOND = 10_000.0
LEAST_LINES_PER_CORE_SECOND = 60_000.0
"""2.5 times what it was before lines came in columns."""
MUST_SECONDS = 1.0
DEADLINE_SECONDS = 120.0


def entry(number: int, at_ms: int, agent: str) -> pb.LogEntry:
    """Every twentieth failed."""
    status = "500" if number % 20 == 0 else "200"
    fields = {
        "id": f"{agent}-{number}",
        "remote_addr": "192.0.2.17",
        "method": "GET",
        "protocol": "HTTP/1.1",
        "uri": f"/api/v1/things/{number}?page=2",
        "status": status,
        "host": f"h{number % 8}.example.com",
        "body_bytes_sent": "512",
        "bytes_sent": "760",
        "request_length": "420",
        "response_time_ms": "12.5",
        "user_agent": "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
        "request_id": f"{number:032x}",
        "virtual_host_id": "880e8400-e29b-41d4-a716-446655440004",
        "location": "/api/",
        "upstream_id": "990e8400-e29b-41d4-a716-446655440004",
    }
    message = f"GET {fields['uri']} HTTP/1.1"
    return pb.LogEntry(timestamp=at_ms, level="access", message=message, fields=fields)


# Taking.


def by_column(batch: pb.LogBatch) -> pb.LogBatch:
    """As agents send it to servers that take columns."""
    rows = [dict(one.fields) for one in batch.entries]
    names = {name for row in rows for name in row} - {"id"}
    packed = {
        "time": [one.timestamp for one in batch.entries],
        "id": [row["id"] for row in rows],
        "fields": {name: [row.get(name, "") for row in rows] for name in names},
    }
    return pb.LogBatch(columns=msgspec.msgpack.encode(packed))


class Sender:
    """One agent with lines to send."""

    def __init__(
        self, channel: grpc.aio.Channel, token: str, lines: int, now_ms: int, *, columns: bool
    ) -> None:
        self._open: Any = channel.stream_stream(
            STREAM, request_serializer=bytes, response_deserializer=pb.MasterMessage.FromString
        )
        self._token = token
        self._now_ms = now_ms
        self._lines = lines
        self._columns = columns
        self._batches: dict[str, bytes] = {}
        """By the number under which each is acknowledged."""
        self.refused = 0
        self._call: Any = None

    async def connect(self) -> None:
        self._call = self._open()
        registration = pb.AgentMessage(registration=pb.RegistrationRequest(token=self._token))
        await self._call.write(registration.SerializeToString())
        answer = (await self._call.read()).registration_response
        assert answer.success, answer
        await self._call.write(
            pb.AgentMessage(health=pb.HealthReport(nginx=pb.NginxStatus(is_running=True))).SerializeToString()
        )
        self._prepare(answer.agent_id)

    def _prepare(self, agent: str) -> None:
        for number, start in enumerate(range(0, self._lines, BATCH_LINES), 1):
            stop = min(start + BATCH_LINES, self._lines)
            batch = pb.LogBatch(entries=[entry(n, self._moment(n), agent) for n in range(start, stop)])
            if self._columns:
                batch = by_column(batch)
            message = pb.AgentMessage(agent_id=agent, timestamp=number, logs=batch)
            self._batches[str(number)] = message.SerializeToString()

    def _moment(self, number: int) -> int:
        return self._now_ms - (self._lines - number) // LINES_PER_MILLISECOND

    async def send(self) -> None:
        """Until every batch was taken."""
        waiting = list(reversed(self._batches))
        underway = 0
        while waiting or underway:
            while waiting and underway < UNACKNOWLEDGED:
                await self._call.write(self._batches[waiting.pop()])
                underway += 1
            message = await self._call.read()
            if message.WhichOneof("payload") != "ack" or message.ack.message_id not in self._batches:
                continue
            underway -= 1
            if not message.ack.success:
                self.refused += 1
                waiting.append(message.ack.message_id)
                await asyncio.sleep(0.05)  # as agents wait before they try again


@dataclass(frozen=True, slots=True)
class Taken:
    per_second: float
    """Until all can be asked for."""
    per_core_second: float
    again: int
    """Batches that had to be sent again."""


async def _taken(server: servers.Server, said: dict[str, list[str]], lines: int, *, columns: bool) -> Taken:
    now_ms = time.time_ns() // 1_000_000
    async with _workspace(said["web"][0]) as (web, workspace), contextlib.AsyncExitStack() as stack:
        root = (await web.get(f"{said['web'][0]}/.well-known/ca.pem")).content
        address, senders = said["proxy-agents"][0].removeprefix("https://"), []
        for number in range(AGENTS):
            channel = grpc.aio.secure_channel(
                address, grpc.ssl_channel_credentials(root), [("grpc.use_local_subchannel_pool", 1)]
            )
            token = (await _post(web, f"/workspaces/{workspace}/agents/tokens", {"name": f"a{number}"}))[
                "token"
            ]
            opened = await stack.enter_async_context(channel)
            sender = Sender(opened, token, lines // AGENTS, now_ms, columns=columns)
            await sender.connect()
            senders.append(sender)
        begun, used = time.perf_counter(), server.cpu_seconds()
        await asyncio.gather(*(sender.send() for sender in senders))
        path = f"/workspaces/{workspace}/access-logs?limit=1"
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await web.get(path)).json()["meta"]["total"] < lines // AGENTS * AGENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return Taken(
            per_second=lines / (time.perf_counter() - begun),
            per_core_second=lines / (server.cpu_seconds() - used),
            again=sum(sender.refused for sender in senders),
        )


# Asking.


def _fill(path: Path, scope: str, agent: str, lines: int, *, until_ns: int) -> None:
    """A day's lines, evenly spread, as the server would have written them."""
    database.prepare(path)
    writer = SqliteSeriesWriter(path, TelemetryLimits())
    step = SPAN_NS // lines
    good, failed = (_pattern(scope, agent, number, until_ns) for number in (1, 20))
    try:
        for start in range(0, lines, WRITTEN_AT_ONCE):
            numbers = range(start, min(start + WRITTEN_AT_ONCE, lines))
            writer.write(
                [],
                [
                    (good if number % 20 else failed)(number, until_ns - SPAN_NS + number * step)
                    for number in numbers
                ],
            )
    finally:
        writer.close()


def _pattern(scope: str, agent: str, sample: int, now_ns: int) -> Callable[[int, int], LogRecord]:
    """Makes lines like the one that the server makes of a sample, with another number and moment."""
    someone = Agent(
        kind=AGENT.name,
        scope=scope,
        name=agent,
        uid=agent,
        labels={},
        spec=AgentSpec(name=agent),
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )
    like = line_of(someone, entry(sample, now_ns // 1_000_000, agent), 0, now_ns)
    head, _, tail = like.body.partition(b"%s-%d" % (agent.encode(), sample))

    def made(number: int, at_ns: int) -> LogRecord:
        identity = f"{agent}-{number}"
        return LogRecord(
            scope=scope,
            stream=like.stream,
            source=agent,
            at_ns=at_ns,
            identity=identity,
            code=like.code,
            subject=like.subject,
            action=like.action,
            body=b"%s%s%s" % (head, identity.encode(), tail),
        )

    return made


@contextlib.contextmanager
def _server(directory: Path, core: int) -> Iterator[tuple[servers.Server, dict[str, list[str]]]]:
    with servers.fleetplane(directory / "data", core, settings(directory), domains="proxies") as server:
        yield server, json.loads((directory / "data.ready").read_text())["listeners"]


@contextlib.asynccontextmanager
async def _someone(address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{address}/v1", timeout=60) as web:
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        web.headers["Authorization"] = f"Bearer {(await _post(web, '/auth/login', login))['access_token']}"
        yield web


async def _place(address: str) -> tuple[str, str]:
    """A workspace's id and the scope of what lies in it."""
    async with _workspace(address) as (web, workspace):
        found = (await web.get(f"/workspaces/{workspace}")).json()
        return workspace, f"org/{found['organization_id']}/ws/{workspace}"


async def _asked(
    address: str, workspace: str, until_ns: int, *, hours: int = 1, **query: str
) -> tuple[float, int]:
    """Seconds for an answer, the best of some, and how many lines matched."""
    took, total = [], 0
    async with _someone(address) as web:
        stop = dt.datetime.fromtimestamp(until_ns // 10**9, dt.UTC)
        window = {"from": _spelled(stop - dt.timedelta(hours=hours)), "to": _spelled(stop)}
        for _ in range(QUESTIONS):
            begun = time.perf_counter()
            answer = await web.get(f"/workspaces/{workspace}/access-logs", params={**window, **query})
            took.append(time.perf_counter() - begun)
            total = answer.raise_for_status().json()["meta"]["total"]
    return min(took), total


def _spelled(moment: dt.datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    sent, kept = (4_000, 50_000) if quick else (SENT_LINES, KEPT_LINES)
    with servers.load_core() as core:
        taken = {}
        for columns in (False, True):
            with servers.scratch() as directory, _server(directory, core) as (server, said):
                taken[columns] = asyncio.run(_taken(server, said, sent, columns=columns))
        rate, again = taken[True].per_second, taken[True].again
        with servers.scratch() as directory:
            with _server(directory, core) as (_, said):
                workspace, scope = asyncio.run(_place(said["web"][0]))
            until_ns, begun = time.time_ns() // 10**9 * 10**9, time.perf_counter()
            _fill(directory / "data" / "telemetry.db", scope, "bench", kept, until_ns=until_ns)
            filled = time.perf_counter() - begun
            with _server(directory, core) as (_, said):
                web, late = said["web"][0], until_ns - SPAN_NS // 2
                hour, among = asyncio.run(_asked(web, workspace, late))
                failed, failures = asyncio.run(_asked(web, workspace, late, status_code="5xx"))
                day, everything = asyncio.run(_asked(web, workspace, until_ns, hours=24))
    return [
        Row(
            figure=f"Access log lines taken from {AGENTS} agents",
            ours=f"{rate:,.0f} lines/s",
            reference="",
            ratio=None,
            must_reach=f"{LEAST_LINES_PER_SECOND:,.0f} lines/s",
            reached=rate >= LEAST_LINES_PER_SECOND,
            note=f"{sent:,} lines until the last could be asked for; {again} batches sent again",
        ),
        Row(
            figure="Access log lines taken, per second of a core",
            ours=f"{taken[True].per_core_second:,.0f} lines/s",
            reference=f"{taken[False].per_core_second:,.0f}, by line",
            ratio=taken[True].per_core_second / taken[False].per_core_second,
            must_reach=f"{LEAST_LINES_PER_CORE_SECOND:,.0f} lines/s",
            reached=taken[True].per_core_second >= LEAST_LINES_PER_CORE_SECOND,
            note="the server's whole processor time; the reference is the same server with older agents",
        ),
        Row(
            figure=f"An hour of access log, asked for among {kept / 1e6:g} million lines",
            ours=f"{hour:.3f} s",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_SECONDS:g} s",
            reached=hour < MUST_SECONDS,
            note=f"{among:,} lines matched, 100 were shown; of failures only: {failed:.3f} s, "
            f"{failures:,} matched; of the whole day: {day:.3f} s, {everything:,} matched; "
            f"filling took {filled:.0f} s",
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
