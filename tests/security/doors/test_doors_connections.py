"""Connections that only cost: too many, too slow, or full of frames that ask for nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from support.shared.server_process import ServerProcess, running_server

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc
from fleetplane.rpc.listening.doors import Visit
from fleetplane.rpc.listening.warden import (
    FLOOD_ALLOWANCE_BYTES,
    HEAD_SECONDS,
    Budget,
    Rules,
    SeenConnection,
)

WAIT_SECONDS = 60.0
PORT = 8080
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)
SETTINGS = bytes([0, 0, 60, 4, 0, 0, 0, 0, 0]) + bytes([0, 3, 0, 0, 0, 100]) * 10
SMALL = ("--set", "listeners.web.connections=40", "--set", "listeners.device-api.connections=80")


def rules(*, connections: int = 100, per_address: int = 50, http1: bool = False, tls: bool = False) -> Rules:
    budget = Budget(listener="web", connections=connections, per_address=per_address, http1=http1, tls=tls)
    return Rules({PORT: budget})


def seen(number: int, host: str = "192.0.2.1", *, received: int = 0, sent: int = 0) -> SeenConnection:
    return SeenConnection(
        descriptor=number,
        inode=1000 + number,
        port=PORT,
        peer=(host, number),
        received_bytes=received,
        sent_bytes=sent,
    )


def visit(*, requests: int = 1, open: int = 0, active_at: float = 0.0, body: int = 0) -> Visit:  # noqa: A002
    made = Visit()
    made.requests, made.open, made.active_at, made.body_bytes = requests, open, active_at, body
    return made


def test_an_address_beyond_its_share_loses_the_quietest_and_nobody_else_does() -> None:
    found = [seen(number) for number in range(5)] + [seen(9, "192.0.2.2")]
    visits = {found[0].peer: visit(open=1), found[1].peer: visit(active_at=5.0), found[2].peer: visit()}
    cuts = rules(per_address=2).decide(found, visits, now=10.0)
    assert sorted(cut.seen.descriptor for cut in cuts) == [2, 3, 4]
    assert {cut.reason for cut in cuts} == {"address"}


def test_a_full_listener_takes_from_whoever_holds_most() -> None:
    crowd = [seen(number, f"192.0.2.{number % 3}") for number in range(30)]
    lonely = seen(99, "192.0.2.99")
    cuts = rules(connections=20, per_address=20).decide([*crowd, lonely], {}, now=1.0)
    assert len(cuts) == 11
    assert lonely not in [cut.seen for cut in cuts]
    assert {cut.reason for cut in cuts} == {"crowded"}


def test_bytes_that_no_request_explains_are_a_flood() -> None:
    quiet = rules()
    for look in range(3):
        assert quiet.decide([seen(1, received=look * 17)], {}, now=float(look)) == []
    flooded = rules()
    total = 0
    cut_at = None
    for look in range(20):
        total += 2 * 1024 * 1024
        if flooded.decide([seen(1, received=total, sent=total)], {}, now=float(look)):
            cut_at = total
            break
    assert cut_at is not None
    assert cut_at <= 2 * FLOOD_ALLOWANCE_BYTES


def test_uploads_downloads_and_many_requests_are_no_floods() -> None:
    total = 0
    uploading, asking, receiving = rules(), rules(), rules()
    for look in range(60):
        total += 10 * 1024 * 1024
        now = float(look)
        sending = {("192.0.2.1", 1): visit(open=1, body=total)}
        assert uploading.decide([seen(1, received=total)], sending, now=now) == []
        many = {("192.0.2.1", 1): visit(requests=total // 1000)}
        assert asking.decide([seen(1, received=total)], many, now=now) == []
        reading = {("192.0.2.1", 1): visit(open=1)}
        assert receiving.decide([seen(1, received=total // 10, sent=total)], reading, now=now) == []


@pytest.mark.parametrize(
    ("size", "tls", "http1", "goes"),
    [
        (1, False, False, True),
        (17, False, False, False),  # a PING, as clients send to keep an idle channel
        (23, True, False, True),  # one byte in a record
        (39, True, False, False),  # a PING in a record
        (200, False, True, True),  # more and more header fields
    ],
)
def test_a_head_that_trickles_is_cut_and_keepalives_are_not(
    size: int, tls: bool, http1: bool, goes: bool
) -> None:
    judge = rules(tls=tls, http1=http1)
    cuts = []
    for look in range(600):
        received = size * (1 + look // 5)
        found = judge.decide([seen(1, received=received)], {}, now=float(look))
        cuts += [(cut.reason, look) for cut in found]
    assert bool(cuts) is goes
    if goes:
        assert cuts[0][0] == "slow_head"
        assert cuts[0][1] <= HEAD_SECONDS + 10


def test_a_connection_with_a_request_under_way_trickles_as_it_likes() -> None:
    judge = rules(http1=True)
    for look in range(300):
        busy = {("192.0.2.1", 1): visit(open=1)}
        assert judge.decide([seen(1, received=look)], busy, now=float(look)) == []


# Against a real server.


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def idle(port: int, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            peer = stack.enter_context(socket.socket())
            peer.bind((source, 0))
            peer.settimeout(5)
            with contextlib.suppress(OSError):
                peer.connect(("127.0.0.1", port))
                peer.sendall(PREFACE)
            made.append(peer)
        yield made


def _answers(server: ServerProcess) -> float:
    began = time.monotonic()
    assert httpx.get(server.web + "/healthz", timeout=WAIT_SECONDS).text == "ok\n"
    return time.monotonic() - began


def _lists(target: str) -> None:
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        gpu_pb2_grpc.GpuServiceStub(channel).ListGpus(gpu_pb2.ListGpusRequest(), timeout=WAIT_SECONDS)


def _cut(server: ServerProcess, reason: str) -> int:
    return sum(
        int(str(line["count"]))
        for line in server.logged()
        if line["event"] == "connections.cut" and line["reason"] == reason
    )


def _until_cut(server: ServerProcess, reason: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not _cut(server, reason):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--only", "gpus", *SMALL) as running:
        yield running


def test_idle_connections_on_tcp_starve_neither_the_unix_socket_nor_the_probes(server: ServerProcess) -> None:
    device, web = _port(server.address("device-api", "http://")), _port(server.web)
    with idle(device, 60), idle(web, 60):
        _lists(server.socket)
        assert _answers(server) < WAIT_SECONDS
        _lists(f"127.0.0.1:{device}")
        _until_cut(server, "address")


def test_probes_are_answered_with_the_web_listener_full_of_many_addresses(server: ServerProcess) -> None:
    web = _port(server.web)
    with contextlib.ExitStack() as stack:
        for number in range(2, 12):
            stack.enter_context(idle(web, 10, f"127.0.0.{number}"))
        for _ in range(5):
            assert _answers(server) < WAIT_SECONDS
        _until_cut(server, "crowded")


@pytest.mark.parametrize("frame", [PING, SETTINGS], ids=["PING", "SETTINGS"])
def test_a_flood_of_frames_is_cut(server: ServerProcess, frame: bytes) -> None:
    port = _port(server.address("device-api", "http://"))
    burst = frame * (65536 // len(frame))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(PREFACE)
        peer.setblocking(False)
        assert _is_cut_while_sending(peer, burst)
    _until_cut(server, "flood")
    assert _answers(server) < WAIT_SECONDS


def _is_cut_while_sending(peer: socket.socket, burst: bytes) -> bool:
    """Whole frames only, and every answer is read: nothing is wrong with them but their number."""
    deadline = time.monotonic() + WAIT_SECONDS
    left = burst
    while time.monotonic() < deadline:
        try:
            left = left[peer.send(left) :] or burst
        except BlockingIOError:
            pass
        except OSError:
            return True
        try:
            if peer.recv(1 << 20) == b"":
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True
    return False


def test_a_body_that_trickles_is_refused(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "proxies") as server:
        head = b"POST /v1/auth/login HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", _port(server.web)), timeout=WAIT_SECONDS) as peer:
            peer.sendall(head + b"content-length: 1000\r\n\r\n")
            peer.settimeout(1.0)
            deadline = time.monotonic() + WAIT_SECONDS
            answer = b""
            while not answer and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # it may have been answered and closed just now
                    peer.sendall(b"{")
                with contextlib.suppress(TimeoutError):
                    answer = peer.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408"), answer


def _asked_over(port: int, version: ssl.TLSVersion, *, within_seconds: float) -> tuple[str, bool]:
    """What a registration over this TLS is told, and whether the connection is cut soon after that."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as raw,
        context.wrap_socket(raw) as peer,
    ):
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        fields = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", "x"),
            (":path", "/nstance.v1.RegistrationService/RegisterAgent"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        connection.send_headers(1, fields)
        connection.send_data(1, bytes(5), end_stream=True)
        peer.sendall(connection.data_to_send())
        told, ended = "", False
        while not ended and (received := peer.recv(65536)):
            for event in connection.receive_data(received):
                told += str(getattr(event, "headers", ""))
                ended = ended or isinstance(event, h2.events.StreamEnded)
        peer.settimeout(within_seconds)
        try:
            while peer.recv(65536):
                pass
        except TimeoutError:
            return told, False
        except OSError:
            pass
        return told, True


def test_older_tls_is_served_nothing_where_the_page_says_1_3(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "instances") as server:
        port = _port(server.address("registration", "https://"))
        told, is_cut = _asked_over(port, ssl.TLSVersion.TLSv1_2, within_seconds=WAIT_SECONDS)
        assert "TLS 1.3 only" in told
        assert is_cut
        told, is_cut = _asked_over(port, ssl.TLSVersion.TLSv1_3, within_seconds=5.0)
        assert "TLS 1.3 only" not in told
        assert not is_cut
