"""Malformed input against a live server, while another caller's connection must notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rpc.asgi_driver import GRPC_HEADERS, drive, scope
from support.rpc.probe import METHODS, SERVICE, Probe, Value
from support.rpc.raw_client import RawClient, connect
from support.rpc.targets import make_app

from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.rpc.serving.framing import prefix

REQUEST = prefix(Value(value=b"1").SerializeToString())
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
LIVE_EXAMPLES = 60

paths = st.sampled_from([f"/{SERVICE}/{name}" for name in METHODS] + ["/no.Such/Method", "/"])
frames = st.one_of(
    st.just(REQUEST),
    st.binary(max_size=40),
    st.builds(
        lambda flag, size, body: struct.pack(">BI", flag, size) + body,
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=40),
    ),
)
header_names = st.sampled_from(
    [
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"content-type",
        b"te",
        b"x-data-bin",
        b"x-text",
        b"behave",
        b"grpc-message",
        b"grpc-status",
        b"authorization",
    ]
)
header_values = st.one_of(
    st.sampled_from(
        [b"", b"1S", b"0n", b"99999999H", b"gzip", b"identity", b"trailers", b"echo", b"abort", b"crash"]
    ),
    st.binary(max_size=30).map(lambda raw: bytes(byte for byte in raw if 0x20 < byte < 0x7F)),
)
headers = st.lists(st.tuples(header_names, header_values), max_size=6)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    app = make_app(Probe())
    spec = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app)
    async with open_listener(spec, grace_seconds=0.2) as listener:
        yield listener.addresses[0]
        await app.drain(0.0)


def against_a_live_server(attack: Callable[[str], Awaitable[None]]) -> None:
    """Attack on one connection while a stream and calls on another go on undisturbed."""

    async def run() -> None:
        async with served() as address, connect(address) as bystander:
            number, conversation = bystander.open(f"/{SERVICE}/Both")
            async with asyncio.timeout(60):
                await attack(address)
            bystander.send(number, REQUEST, end=True)
            assert (await bystander.call(REQUEST)).code == 0
            async with asyncio.timeout(60):
                await conversation.ended.wait()
            assert conversation.code == 0
            assert bystander.goaway is None
            async with connect(address) as newcomer:
                assert (await newcomer.call(REQUEST)).code == 0

    asyncio.run(run())


@settings(deadline=None)
@given(paths, headers, st.lists(frames, max_size=5))
def test_any_request_gets_an_answer_with_a_status(
    path: str, extra: list[tuple[bytes, bytes]], chunks: list[bytes]
) -> None:
    answer = asyncio.run(drive(make_app(Probe()), scope(path, GRPC_HEADERS + extra), *chunks))
    assert answer.status in (200, 415)
    if answer.status == 200:
        assert 0 <= answer.code <= 16
    assert answer.events[-1].get("more_body", False) is False


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40)), max_size=10), st.binary(max_size=64)
)
def test_any_header_bytes_get_an_answer(extra: list[tuple[bytes, bytes]], body: bytes) -> None:
    answer = asyncio.run(drive(make_app(Probe()), scope(f"/{SERVICE}/Unary", GRPC_HEADERS + extra), body))
    assert answer.events


@settings(deadline=None, max_examples=LIVE_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(paths, headers, st.lists(frames, max_size=3), st.booleans()), min_size=1, max_size=8)
)
def test_malformed_calls_harm_no_other_connection(
    calls: list[tuple[str, list[tuple[bytes, bytes]], list[bytes], bool]],
) -> None:
    async def attack(address: str) -> None:
        async with connect(address) as attacker:
            for path, extra, chunks, end in calls:
                if attacker.closed.is_set():
                    break
                _attempt(attacker, path, extra, chunks, end)
            await asyncio.sleep(0.01)

    against_a_live_server(attack)


def _attempt(
    attacker: RawClient, path: str, extra: list[tuple[bytes, bytes]], chunks: list[bytes], end: bool
) -> None:
    number, _ = attacker.open(path, *extra)
    for chunk in chunks:
        attacker.send(number, chunk)
    if end:
        attacker.send(number, b"", end=True)


@settings(deadline=None, max_examples=LIVE_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=200), max_size=4), st.booleans())
def test_bytes_that_are_no_http2_harm_no_other_connection(junk: list[bytes], with_preface: bool) -> None:
    async def attack(address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            if with_preface:
                writer.write(PREFACE)
            for piece in junk:
                writer.write(piece)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    against_a_live_server(attack)


@pytest.mark.parametrize(
    "extra",
    [
        [(b"x-huge", b"v" * 60_000)],
        [(b"x-%d" % index, b"v") for index in range(500)],
        [(b"grpc-timeout", b"1" * 5000 + b"S")],
        [(b":path", b"/twice")],
        [(b"Upper-Case", b"v")],
        [(b"connection", b"keep-alive")],
    ],
    ids=["huge", "many", "long-timeout", "two-paths", "upper-case", "connection"],
)
def test_headers_beyond_bounds_harm_no_other_connection(extra: list[tuple[bytes, bytes]]) -> None:
    async def attack(address: str) -> None:
        async with connect(address) as attacker:
            number, stream = attacker.open(f"/{SERVICE}/Unary", *extra)
            attacker.send(number, REQUEST, end=True)
            async with asyncio.timeout(60):
                await stream.ended.wait()
            assert stream.code != 0

    against_a_live_server(attack)
