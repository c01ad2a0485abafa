"""Calls that strangers open and do not go on with: what they may cost, and whom they must not hurt."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hpack import Encoder
from support.rpc.asgi_driver import Answer, drive, scope
from support.rpc.probe import SERVICE, Probe, Value
from support.rpc.targets import make_app, rows
from support.shared.server_process import ServerProcess, running_server

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc
from fleetplane.rpc import Authentication, CallContext, MethodRow
from fleetplane.rpc.listening.doors import (
    REFUSED_PER_CONNECTION,
    UNKNOWN_IN_ALL,
    UNKNOWN_PER_ADDRESS,
    UNKNOWN_PER_CONNECTION,
    UNKNOWN_PER_NEWCOMER,
    UNKNOWN_PER_SITE,
    ListenerMiddleware,
    Strangers,
    Visit,
)
from fleetplane.rpc.listening.warden import SILENT_SECONDS, Budget, Rules, SeenConnection
from fleetplane.rpc.serving.framing import prefix

UNARY, UP = f"/{SERVICE}/Unary", f"/{SERVICE}/Up"
HELLO = prefix(Value(value=b"hello").SerializeToString())
RESOURCE_EXHAUSTED = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
CONNECTIONS, CALLS = 16, 4000
GROWTH_BYTES = 60_000_000
"""Of 961 KB sent; it was 430 to 630 MB. What the HTTP server takes before it refuses is most of it."""
SETTLE_SECONDS = 60.0
PATHS = {
    "device-api": "/nvidia.device.v1alpha1.GpuService/GetGpu",
    "registration": "/nstance.v1.NstanceRegistrationService/RegisterAgent",
    "proxy-agents": "/nxmesh.agent.v1.AgentService/Stream",
    "boards": "/pi_controller.ControlPlaneService/RegisterNode",
    "edge": "/aegis.cluster.v1.NodeCluster/ConnectEdge",
    "web": "/v1/instances/login",
    "operator": "/grpc.health.v1.Health/Watch",
    "agent": "/grpc.health.v1.Health/Watch",
}


# The budget.


def entered(strangers: Strangers, address: str, count: int, *, per_address: int = 0) -> int:
    """How many of so many calls are let in, each on a connection of its own."""
    return sum(strangers.enter(Visit(address, per_address=per_address)) for _ in range(count))


def test_a_connection_an_address_a_site_and_all_together_have_their_share() -> None:
    strangers, one = Strangers(), Visit("192.0.2.1")
    assert sum(strangers.enter(one) for _ in range(999)) == UNKNOWN_PER_CONNECTION
    assert entered(strangers, "192.0.2.1", 9999) == UNKNOWN_PER_ADDRESS - UNKNOWN_PER_CONNECTION
    assert entered(strangers, "192.0.2.2", 9999) == UNKNOWN_PER_ADDRESS
    assert entered(strangers, "192.0.2.3", 9999) == UNKNOWN_PER_SITE - 2 * UNKNOWN_PER_ADDRESS
    assert entered(strangers, "2001:db8::1", 9999) == UNKNOWN_PER_ADDRESS
    assert entered(strangers, "2001:db8::2", 9) == 0, "what one household has counts as one"
    assert entered(strangers, "2001:db8:0:1::1", 9999) == UNKNOWN_PER_ADDRESS
    for site in range(99):
        entered(strangers, f"198.51.{site}.1", UNKNOWN_PER_ADDRESS)
    assert UNKNOWN_IN_ALL <= strangers.open < 2 * UNKNOWN_IN_ALL
    assert entered(strangers, "203.0.113.1", 99) == UNKNOWN_PER_NEWCOMER, "a crowd keeps out no newcomer"


def test_a_balancers_address_has_as_many_as_its_operator_grants_it_connections() -> None:
    assert entered(Strangers(), "10.0.0.1", 9999, per_address=2000) == 2000


def test_what_is_left_is_free_again() -> None:
    strangers, one = Strangers(), Visit("192.0.2.1")
    for _ in range(3 * UNKNOWN_PER_SITE):
        assert strangers.enter(one)
        strangers.leave(one)
    assert (strangers.open, one.unknown) == (0, 0)
    assert repr(strangers) == "<Strangers open=0 refused=0>"


def test_a_connection_that_goes_on_when_it_is_refused_and_one_that_never_asks_are_cut() -> None:
    def seen(number: int) -> SeenConnection:
        peer = ("192.0.2.1", number)
        return SeenConnection(descriptor=number, inode=number, port=80, peer=peer, received_bytes=24)

    strangers, eager, patient = Strangers(), Visit("192.0.2.1"), Visit("192.0.2.1")
    patient.requests = eager.requests = 1
    for _ in range(UNKNOWN_PER_CONNECTION + REFUSED_PER_CONNECTION):
        assert not eager.condemned
        strangers.enter(eager)
    judge = Rules({80: Budget(listener="x", connections=99, per_address=99)})
    visits = {("192.0.2.1", 1): eager, ("192.0.2.1", 2): patient}
    found = [seen(1), seen(2), seen(3)]
    assert [cut.reason for cut in judge.decide(found, visits, now=0.0)] == ["unknown"]
    cuts = judge.decide(found[1:], visits, now=SILENT_SECONDS + 1)
    assert [(cut.seen.descriptor, cut.reason) for cut in cuts] == [(3, "silent")]


# Calls.


class Patient(Probe):
    """A probe whose streams learn who calls from their first message, and then go on."""

    async def Up(self, requests: AsyncIterator[Value], context: CallContext) -> Value:
        async for _ in requests:
            context.recognise()
        return Value()


def door(authentication: Authentication) -> ListenerMiddleware:
    table = [
        MethodRow(path=row.path, listener=row.listener, authentication=authentication, permission=None)
        for row in rows()
    ]
    return ListenerMiddleware(make_app(Patient(), table), name="probe")


@contextlib.asynccontextmanager
async def waiting(
    at: ListenerMiddleware, path: str, count: int, *chunks: bytes
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Calls from one address whose rest does not come, ten on each connection."""
    calls = [
        asyncio.create_task(drive(at, scope(path, client=("192.0.2.1", number // 10)), *chunks, ends=False))
        for number in range(count)
    ]
    try:
        async with asyncio.timeout(60):
            while sum(visit.open for visit in at.visits.values()) + sum(one.done() for one in calls) < count:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # what is refused is told in another turn
        yield calls
    finally:
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("authentication", [Authentication.ANONYMOUS, Authentication.LOCAL])
async def test_calls_without_their_message_are_few_and_others_of_the_address_are_served(
    authentication: Authentication,
) -> None:
    at = door(authentication)
    async with waiting(at, UNARY, UNKNOWN_PER_ADDRESS + 30) as calls:
        refused = [one.result() for one in calls if one.done()]
        assert [(one.code, one.message) for one in refused] == [
            (RESOURCE_EXHAUSTED, "too many calls are open whose callers are not known yet")
        ] * 30
        assert at.strangers.open == UNKNOWN_PER_ADDRESS
        answer = await drive(at, scope(UNARY, client=("192.0.2.1", 9999)), HELLO)
        assert answer.code == 0, "a call that waits for nothing is not counted"
    assert at.strangers.open == 0


async def test_streams_whose_callers_are_known_have_no_budget_together() -> None:
    at = door(Authentication.ANONYMOUS)
    async with waiting(at, UP, 2 * UNKNOWN_PER_SITE, HELLO) as calls:
        assert not any(one.done() for one in calls)
        assert at.strangers.open == 0
        async with waiting(at, UNARY, 1500) as more:
            assert not any(one.done() for one in more), "nor have other calls on their connections"


# A server.


def attack(address: str, path: str) -> tuple[socket.socket, int]:
    """Open calls on a connection and send none of their messages; how many bytes that took."""
    host, _, port = address.partition("://")[2].rpartition(":")
    opened = socket.create_connection((host, int(port)), timeout=60)
    if address.startswith("https"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        opened = context.wrap_socket(opened)
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    encoder = Encoder()
    first, again = (encoder.encode([*fields.items(), ("content-type", "application/grpc")]) for _ in "ab")
    said = PREFACE
    for number in range(1, 2 * CALLS, 2):
        block = first if number == 1 else again
        said += len(block).to_bytes(3, "big") + b"\1\4" + number.to_bytes(4, "big") + block
    opened.settimeout(5)
    with contextlib.suppress(OSError):  # refused, and cut off
        opened.sendall(said)
    return opened, len(said)


def resident(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_open_calls_of_strangers_cost_little_on_every_listener(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        ratios: dict[str, float] = {}
        with contextlib.ExitStack() as stack:
            address = server.address("device-api", "http://").partition("://")[2]
            gpus = gpu_pb2_grpc.GpuServiceStub(stack.enter_context(grpc.insecure_channel(address)))
            gpus.ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
            for listener in set(server.listeners) - {"admin"}:
                before, sent = resident(server), 0
                for _ in range(CONNECTIONS):
                    opened, size = attack(server.address(listener, "http"), PATHS[listener])
                    stack.enter_context(opened)
                    sent += size
                gpus.ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
                deadline, last = time.monotonic() + SETTLE_SECONDS, 0
                while (now := resident(server)) > last and time.monotonic() < deadline:
                    last = now
                    time.sleep(0.3)
                ratios[listener] = (now - before) / sent
                assert now - before < GROWTH_BYTES, ratios
        assert len(ratios) == len(PATHS)
        assert server.stop() == 0
        assert max(ratios.values()) < 60, ratios
