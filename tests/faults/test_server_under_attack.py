"""The server when its callers mean no good, or the machine has nothing left to give."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.shared.server_process import STOP_SECONDS, ServerProcess, running_server

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
DESCRIPTORS = 256
CONNECTIONS = 400
WAIT_SECONDS = 60.0


def lists(address: str) -> bool:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            gpu_pb2_grpc.GpuServiceStub(channel).ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
        except grpc.RpcError:
            return False
        return True


def tcp(server: ServerProcess) -> str:
    return server.address("device-api", "http://").removeprefix("http://")


def _descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextlib.contextmanager
def many_connections(server: ServerProcess, count: int) -> Iterator[None]:
    host, _, port = tcp(server).rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(PREFACE)
        yield


def test_more_connections_than_descriptors_stop_nobody_else(tmp_path: Path) -> None:
    limit = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    with running_server(tmp_path, "--only", "gpus", prefix=limit) as server:
        with grpc.insecure_channel(server.socket) as before:
            stub = gpu_pb2_grpc.GpuServiceStub(before)
            stub.ListGpus(gpu_pb2.ListGpusRequest())
            with many_connections(server, CONNECTIONS):
                assert _descriptors(server.pid) < DESCRIPTORS
                stub.ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
                assert httpx.get(server.web + "/healthz", timeout=60).text == "ok\n"
        assert _becomes_true(tcp(server)), "the listener did not recover"
        assert server.stop() == 0
        assert "listener.failed" not in {line["event"] for line in server.logged()}


def test_a_listener_that_ran_out_of_descriptors_comes_back(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "gpus") as server:
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        open_now = _descriptors(server.pid)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_now + 5, hard))
        with many_connections(server, 20):
            deadline = time.monotonic() + WAIT_SECONDS
            while "listener.failed" not in {line["event"] for line in server.logged()}:
                assert time.monotonic() < deadline, "the listener had descriptors enough"
                time.sleep(0.05)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))

        assert _becomes_true(tcp(server)), "the listener did not come back"
        assert server.stop() == 0


def _becomes_true(address: str) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if lists(address):
            return True
    return False


@contextlib.contextmanager
def a_request_that_never_ends(server: ServerProcess) -> Iterator[None]:
    """Held by a real client until the server is gone."""
    done = threading.Event()

    def requests() -> Iterator[bytes]:
        done.wait(WAIT_SECONDS)
        yield b""

    with grpc.insecure_channel(server.socket) as channel:
        method = "/nvidia.device.v1alpha1.ProviderService/RegisterGpu"
        held: Any = channel.stream_unary(method)
        call = held.future(requests())
        active = f'fleetplane_rpc_active{{listener="device-api",method="{method}"}} 1.0'
        deadline = time.monotonic() + WAIT_SECONDS
        while active not in httpx.get(server.web + "/metrics", timeout=60).text:
            assert time.monotonic() < deadline, "the call did not begin"
        yield
        done.set()
        call.cancel()


def test_two_signals_at_once_are_one_request_to_stop(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, "--only", "gpus", "--set", "shutdown.grace_seconds=2") as server,
        a_request_that_never_ends(server),
    ):
        # Stopped, it finds them all at once when it goes on, whatever this process does meanwhile.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            server.process.send_signal(number)
        assert server.process.wait(STOP_SECONDS) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, "--only", "gpus", "--set", "shutdown.grace_seconds=60") as server,
        a_request_that_never_ends(server),
    ):
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + WAIT_SECONDS
        while "server.stopping" not in {line["event"] for line in server.logged()}:
            assert time.monotonic() < deadline, "it was not heard"
        time.sleep(1.0)  # the time between two requests is what is tried
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 130


def test_a_health_watch_is_told_and_ended_and_does_not_delay_the_end(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, "--only", "gpus", "--set", "shutdown.grace_seconds=60") as server,
        grpc.insecure_channel(server.socket) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        said: list[int] = []
        ends: list[grpc.RpcError] = []

        def follow() -> None:
            try:
                said.extend(one.status for one in watch)
            except grpc.RpcError as error:
                ends.append(error)

        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        # It reads all the while: what was not read when the server is gone may be lost with the connection.
        reading = threading.Thread(target=follow)
        reading.start()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 0  # long before the grace is over
        reading.join(WAIT_SECONDS)
    assert said == [health_pb2.HealthCheckResponse.NOT_SERVING]
    (end,) = ends
    assert isinstance(end, grpc.Call)
    assert end.code() is grpc.StatusCode.UNAVAILABLE
    # A client that acknowledges the last message after the server is gone reports that instead of the reason.
    assert "the server is stopping" in {line.get("message") for line in server.logged()}


def test_a_server_that_cannot_write_any_more_ends_and_says_why(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "gpus") as server:
        with contextlib.closing(sqlite3.connect(tmp_path / "fleetplane.db", timeout=60)) as database:
            database.execute(
                "INSERT INTO groups SELECT number + 1, revision + 1, compacted, audit_seq, audit_hash, term,"
                " 'another', boot, x'00', at_ns FROM groups ORDER BY number DESC LIMIT 1"
            )
            database.commit()
        with grpc.insecure_channel(server.socket) as channel, contextlib.suppress(grpc.RpcError):
            stub = provider_pb2_grpc.ProviderServiceStub(channel)
            stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name="gpu-1"), timeout=60)

        assert server.process.wait(STOP_SECONDS) == 1
        assert "someone else has written to it" in server.log.read_text()
        assert not (tmp_path / "ready.json").exists()
