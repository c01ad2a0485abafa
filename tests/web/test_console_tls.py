"""The console's session over TLS: a cookie bound to the host, in a browser that believes the server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from support.shared.browser_rig import SECONDS, Tab, needs_chromium, tab
from support.shared.cli_runner import execute
from support.shared.server_process import running_server
from support.web.console_rig import Console

pytestmark = needs_chromium

HOST, NEIGHBOUR = "fleet.example.test", "neighbour.example.test"
COOKIE = "__Host-fleetplane_session"
TOSSED = (
    f"{COOKIE}=tossed; Path=/; Domain=example.test",
    f"{COOKIE}=tossed; Path=/; Secure; Domain=example.test",
    "fleetplane_session=tossed; Path=/; Domain=example.test",
)
"""What a neighbouring host tries: browsers refuse the first two, and the server does not read the third."""


def pin_of(port: int) -> str:
    """The digest of the server's key, by which a browser is told to believe it."""
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=SECONDS)
    key = x509.load_pem_x509_certificate(pem.encode()).public_key()
    return base64.b64encode(
        hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    ).decode()


@asynccontextmanager
async def neighbour() -> AsyncIterator[int]:
    """A page of another host of the same domain, which sets cookies for all of it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cookies = "".join(f"Set-Cookie: {one}\r\n" for one in TOSSED)
        body = b"<!doctype html><title>neighbour</title>"
        try:
            # Browsers open connections that they may need, and say nothing on those that they did not.
            with suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(
                    f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{cookies}Content-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def cookies(page: Tab) -> dict[tuple[str, str], dict[str, Any]]:
    """All that the browser has, by name and domain."""
    found = (await page.call("Storage.getCookies"))["cookies"]
    return {(one["name"], one["domain"]): one for one in found}


async def test_over_tls_the_session_is_bound_to_its_host(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with running_server(
        folder, "--only", "gpus", "--set", "listeners.web.addresses=0.0.0.0:0", admin_password=""
    ) as server:
        assert server.web.startswith("https://")
        port = int(server.web.rpartition(":")[2])
        made = execute("tokens", "create", "boss", "--role", "owner", "--data-dir", str(folder))
        assert made.code == 0, made.err
        boss = made.out.strip()
        base = f"https://{HOST}:{port}"
        arguments = (
            f"--ignore-certificate-errors-spki-list={await asyncio.to_thread(pin_of, port)}",
            f"--host-resolver-rules=MAP {HOST} 127.0.0.1, MAP {NEIGHBOUR} 127.0.0.1",
            "--no-proxy-server",
        )
        async with (
            neighbour() as other,
            tab(tmp_path / "browser", f"{base}/ui/", arguments=arguments) as page,
        ):
            console = Console(page, base)
            await console.sign_in(boss)
            await console.live()
            assert await page.value("isSecureContext")
            assert await page.value("document.cookie") == ""
            held = await cookies(page)
            assert set(held) == {(COOKIE, HOST)}
            own = held[COOKIE, HOST]
            assert (own["secure"], own["httpOnly"], own["sameSite"], own["path"]) == (
                True,
                True,
                "Strict",
                "/",
            )
            assert 0 < own["expires"] - await page.value("Date.now() / 1000") <= 43200

            await console.reload()
            await page.until("document.querySelector('#caller')?.textContent === 'token/boss'")
            await console.live()

            # A neighbour of the domain, by its answer and by script.
            await page.call("Page.navigate", url=f"http://{NEIGHBOUR}:{other}/")
            await page.until("document.title === 'neighbour'")
            for one in TOSSED:
                await page.value(f"document.cookie = {one!r}")
            held = await cookies(page)
            assert set(held) == {(COOKIE, HOST), ("fleetplane_session", ".example.test")}
            assert held[COOKIE, HOST]["value"] == own["value"]
            await page.call("Page.navigate", url=f"{base}/ui/")
            await page.until("document.querySelector('#caller')?.textContent === 'token/boss'")
            await console.live()

            # What was tossed alone lets nobody in.
            await console.sign_out()
            assert (COOKIE, HOST) not in await cookies(page)
            await console.reload()
            await page.until("document.querySelector('#sign-in')?.hidden === false")
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=SECONDS) as http:  # its own word
            address = f"https://127.0.0.1:{port}/apis/v1/people/console"
            shown = {"cookie": f"{COOKIE}={own['value']}"}
            assert (await http.get(address, headers=shown)).status_code == 401  # it ended at the server, too
