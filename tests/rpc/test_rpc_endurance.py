"""Clients at their worst: many, slow, silent, impatient, gone. Each leaves the others unharmed."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from support.rpc.probe import SERVICE, Journal, Probe, Value
from support.rpc.raw_client import RawClient, connect
from support.rpc.targets import KINDS, Certificates, make_app, open_target

from fleetplane.rpc import CallStatistics, GrpcApp, ListenerSpec, open_listener
from fleetplane.rpc.serving.framing import prefix

DOWN = f"/{SERVICE}/Down"
STREAMS = 1000
HOLD = (("behave", "hold-after"),)
REQUEST = prefix(Value(value=b"1").SerializeToString())


@dataclass
class Served:
    address: str
    app: GrpcApp
    journal: Journal
    statistics: CallStatistics

    @property
    def target(self) -> str:
        return self.address.removeprefix("http://")

    def active(self) -> int:
        return sum(method.active for method in self.statistics.methods())

    async def until_active(self, count: int, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while self.active() != count:  # plain integers announce nothing
                await asyncio.sleep(0.01)


@pytest.fixture
async def served(capfd: pytest.CaptureFixture[str]) -> AsyncIterator[Served]:
    probe, statistics = Probe(), CallStatistics()
    app = make_app(probe, statistics=statistics)
    spec = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app)
    async with open_listener(spec, grace_seconds=0.5) as listener:
        yield Served(listener.addresses[0], app, probe.journal, statistics)
        await app.drain(0.0)
    # Whatever clients do, the HTTP server writes nothing into our log, but for an answer that it was
    # writing when its connection went. (grpc's client does, as text.)
    written = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [line for line in written if "connection writer was closed" not in line] == []


async def still_answers(served: Served) -> bool:
    async with connect(served.address) as other:
        return (await other.call(REQUEST)).code == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_thousand_streams_share_one_connection(
    kind: str, tmp_path: Path, certificates: Certificates
) -> None:
    # Hypercorn itself admits no more than a hundred at once.
    count = 90 if kind.endswith("hypercorn") else STREAMS
    async with open_target(kind, tmp_path, certificates) as target:

        async def watch() -> list[bytes]:
            return [message.value async for message in target.down()(Value(value=b"2"), metadata=HOLD)]

        watches = [asyncio.create_task(watch()) for _ in range(count)]
        await target.journal.wait_for("holding", count, seconds=60)
        answer = await target.unary()(Value(value=b"between"), timeout=60)
        assert answer.value == b"between"
        target.journal.release.set()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*watches) == [[b"0", b"1"]] * count


async def test_a_client_that_stops_reading_costs_bounded_memory_and_nobody_else(served: Served) -> None:
    flood = (b"behave", b"flood")
    async with connect(served.address) as stalled:
        stalled.acknowledging = False
        for _ in range(20):
            number, _ = stalled.open(DOWN, flood)
            stalled.send(number, REQUEST, end=True)
        await served.until_active(20)
        before, sent = psutil.Process(os.getpid()).memory_info().rss, -1
        # The flood stands still once every window and buffer on the way is full.
        async with asyncio.timeout(60):
            while sent != len(served.journal.entries):
                sent = len(served.journal.entries)
                await asyncio.sleep(0.3)
        grown = psutil.Process(os.getpid()).memory_info().rss - before
        assert sent < 20 * 40
        assert grown < 64 * 1024 * 1024
        assert await still_answers(served)
        assert served.active() == 20
    await served.until_active(0)
    assert served.statistics.method("probe", DOWN).finished == {1: 20}
    assert served.journal.entries.count("flood ended") > 0


async def test_a_stopped_reader_that_reads_again_gets_the_rest(served: Served) -> None:
    async with connect(served.address) as client:
        client.acknowledging = False
        number, stream = client.open(DOWN)
        client.send(number, prefix(Value(value=b"30000").SerializeToString()), end=True)
        async with asyncio.timeout(60):
            while len(stream.data) < 65_535:  # the window is full, then nothing more comes
                await asyncio.sleep(0.01)
        assert not stream.ended.is_set()
        client.acknowledging = True
        client.h2.acknowledge_received_data(len(stream.data), number)
        client.flush()
        async with asyncio.timeout(60):
            await stream.ended.wait()
    assert stream.code == 0
    assert served.statistics.method("probe", DOWN).sent == 30_000


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_client_that_vanishes_frees_its_streams(served: Served, how: str) -> None:
    async with connect(served.address) as gone:
        for _ in range(50):
            number, _ = gone.open(DOWN, (b"behave", b"hold-after"))
            gone.send(number, REQUEST, end=True)
        await served.journal.wait_for("holding", 50)
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            gone.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        gone.writer.transport.abort() if how == "reset" else gone.writer.close()
    await served.journal.wait_for("cleaned up", 50)
    await served.until_active(0)
    assert served.statistics.method("probe", DOWN).finished == {1: 50}
    assert await still_answers(served)


async def test_a_client_that_vanishes_before_its_request_is_complete_frees_its_call(served: Served) -> None:
    async with connect(served.address) as gone:
        number, _ = gone.open()
        gone.send(number, REQUEST[:4])
        await served.until_active(1)
        gone.writer.transport.abort()
    await served.until_active(0)


async def test_keepalive_pings_are_answered_and_never_told_off(served: Served) -> None:
    async with connect(served.address) as client:
        number, stream = client.open(DOWN, (b"behave", b"hold-after"))
        client.send(number, REQUEST, end=True)
        await served.journal.wait_for("holding")
        for count in range(1, 201):
            client.h2.ping(struct.pack(">Q", count))
            client.flush()
            async with asyncio.timeout(60):
                while client.pongs < count:  # the reader counts
                    await asyncio.sleep(0.001)
        assert client.goaway is None
        assert not stream.ended.is_set()
        served.journal.release.set()
        async with asyncio.timeout(60):
            await stream.ended.wait()
        assert stream.code == 0


async def test_the_official_clients_keepalive_is_welcome_on_a_quiet_stream(served: Served) -> None:
    options = (
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with grpc.aio.insecure_channel(served.target, options=options) as channel:
        call: Any = channel.unary_stream(DOWN, Value.SerializeToString, Value.FromString)(
            Value(value=b"1"), metadata=HOLD
        )
        assert (await call.read()).value == b"0"
        # Quiet for many pings: grpc's own server would have said "too many pings" after a few.
        await asyncio.sleep(3.0)
        assert not call.done()
        served.journal.release.set()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_after_a_burst_of_resets_the_client_recovers(served: Served) -> None:
    """The HTTP server answers a burst of resets by closing the connection politely; clients reconnect."""
    async with connect(served.address) as rude:
        await _burst(rude)
        async with asyncio.timeout(60):
            await rude.closed.wait()
        assert rude.goaway is not None
        assert await still_answers(served)
    await served.until_active(0)


async def _burst(client: RawClient) -> None:
    for _ in range(2000):
        if client.closed.is_set() or client.goaway is not None:
            return
        number, _ = client.open(DOWN)
        client.h2.reset_stream(number)
        client.flush()
        await asyncio.sleep(0)


async def test_an_official_client_that_cancels_in_bursts_recovers_by_itself(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.target) as channel:
        call: Any = channel.unary_stream(DOWN, Value.SerializeToString, Value.FromString)
        for _ in range(5):
            calls = [call(Value(value=b"1"), metadata=HOLD) for _ in range(200)]
            await asyncio.sleep(0.02)
            for each in calls:
                each.cancel()
        unary: Any = channel.unary_unary(
            f"/{SERVICE}/Unary",
            request_serializer=Value.SerializeToString,
            response_deserializer=Value.FromString,
        )
        answer = await unary(Value(value=b"still here"), timeout=60, wait_for_ready=True)
        assert answer.value == b"still here"
    await served.until_active(0)


async def test_stopping_ends_a_thousand_streams_promptly_and_with_unavailable(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with open_target("tcp", tmp_path, certificates) as target:
        ended: Counter[grpc.StatusCode] = Counter()

        async def watch() -> None:
            call = target.down()(Value(value=b"1"), metadata=HOLD)
            while await call.read() is not grpc.aio.EOF:
                pass

        async def watch_to_the_end() -> None:
            try:
                await watch()
            except grpc.aio.AioRpcError as error:
                ended[error.code()] += 1

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(watch_to_the_end())
            await target.journal.wait_for("holding", STREAMS, seconds=60)
            assert target.app is not None
            await target.app.drain(0.0)
        assert ended == {grpc.StatusCode.UNAVAILABLE: STREAMS}
