"""Streams on one real NGINX, beside a virtual host."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from support.proxies.nginx_rig import backend
from support.proxies.proxy_server_double import until
from support.proxies.stream_backends import datagram, datagram_server, free_datagram_port, line_server, said
from support.proxies.typed_rig import Site, typed_site
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.log_shipping import LoggedTraffic, access_entry, parse_request
from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec


def group(name: str, *servers: str, **options: Any) -> UpstreamSpec:
    given = {"name": name, "algorithm": "round_robin", "servers": [{"address": one} for one in servers]}
    return msgspec.convert({**given, **options}, UpstreamSpec)


def stream(name: str, port: int, **options: Any) -> StreamSpec:
    return msgspec.convert({"name": name, "listen_port": port, **options}, StreamSpec)


def tls_behind(site: Site) -> ssl.SSLContext:
    chain, key = site.ca.server(site.folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    return context


def logged(site: Site, identity: str) -> list[dict[str, str]]:
    """The lines of the access log that a stream has, as the server gets them."""
    lines = site.rig.paths.access_log.read_bytes().splitlines()
    requests = [request for line in lines if (request := parse_request(line)) is not None]
    return [
        dict(access_entry(one, identity="x").fields) | {"message": access_entry(one, identity="x").message}
        for one in requests
        if one.stream_id == identity
    ]


async def test_tcp_udp_and_names_reach_the_servers_that_they_are_for(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("plain", "sni", "strict", "proxied", "closed", "few")}
    ports["udp"] = free_datagram_port()
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(typed_site(tmp_path))
        one, two = [await stack.enter_async_context(line_server(name)) for name in ("one", "two")]
        tls = tls_behind(site)
        secure_a = await stack.enter_async_context(line_server("a", tls))
        secure_b = await stack.enter_async_context(line_server("b", tls))
        web = await stack.enter_async_context(backend("web"))
        echo = await stack.enter_async_context(datagram_server("dgram"))
        groups = {
            "g-one": group("one", one.address),
            "g-both": group(
                "both", f"127.0.0.1:{free_port()}", two.address, retries={"on": ["error"], "tries": 3}
            ),
            "g-a": group("a", secure_a.address, algorithm="least_connections"),
            "g-b": group("b", secure_b.address, balancing={"method": "hash", "key": "address"}),
            "g-udp": group("udp", echo, balancing={"method": "random"}),
            "g-web": group("web", web.address),
        }
        names = [{"names": ["a.test", ".wild.test"], "upstream_id": "g-a"}]
        limits = {"connections": 1, "download_bytes_per_second": 1_000_000}
        streams = {
            "s-plain": stream("plain", ports["plain"], upstream_id="g-both"),
            "s-sni": stream("sni", ports["sni"], upstream_id="g-b", routes=names),
            "s-strict": stream("strict", ports["strict"], routes=names),
            "s-proxied": stream("proxied", ports["proxied"], upstream_id="g-one", send_proxy_protocol=True),
            "s-closed": stream(
                "closed",
                ports["closed"],
                upstream_id="g-one",
                rules=[{"action": "deny", "network": "127.0.0.0/8"}],
            ),
            "s-few": stream("few", ports["few"], upstream_id="g-web", limits=limits, log=False),
            "s-udp": stream("udp", ports["udp"], protocol="udp", upstream_id="g-udp", responses=1),
        }
        host = {
            "name": "h",
            "server_name": "h.test",
            "listen_port": 80,
            "locations": [{"path": "/", "upstream_id": "g-web"}],
        }
        await site.serve({"h": msgspec.convert(host, VirtualHostSpec)}, groups, streams=streams)

        assert (await site.ask("h.test")).text == "web"
        assert await said(ports["plain"]) == "two hello"  # past the server that is dead
        assert await datagram(ports["udp"], "ping") == "dgram ping"
        trust = site.trust()
        told = [
            await said(ports["sni"], trust=trust, name=name) for name in ("a.test", "x.wild.test", "c.test")
        ]
        assert told == ["a hello", "a hello", "b hello"]
        told = [await said(ports["strict"], trust=trust, name=name) for name in ("a.test", "c.test")]
        assert told == ["a hello", ""]
        assert (await said(ports["proxied"])).startswith("one PROXY TCP4 127.0.0.1 127.0.0.1 ")
        assert await said(ports["closed"]) == ""
        await _only_one_at_once(ports["few"])

        await until(lambda: len(logged(site, "s-plain")) == 1 and len(logged(site, "s-sni")) == 3)
        entry = logged(site, "s-plain")[0]
        assert (entry["message"], entry["status"], entry["bytes_sent"], entry["request_length"]) == (
            f"TCP :{ports['plain']}",
            "200",
            str(len("two hello\n")),
            str(len("hello\n")),
        )
        assert {one["host"] for one in logged(site, "s-sni")} == {"a.test", "x.wild.test", "c.test"}
        await until(lambda: [one["status"] for one in logged(site, "s-closed")] == ["403"])
        assert logged(site, "s-few") == []

        # Streams go as they came, and the host stays.
        await site.serve({"h": msgspec.convert(host, VirtualHostSpec)}, groups)
        assert (await site.ask("h.test")).text == "web"
        await until(lambda: _refused(ports["plain"]))


async def _only_one_at_once(port: int) -> None:
    """The first connection stays open; the second is ended at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60.0):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await said(port) == ""
    finally:
        writer.close()
        await writer.wait_closed()


def _refused(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_connections_of_streams_are_not_counted_as_requests() -> None:
    request = parse_request(b'{"time":"1.5","method":"TCP","uri":":5432","status":"200","stream_id":"s"}')
    assert request is not None
    traffic = LoggedTraffic()
    traffic.count(request)
    assert traffic == LoggedTraffic()
