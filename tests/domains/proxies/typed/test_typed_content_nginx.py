"""Options about answers do on a real NGINX what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from support.proxies.nginx_rig import Backend, backend, web_folder
from support.proxies.typed_rig import Site, typed_site

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec

REDIRECTS = [
    {"path": "/old", "to": "/new"},
    {"path": "/docs", "to": "https://docs.test/v2/", "match": "prefix", "status": 301},
    {"path": "^/u/([0-9]+)", "to": "/users?id=$1", "match": "regex", "status": 302},
    {"path": "^/u/", "to": "/never", "match": "regex"},
]
HEADERS = [
    {"action": "set", "name": "Server-Name", "value": "$host"},
    {"action": "remove", "name": "X-Powered-By"},
    {"action": "add", "name": "X-Both", "value": 'quote" and ; {}'},
    {"action": "set", "name": "X-Tenant", "value": "t-$scheme", "direction": "request"},
    {"action": "remove", "name": "Cookie", "direction": "request"},
]


def host(name: str, *locations: dict[str, Any], **given: Any) -> VirtualHostSpec:
    body = {"name": name, "server_name": name, "listen_port": 80, "locations": locations, **given}
    return msgspec.convert(body, VirtualHostSpec)


def hosts(address: str, root: Path) -> dict[str, VirtualHostSpec]:
    to = {"path": "/", "proxy_pass": f"http://{address}"}
    cors = {"origins": ["https://app.test"], "credentials": True}
    page = {"statuses": [404, 500], "body": '<p>\n  costs $5, "sorry"</p>'}
    closed = {"body": "soon", "retry_after": 30}
    return {
        "h1": host("moved.test", to, pages={"redirects": REDIRECTS}),
        "h2": host("heads.test", to, content={"headers": HEADERS}),
        "h3": host("cors.test", to, content={"cors": cors}),
        "h4": host("errors.test", to, pages={"errors": [page]}),
        "h5": host("closed.test", to, pages={"maintenance": closed}),
        "h6": host("mine.test", to, pages={"maintenance": {**closed, "allowed": ["127.0.0.1"]}}),
        "h7": host("files.test", {"path": "/", "root": str(root), "content": {"fallback": "/index.html"}}),
        "h8": host(
            "small.test",
            {**to, "content": {"max_body_bytes": 10}},
            content={"max_body_bytes": 5, "timeouts": {"connect": 2, "read": 7}},
        ),
        "h9": host("zip.test", to, content={"compression": {"min_length": 20, "types": ["text/css"]}}),
        "h10": host("_", {"path": "/", "respond": {"status": 404, "body": "nobody $here"}}),
        "h11": host(
            "away.test", {"path": "/", "respond": {"status": 302, "to": "https://x.test$request_uri"}}
        ),
        "h12": host("flow.test", {**to, "content": {"buffering": False, "request_buffering": False}}),
    }


async def test_options_about_answers_have_their_effect(tmp_path: Path) -> None:
    async with backend("b") as behind, typed_site(tmp_path) as site:
        root = web_folder(site.rig.paths.state)
        root.mkdir()
        (root / "index.html").write_text("the app")
        (root / "a.txt").write_text("a file")
        await site.serve(hosts(behind.address, root))
        await _redirects(site)
        await _headers(site, behind)
        await _cross_origin(site, behind)
        await _pages(site, behind)
        await _bodies(site)


async def _redirects(site: Site) -> None:
    async def moved(path: str) -> tuple[int, str]:
        answer = await site.ask("moved.test", path)
        return answer.status_code, answer.headers.get("location", "")

    there = f"http://moved.test:{site.plain}"
    assert await moved("/old?x=1") == (308, f"{there}/new?x=1")
    assert await moved("/old/er") == (200, "")
    assert await moved("/docs/a/b?c") == (301, "https://docs.test/v2/a/b?c")
    assert await moved("/docsx") == (200, "")
    assert await moved("/u/42") == (302, f"{there}/users?id=42")
    assert await moved("/u/x") == (308, f"{there}/never"), "in order: the first that matches decides"
    status, location = await moved("/docs/%0d%0aSet-Cookie:x")
    assert (status, location) == (301, "https://docs.test/v2/%0d%0aSet-Cookie:x"), "stays as it was sent"
    assert await moved("/x") == (200, "")
    away = await site.ask("away.test", "/p?q")
    assert away.headers["location"] == "https://x.test/p?q"


async def _headers(site: Site, behind: Backend) -> None:
    answer = await site.ask("heads.test", headers={"Cookie": "a=b"})
    assert answer.headers["server-name"] == "heads.test"
    assert answer.headers["x-both"] == 'quote" and ; {}'
    assert "X-Tenant: t-http" in behind.requests[-1]
    assert "ookie" not in behind.requests[-1]
    assert "X-Real-IP: 127.0.0.1" in behind.requests[-1], "those that are always there stay"


async def _cross_origin(site: Site, behind: Backend) -> None:
    before = len(behind.requests)
    asked = await site.ask("cors.test", method="OPTIONS", headers={"Origin": "https://app.test"})
    assert (asked.status_code, len(behind.requests)) == (204, before), "answered here"
    assert asked.headers["access-control-allow-origin"] == "https://app.test"
    assert "DELETE" in asked.headers["access-control-allow-methods"]
    answer = await site.ask("cors.test", headers={"Origin": "https://app.test"})
    assert answer.headers["access-control-allow-origin"] == "https://app.test"
    assert answer.headers["access-control-allow-credentials"] == "true"
    other = await site.ask("cors.test", headers={"Origin": "https://evil.test"})
    assert "access-control-allow-origin" not in other.headers


async def _pages(site: Site, behind: Backend) -> None:
    behind.status = 404
    gone = await site.ask("errors.test")
    behind.status = 200
    assert (gone.status_code, gone.text) == (404, '<p>   costs $5, "sorry"</p>')
    assert gone.headers["content-type"] == "text/html"
    assert (await site.ask("errors.test")).text == "b"
    closed = await site.ask("closed.test", "/any")
    assert (closed.status_code, closed.text, closed.headers["retry-after"]) == (503, "soon", "30")
    assert (await site.ask("mine.test")).text == "b"
    assert (await site.ask("closed.test", "/.fleetplane/maintenance")).status_code == 503
    assert (await site.ask("mine.test", "/.fleetplane/maintenance")).status_code == 404, "internal"
    assert (await site.ask("files.test", "/a.txt")).text == "a file"
    assert (await site.ask("files.test", "/some/page")).text == "the app"
    unknown = await site.ask("whoever.test", "/x")
    assert (unknown.status_code, unknown.text) == (404, "nobody $here")


async def _bodies(site: Site) -> None:
    assert (await site.ask("small.test", method="POST", content=b"x" * 10)).status_code == 200
    assert (await site.ask("small.test", method="POST", content=b"x" * 11)).status_code == 413
    text = (site.rig.paths.releases / site.applier.live.name / "conf.d/host-h8.conf").read_text()  # type: ignore[union-attr]
    assert "proxy_read_timeout 7s;" in text
    async with _sized() as address:
        await site.serve(
            {"z": host("zip.test", {"path": "/", "proxy_pass": f"http://{address}", "content": ZIP})}
        )
        assert (await site.ask("zip.test", "/100")).headers.get("content-encoding") == "gzip"
        assert "content-encoding" not in (await site.ask("zip.test", "/10")).headers


ZIP = {"compression": {"min_length": 20, "types": ["text/css"], "level": 5, "brotli": True}}


class _sized:  # noqa: N801  # reads like a function
    """A server whose answers are as long as their path says."""

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.split()[1][1:])
        told = (
            f"HTTP/1.1 200 X\r\nContent-Type: text/css\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
        )
        writer.write(told.encode() + b"a" * size)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
