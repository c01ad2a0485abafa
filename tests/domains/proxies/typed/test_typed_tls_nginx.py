"""TLS and listening options do on a real NGINX what they say."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.proxies.nginx_rig import backend
from support.proxies.typed_rig import AUTHORITY, CERTIFICATE, Site, typed_site

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.typed_options import ClientCertificates, HostTls, Hsts, Listening


def secure(name: str, address: str, **options: Any) -> VirtualHostSpec:
    return VirtualHostSpec(
        name=name,
        server_name=name,
        listen_port=443,
        ssl_enabled=True,
        ssl_certificate_id=CERTIFICATE,
        locations=(Location(path="/", proxy_pass=f"http://{address}"),),
        **options,
    )


async def test_tls_options_have_their_effect(tmp_path: Path) -> None:
    async with backend("b") as behind, typed_site(tmp_path, addresses=("127.0.0.1", "[::1]")) as site:
        clients = ClientCertificates(authority_id=AUTHORITY)
        optional = ClientCertificates(authority_id=AUTHORITY, mode="optional")
        await site.serve(
            {
                "h1": secure("plain.test", behind.address),
                "h2": secure("force.test", behind.address, tls=HostTls(force_https=True, hsts=Hsts())),
                "h3": secure("clients.test", behind.address, tls=HostTls(client_certificates=clients)),
                "h4": secure(
                    "some.test",
                    behind.address,
                    tls=HostTls(client_certificates=optional, profile="intermediate"),
                    listening=Listening(ipv6=False),
                ),
            }
        )
        moved = await site.ask("force.test", "/a?b=c")
        assert (moved.status_code, moved.headers["location"]) == (308, "https://force.test/a?b=c")
        assert (await site.ask("plain.test")).status_code == 421, "nobody asked for it on port 80"
        answer = await site.ask_securely("force.test")
        assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert "strict-transport-security" not in (await site.ask_securely("plain.test")).headers

        refused = await site.ask_securely("clients.test")
        assert (refused.status_code, behind.requests[-1].count("clients.test")) == (400, 0)
        known = site.client_context("someone")
        assert (await site.ask_securely("clients.test", trust=known)).text == "b"
        assert "X-Client-Verify: SUCCESS" in behind.requests[-1]
        assert "CN=someone" in behind.requests[-1]
        assert (await site.ask_securely("some.test")).text == "b"
        assert "X-Client-Verify: NONE" in behind.requests[-1]

        assert (await site.ask_securely("plain.test", address="[::1]")).text == "b"
        with pytest.raises(httpx.ConnectError):  # the name is not served there, so no certificate is shown
            await site.ask_securely("some.test", address="[::1]")


async def test_the_modern_profile_and_the_proxy_protocol_hold_for_their_ports(tmp_path: Path) -> None:
    async with backend("b") as behind, typed_site(tmp_path) as site:
        announced = VirtualHostSpec(
            name="n",
            server_name="a.test",
            listen_port=80,
            locations=(Location(path="/", proxy_pass=f"http://{behind.address}"),),
            listening=Listening(proxy_protocol_from=("127.0.0.0/8",)),
        )
        modern = secure("m.test", behind.address, tls=HostTls(profile="modern", ocsp_stapling=True))
        await site.serve({"h1": announced, "h2": modern})
        assert (await site.ask_securely("m.test")).text == "b"
        old = site.trust()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(httpx.ConnectError):
            await site.ask_securely("m.test", trust=old)

        said = await _announcing(site, b"PROXY TCP4 192.0.2.7 127.0.0.1 4711 80\r\n")
        assert said.startswith(b"HTTP/1.1 200")
        assert "X-Real-IP: 192.0.2.7" in behind.requests[-1]
        assert not (await _announcing(site, b"")).startswith(b"HTTP/1.1 200")


async def _announcing(site: Site, header: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.plain)
    try:
        writer.write(header + b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:  # closed before NGINX has read all of it
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
