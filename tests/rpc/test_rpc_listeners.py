"""Listeners: their sockets, their files, their settings and what they leave on standard error."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.rpc.probe import SERVICE, Probe, Value
from support.rpc.targets import Certificates, make_app
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc import Listener, ListenerSpec, TlsFiles, open_listener
from fleetplane.rpc.listening.listeners import (
    CONCURRENT_STREAMS,
    HANDSHAKE_SECONDS,
    _banner_withheld,
    server_config,
)
from fleetplane.rpc.listening.sockets import DEAD_PEER_SECONDS, open_socket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SETTINGS = 4
"""The type of the frame that both sides begin with."""


def spec(*addresses: str, **extra: Any) -> ListenerSpec:
    return ListenerSpec(name="probe", addresses=addresses, app=make_app(Probe()), **extra)


async def answers(address: str) -> bool:
    async with grpc.aio.insecure_channel(address.removeprefix("http://")) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Unary", request_serializer=Value.SerializeToString)
        answer: bytes = await call(Value(value=b"x"), timeout=60)
        return answer == Value(value=b"x").SerializeToString()


@pytest.fixture
def unix_path(tmp_path: Path) -> Path:
    return tmp_path / "sockets" / "probe.sock"


async def test_port_zero_picks_a_free_port_on_every_address() -> None:
    async with open_listener(spec("127.0.0.1:0", "127.0.0.1:0"), grace_seconds=0.1) as listener:
        assert len(set(listener.addresses)) == 2
        for address in listener.addresses:
            assert address.startswith("http://127.0.0.1:")
            assert await answers(address)


async def test_one_listener_serves_tcp_and_a_unix_socket(unix_path: Path) -> None:
    async with open_listener(spec("127.0.0.1:0", f"unix://{unix_path}"), grace_seconds=0.1) as listener:
        assert listener.addresses[1] == f"unix://{unix_path}"
        assert [await answers(address) for address in listener.addresses] == [True, True]


async def test_ipv6_addresses_are_written_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with open_listener(spec("[::1]:0"), grace_seconds=0.1) as listener:
        assert listener.addresses[0].startswith("http://[::1]:")
        assert await answers(listener.addresses[0])


async def test_a_unix_socket_has_its_mode_and_is_removed_at_the_end(unix_path: Path) -> None:
    async with open_listener(spec(f"unix://{unix_path}", unix_mode=0o600), grace_seconds=0.1):
        assert stat.S_IMODE(unix_path.stat().st_mode) == 0o600
    assert not unix_path.exists()


def test_a_socket_file_is_never_more_open_than_asked(
    unix_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    listen = socket.socket.listen

    def watched(self: socket.socket, backlog: int) -> None:
        seen.append(stat.S_IMODE(unix_path.stat().st_mode))
        listen(self, backlog)

    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("the mode comes from the bind itself"))
    monkeypatch.setattr(socket.socket, "listen", watched)
    previous = os.umask(0)
    try:
        open_socket(f"unix://{unix_path}", unix_mode=0o660).close()
    finally:
        os.umask(previous)
    assert seen == [0o660]


async def test_the_file_of_a_server_that_died_is_replaced(unix_path: Path) -> None:
    unix_path.parent.mkdir()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(unix_path))
    dead.close()
    async with open_listener(spec(f"unix://{unix_path}"), grace_seconds=0.1) as listener:
        assert await answers(listener.addresses[0])


async def test_a_live_server_is_not_pushed_aside(unix_path: Path) -> None:
    async with open_listener(spec(f"unix://{unix_path}"), grace_seconds=0.1) as listener:
        with pytest.raises(SettingsError, match="another server is listening"):
            async with open_listener(spec(f"unix://{unix_path}"), grace_seconds=0.1):
                pass
        assert await answers(listener.addresses[0])


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(SettingsError, match="is not a socket"):
        open_socket(f"unix://{precious}", unix_mode=0o600)
    assert precious.read_text() == "data"


async def test_a_successor_keeps_its_socket_file(unix_path: Path) -> None:
    first = open_socket(f"unix://{unix_path}", unix_mode=0o600)
    unix_path.unlink()
    second = open_socket(f"unix://{unix_path}", unix_mode=0o600)
    first.close()
    assert unix_path.exists()
    second.close()
    assert not unix_path.exists()


async def test_a_taken_port_is_named_and_the_other_sockets_are_given_back(unix_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"cannot listen on {address}: Address already in use"):
            async with open_listener(spec(f"unix://{unix_path}", address), grace_seconds=0.1):
                pass
    assert not unix_path.exists()


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", ":80", "127.0.0.1:http"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="is no address"):
        open_socket(address, unix_mode=0o600)


async def test_tls_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    tls = TlsFiles(certificate=tmp_path / "none.pem", key=tmp_path / "none.key")
    with pytest.raises(SettingsError, match=r"listener probe does not start: .*none\.pem"):
        async with open_listener(spec("127.0.0.1:0", tls=tls), grace_seconds=0.1):
            pass


async def test_tls_on_a_unix_socket_is_refused(unix_path: Path, certificates: Certificates) -> None:
    tls = TlsFiles(certificate=certificates.server, key=certificates.server_key)
    with pytest.raises(SettingsError, match="TLS is for TCP"):
        async with open_listener(spec(f"unix://{unix_path}", tls=tls), grace_seconds=0.1):
            pass


async def test_without_its_certificate_a_client_does_not_get_in(certificates: Certificates) -> None:
    tls = TlsFiles(
        certificate=certificates.server,
        key=certificates.server_key,
        client_ca=certificates.authority,
        client_certificate="required",
    )
    async with open_listener(spec("127.0.0.1:0", tls=tls), grace_seconds=0.1) as listener:
        assert listener.addresses[0].startswith("https://")
        credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
        address = listener.addresses[0].removeprefix("https://")
        async with grpc.aio.secure_channel(address, credentials) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/Unary")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_fails_inside_leaves_a_listener_as_it_is() -> None:
    async def fail() -> None:
        async with open_listener(spec("127.0.0.1:0"), grace_seconds=0.1):
            raise KeyError("ours")

    with pytest.raises(KeyError):
        await fail()


async def test_a_listener_that_stops_accepting_refuses_new_connections() -> None:
    async with open_listener(spec("127.0.0.1:0"), grace_seconds=0.1) as listener:
        assert await answers(listener.addresses[0])
        listener.stop_accepting()
        async with asyncio.timeout(60):
            while await _connects(listener):
                await asyncio.sleep(0.01)


async def test_streams_that_are_open_outlive_the_accepting() -> None:
    probe = Probe()
    app = make_app(probe)
    held = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app)
    async with open_listener(held, grace_seconds=60.0) as listener:
        address = listener.addresses[0].removeprefix("http://")
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_stream(f"/{SERVICE}/Down", Value.SerializeToString, Value.FromString)
            stream = call(Value(value=b"1"), metadata=(("behave", "hold-after"),))
            assert (await stream.read()).value == b"0"
            listener.stop_accepting()
            draining = asyncio.create_task(app.drain(60.0))
            await asyncio.sleep(0.1)
            probe.journal.release.set()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
            await draining


async def _connects(listener: Listener) -> bool:
    host, _, port = listener.addresses[0].removeprefix("http://").rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def asked(address: str, root: bytes) -> bytes:
    """What the probe answers to a new client that trusts only this authority."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    credentials = grpc.ssl_channel_credentials(root)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Unary", Value.SerializeToString, Value.FromString)
        answer = await call(Value(value=b"x"), timeout=60)
        return bytes(answer.value)


def tls_of(authority: ThrowawayCa, folder: Path) -> TlsFiles:
    folder.mkdir()
    certificate, key = authority.server(folder)
    return TlsFiles(certificate=certificate, key=key)


async def test_a_renewed_listener_presents_its_new_certificate_and_keeps_what_is_open(tmp_path: Path) -> None:
    probe, old, new = Probe(), ThrowawayCa(name="old"), ThrowawayCa(name="new")
    app = make_app(probe)
    held = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app, tls=tls_of(old, tmp_path / "old"))
    async with open_listener(held, grace_seconds=0.2) as listener:
        address = listener.addresses[0].removeprefix("https://")
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(old.pem)) as channel:
            call: Any = channel.unary_stream(f"/{SERVICE}/Down", Value.SerializeToString, Value.FromString)
            stream = call(Value(value=b"1"), metadata=(("behave", "hold-after"),))
            assert (await stream.read()).value == b"0"
            await listener.renew(tls_of(new, tmp_path / "new"))

            for _ in range(10):  # none of them reaches the one before
                assert await asked(address, new.pem) == b"x"
            with pytest.raises(grpc.aio.AioRpcError):
                await asked(address, old.pem)
            await asyncio.sleep(0.4)  # longer than the grace of a stop
            probe.journal.release.set()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK


async def test_a_listener_that_cannot_be_renewed_stays_as_it_is(tmp_path: Path) -> None:
    old = ThrowawayCa()
    async with open_listener(
        spec("127.0.0.1:0", tls=tls_of(old, tmp_path / "old")), grace_seconds=0.1
    ) as listener:
        with pytest.raises(SettingsError, match=r"none\.pem"):
            await listener.renew(TlsFiles(certificate=tmp_path / "none.pem", key=tmp_path / "none.key"))
        assert await asked(listener.addresses[0].removeprefix("https://"), old.pem) == b"x"


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
async def test_a_client_on_a_busy_machine_may_take_its_time_to_shake_hands(tmp_path: Path, tls: bool) -> None:
    authority = ThrowawayCa()
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.set_alpn_protocols(["h2"])
    files = tls_of(authority, tmp_path / "tls") if tls else None
    async with open_listener(spec("127.0.0.1:0", tls=files), grace_seconds=0.1) as listener:
        host, _, port = listener.addresses[0].rpartition("/")[2].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(5.5)  # longer than the HTTP server would wait by itself
        if tls:
            await writer.start_tls(context, server_hostname="localhost")
        writer.write(PREFACE)
        async with asyncio.timeout(60):
            assert (await reader.readexactly(9))[3] == SETTINGS
        writer.close()


async def endless(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})


async def test_a_peer_that_stopped_reading_does_not_hold_up_the_end(tmp_path: Path) -> None:
    authority = ThrowawayCa()
    context = ssl.create_default_context(cadata=authority.pem.decode())
    tls = tls_of(authority, tmp_path / "tls")
    held = ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=endless, tls=tls, http1=True)
    async with asyncio.timeout(60):
        async with open_listener(held, grace_seconds=0.2) as listener:
            host, _, port = listener.addresses[0].removeprefix("https://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await reader.readexactly(12) == b"HTTP/1.1 200"
    writer.transport.abort()


async def test_nothing_of_the_http_server_reaches_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with open_listener(spec("127.0.0.1:0"), grace_seconds=0.1) as listener:
        os.write(2, b"ours\n")
        assert await answers(listener.addresses[0])
    assert capfd.readouterr().err == "ours\n"


async def test_lines_of_others_written_while_a_listener_starts_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def talk() -> None:
        os.write(2, b'{"event":"ours"}\nplain\n')

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(talk())
        async with open_listener(spec("127.0.0.1:0"), grace_seconds=0.1):
            pass
    assert sorted(capfd.readouterr().err.splitlines()) == ["plain", '{"event":"ours"}']


def test_listeners_that_start_at_once_give_standard_error_back_in_any_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first, second = _banner_withheld(), _banner_withheld()
    with ExitStack() as later:
        with first:
            later.enter_context(second)
            os.write(2, b"meanwhile\n")
        os.write(2, b'{"event":"listening"}\n')
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "meanwhile\nafter\n"


def test_nothing_ends_a_stream_for_being_quiet_or_a_client_for_being_slow() -> None:
    bound = open_socket("127.0.0.1:0", unix_mode=0)
    try:
        config = server_config(spec("127.0.0.1:0"), [bound], grace_seconds=7.0)
    finally:
        bound.close()
    assert config.timeout_keep_alive == 0
    assert config.timeout_request_body_idle == 0
    assert config.h2_timeout_response_stall == 0
    assert config.h2_timeout_write == 0
    assert config.timeout_handshake == HANDSHAKE_SECONDS >= 60
    assert config.max_concurrent_streams == CONCURRENT_STREAMS >= 1000
    assert config.timeout_graceful_shutdown == 7.0


async def test_dead_peers_are_found_by_the_kernel() -> None:
    bound = open_socket("127.0.0.1:0", unix_mode=0)
    with socket.create_connection(bound.socket.getsockname()):
        bound.socket.setblocking(True)
        accepted, _ = bound.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == DEAD_PEER_SECONDS * 1000
    bound.close()
