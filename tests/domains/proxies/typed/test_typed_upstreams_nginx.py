"""Options of upstreams, caches and logs do on a real NGINX what they say."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
from dns import message as dns_message
from dns import rrset
from support.proxies.nginx_rig import Backend, backend
from support.proxies.typed_rig import AUTHORITY, CERTIFICATE, CLIENT, Site, typed_site
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec


def host(name: str, *locations: dict[str, Any], **given: Any) -> VirtualHostSpec:
    body = {"name": name, "server_name": name, "listen_port": 80, "locations": locations, **given}
    return msgspec.convert(body, VirtualHostSpec)


def group(*addresses: str, **given: Any) -> UpstreamSpec:
    servers = given.pop("servers", None) or [{"address": one, "fail_timeout": 1} for one in addresses]
    body = {"name": "g", "algorithm": "round_robin", "servers": servers, **given}
    return msgspec.convert(body, UpstreamSpec)


@asynccontextmanager
async def tls_backend(
    ca: ThrowawayCa, folder: Path, *, ask: bool = False
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server with TLS; `ask`: for a certificate of the client's, whose subject it notes."""
    folder.mkdir(exist_ok=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ca.server(folder))
    if ask:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=ca.pem.decode())
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            shown = writer.get_extra_info("ssl_object").getpeercert()
            seen.append(str(shown.get("subject", "")) if shown else "")
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecure")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def _served_by(site: Site, name: str, count: int, **headers: str) -> Counter[str]:
    return Counter([(await site.ask(name, headers=headers)).text for _ in range(count)])


async def test_options_of_upstreams_have_their_effect(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(typed_site(tmp_path))
        a, b, canary = [await stack.enter_async_context(backend(name)) for name in ("a", "b", "c")]
        secure, seen = await stack.enter_async_context(tls_backend(site.ca, tmp_path / "tls", ask=True))
        broken, _ = await stack.enter_async_context(tls_backend(ThrowawayCa(), tmp_path / "other"))
        named = {"authority_id": AUTHORITY, "name": "localhost"}
        both = (a.address, b.address)
        drained = [{"address": a.address, "draining": True}, {"address": b.address, "max_connections": 9}]
        groups = {
            "tls": group(secure, protocol="https", tls={**named, "client_certificate_id": CLIENT}),
            "untrusted": group(broken, protocol="https", tls=named),
            "misnamed": group(secure, protocol="https", tls={**named, "name": "else.test"}),
            "unchecked": group(broken, protocol="https", tls={"verify": False}),
            "hash": group(*both, balancing={"method": "hash", "key": "header:X-User"}),
            "random": group(*both, balancing={"method": "random"}),
            "sticky": group(*both, balancing={"method": "sticky_cookie"}),
            "drained": group(
                servers=drained, keepalive_connections=2, keepalive={"timeout": 5, "requests": 9}
            ),
            "plain": group(*both),
            "canary": group(canary.address),
            "never": group(*both, retries={"on": []}),
            "often": group(*both, retries={"on": ["http_500"], "tries": 2, "non_idempotent": True}),
        }
        hosts = {name: host(f"{name}.test", {"path": "/", "upstream_id": name}) for name in groups}
        split = {"to": [{"upstream_id": "canary", "percent": 50}], "key": "header:X-User"}
        hosts["split"] = host("split.test", {"path": "/", "upstream_id": "plain", "canaries": split})
        await site.serve(hosts, groups)
        assert (await site.ask("tls.test")).text == "secure"
        assert "nginx" in seen[-1], "NGINX showed its certificate"
        assert (await site.ask("untrusted.test")).status_code == 502
        assert (await site.ask("misnamed.test")).status_code == 502
        assert (await site.ask("unchecked.test")).text == "secure"
        await _balanced(site)
        await _retried(site, a, b)


async def _balanced(site: Site) -> None:
    users = [str(number) for number in range(48)]
    found = [
        set(await _served_by(site, "hash.test", 1 + (int(user) < 8), **{"X-User": user})) for user in users
    ]
    assert {len(one) for one in found} == {1}, "each stays where it is"
    assert set.union(*found) == {"a", "b"}
    assert set(await _served_by(site, "random.test", 40)) == {"a", "b"}
    assert set(await _served_by(site, "drained.test", 6)) == {"b"}
    answers = [await site.ask("sticky.test") for _ in range(48)]
    assert {one.text for one in answers} == {"a", "b"}
    for one in answers[:4]:
        cookie = one.headers["set-cookie"].partition(";")[0]
        again = await site.ask("sticky.test", headers={"cookie": cookie})
        assert (again.text, again.headers.get("set-cookie")) == (one.text, None)
    forged = await site.ask("sticky.test", headers={"cookie": "fleetplane_route=x"})
    assert "fleetplane_route=" in forged.headers["set-cookie"]
    found = [set(await _served_by(site, "split.test", 3, **{"X-User": user})) for user in users[:16]]
    assert all(one == {"c"} or "c" not in one for one in found), "who has gone to the canary stays there"
    assert {"c"} in found
    assert any("c" not in one for one in found)


async def _retried(site: Site, a: Backend, b: Backend) -> None:
    a.status, b.status = 500, 200
    found = [(await site.ask("often.test", method="POST", content=b"x")).status_code for _ in range(4)]
    assert set(found) == {200}
    assert 500 in [(await site.ask("never.test")).status_code for _ in range(4)]
    a.status = 200


async def test_grpc_websocket_and_names_that_move_are_passed_on(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(typed_site(tmp_path))
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Echo(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        upgraded = await stack.enter_async_context(_upgrading())
        behind = await stack.enter_async_context(backend("b"))
        names = await stack.enter_async_context(_dns("127.0.0.1"))
        resolver = {"addresses": [names], "valid": 1}
        target = f"http://moving.example:{behind.port}"
        secure = {
            "listen_port": 443,
            "ssl_enabled": True,
            "ssl_certificate_id": CERTIFICATE,
            "http2_enabled": True,
        }
        await site.serve(
            {
                "h1": host("localhost", {"path": "/", "upstream_id": "g"}, **secure),
                "h2": host("ws.test", {"path": "/", "proxy_pass": f"http://{upgraded}"}),
                "h3": host("moving.test", {"path": "/", "proxy_pass": target, "resolver": resolver}),
            },
            {"g": group(f"127.0.0.1:{port}", protocol="grpc")},
        )
        trust = grpc.ssl_channel_credentials(site.ca.pem)
        async with grpc.aio.secure_channel(f"localhost:{site.secure}", trust) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/echo.Echo/Say")
            assert await call(b"hello", timeout=60) == b"hello"
        answer = await _upgrade(site)
        assert answer.startswith(b"HTTP/1.1 101")
        assert answer.endswith(b"ping"), "bytes pass both ways afterwards"
        assert (await site.ask("moving.test")).text == "b"


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def say(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(say)


@asynccontextmanager
async def _upgrading() -> AsyncIterator[str]:
    """A server that changes to another protocol, and then says everything back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            good = b"upgrade: websocket" in head.lower() and b"connection: upgrade" in head.lower()
            writer.write(
                b"HTTP/1.1 %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
                % (b"101 X" if good else b"400 X")
            )
            writer.write(await reader.readexactly(4))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _upgrade(site: Site) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.plain)
    key = base64.b64encode(b"0" * 16).decode()
    lines = ("GET / HTTP/1.1", "Host: ws.test", "Upgrade: websocket", "Connection: Upgrade")
    asked = "\r\n".join([*lines, f"Sec-WebSocket-Key: {key}", "", ""])
    try:
        async with asyncio.timeout(60):
            writer.write(asked.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"ping")
            return head + await reader.readexactly(4)
    finally:
        writer.close()
        await writer.wait_closed()


class _Names(asyncio.DatagramProtocol):
    def __init__(self, address: str) -> None:
        self._address = address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asked = dns_message.from_wire(data)
        answer = dns_message.make_response(asked)
        answer.answer.append(rrset.from_text(asked.question[0].name, 1, "IN", "A", self._address))
        self._transport.sendto(answer.to_wire(), addr)  # type: ignore[attr-defined]


@asynccontextmanager
async def _dns(address: str) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Names(address), local_addr=("127.0.0.1", 0))
    try:
        yield f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()


async def _logged(site: Site, *paths: str) -> None:
    async with asyncio.timeout(60):
        while not all(f'"{path}"' in site.rig.paths.access_log.read_text() for path in paths):
            await asyncio.sleep(0.02)


async def test_answers_are_kept_and_lines_left_out_as_asked(tmp_path: Path) -> None:
    async with backend("b") as behind, typed_site(tmp_path) as site:
        to = {"path": "/", "proxy_pass": f"http://{behind.address}"}
        cache = {"rules": [{"seconds": 600, "statuses": [200]}], "bypass": ["header:X-Fresh", "arg:fresh"]}
        logging = {"leave_out": ["user_agent", "referer"], "add": ["ssl_protocol"], "sample_percent": 1}
        status = {"headers": [{"action": "set", "name": "X-Cache", "value": "$upstream_cache_status"}]}

        def hosts(generation: int) -> dict[str, VirtualHostSpec]:
            return {
                "h1": host(
                    "kept.test", {**to, "cache": cache}, cache={"generation": generation}, content=status
                ),
                "h2": host("logged.test", to, logging={"leave_out": ["user_agent"], "add": ["ssl_protocol"]}),
                "h3": host("sampled.test", to, logging=logging),
                "h4": host("silent.test", to, logging={"enabled": False}),
            }

        async def kept(path: str = "/x", **headers: str) -> str:
            return str((await site.ask("kept.test", path, headers=headers)).headers["x-cache"])

        await site.serve(hosts(0))
        assert await kept() == "MISS"
        await _logged(site, "/x")  # by then it is kept
        assert [await kept(), await kept(**{"X-Fresh": "1"})] == ["HIT", "BYPASS"]
        assert await kept("/y?fresh=1") == "BYPASS"
        behind.status = 404
        assert [await kept("/no"), await kept("/no")] == ["MISS", "MISS"], "only what the rules name"
        behind.status = 200
        await site.serve(hosts(1))
        assert await kept() == "MISS", "a new generation begins with nothing"

        log = site.rig.paths.access_log
        await site.ask("silent.test", "/silent")
        for _ in range(20):
            await site.ask("sampled.test", "/sampled")
        behind.status = 500
        await site.ask("sampled.test", "/failed")
        await site.ask("logged.test", "/logged")
        await _logged(site, "/failed", "/logged")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        by_path = {one["uri"]: one for one in lines}
        assert "user_agent" not in by_path["/logged"]
        assert by_path["/logged"]["ssl_protocol"] == ""
        assert by_path["/logged"]["virtual_host_id"] == "h2"
        assert "user_agent" in by_path["/x"], "others have all fields"
        assert "/silent" not in by_path
        assert "referer" not in by_path["/failed"], "errors are logged always"
        assert len([one for one in lines if one["uri"] == "/sampled"]) < 20
