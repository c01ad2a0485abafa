"""What no official client sends: the same malformed requests to our layer and to a grpc.aio server.

Each row says what both answer, and where we mean to differ, why. Ours must answer so. grpc.aio is there to
say what others do: another answer of it fails the row, and none, on a machine that stood still, does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from support.rpc.probe import SERVICE, ImmediateProbe, Probe, Value
from support.rpc.raw_client import connect
from support.rpc.targets import grpc_handlers, make_app

from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.rpc.serving.framing import prefix

REQUEST = prefix(Value(value=b"1").SerializeToString())
SILENCE = "silence"
RESET = "reset"
PATIENCE_SECONDS = 60.0
SILENCE_SECONDS = 0.5
"""How long nothing must come for it to count as silence."""

Outcome = int | str | tuple[str, int]
"""A gRPC status code, an HTTP status, a reset stream, or nothing at all."""


@dataclass(frozen=True)
class Case:
    name: str
    ours: Outcome
    grpc_aio: Outcome
    reason: str = ""
    """Why they differ, if they do."""
    body: bytes = REQUEST
    headers: tuple[tuple[bytes, bytes], ...] = ()
    without: tuple[bytes, ...] = ()


CASES = (
    Case("well-formed", 0, 0),
    Case("malformed timeout", 13, 13, headers=((b"grpc-timeout", b"abc"),)),
    Case(
        "nine digits of timeout",
        13,
        0,
        "the protocol allows eight; grpc takes more than it says",
        headers=((b"grpc-timeout", b"123456789S"),),
    ),
    Case(
        "two messages",
        12,
        0,
        "grpc ignores the second; dropping data in silence helps nobody",
        body=REQUEST * 2,
    ),
    Case(
        "no message",
        12,
        SILENCE,
        "grpc waits for ever, though the request has ended",
        body=b"",
    ),
    Case("half a message", 13, SILENCE, "the same", body=REQUEST[:-1]),
    Case(
        "unknown flags",
        13,
        0,
        "the other seven bits are reserved",
        body=b"\x02" + REQUEST[1:],
    ),
    Case("marked compressed without an encoding", 13, 13, body=b"\x01" + REQUEST[1:]),
    Case(
        "unknown encoding",
        12,
        13,
        "the protocol asks for UNIMPLEMENTED and grpc-accept-encoding, so that clients can fall back",
        headers=((b"grpc-encoding", b"zstd"),),
    ),
    Case(
        "foreign content type",
        ("http", 415),
        0,
        "the protocol asks for 415; forms and scripts of a web page must not reach a method",
        headers=((b"content-type", b"text/html"),),
    ),
    Case("no content type", ("http", 415), 0, "the same", without=(b"content-type",)),
    Case("no te", 13, RESET, "a status that names the cause instead of a bare reset", without=(b"te",)),
    Case("not POST", RESET, RESET, headers=((b":method", b"GET"),)),
    Case(
        "binary metadata that is no base64",
        0,
        13,
        "metadata is read when a handler asks for it; what it cannot read is not there",
        headers=((b"x-bin", b"%%%"),),
    ),
)


@contextlib.asynccontextmanager
async def serve(kind: str) -> AsyncIterator[str]:
    if kind != "grpc.aio":
        app = make_app(ImmediateProbe() if kind == "immediate" else Probe())
        spec = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app)
        async with open_listener(spec, grace_seconds=0.1) as listener:
            yield listener.addresses[0]
        return
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, grpc_handlers(Probe())),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def observe(address: str, case: Case, patience_seconds: float) -> Outcome:
    async with connect(address) as client:
        number, stream = client.open(f"/{SERVICE}/Unary", *case.headers, drop=case.without)
        client.send(number, case.body, end=True)
        try:
            async with asyncio.timeout(patience_seconds):
                await stream.ended.wait()
        except TimeoutError:
            return SILENCE
        if stream.code is not None:
            return stream.code
        if stream.reset is not None:
            return RESET
        if not stream.headers:
            return SILENCE  # the connection ended first
        return ("http", int(stream.headers[b":status"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_malformed_request_gets_the_answer_of_the_table(case: Case) -> None:
    async with serve("ours") as ours, serve("immediate") as immediate, serve("grpc.aio") as theirs:
        for address in (ours, immediate):
            assert await observe(address, case, PATIENCE_SECONDS) == case.ours
        patience = SILENCE_SECONDS if case.grpc_aio == SILENCE else PATIENCE_SECONDS
        assert await observe(theirs, case, patience) in (case.grpc_aio, SILENCE)


def test_every_difference_has_a_reason_and_nothing_else_does() -> None:
    for case in CASES:
        assert bool(case.reason) == (case.ours != case.grpc_aio), case.name
