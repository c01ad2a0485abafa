"""An existing configuration is imported so that requests are answered as before; nothing is lost silently."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.proxies.nginx_rig import NGINX, backend, web_folder
from support.proxies.stream_backends import (
    datagram,
    datagram_server,
    free_datagram_port,
    line_server,
    said,
)
from support.proxies.typed_rig import CERTIFICATE, Site, typed_site
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.importing.conversion import convert
from fleetplane.domains.proxies.importing.reading import read, read_shown
from fleetplane.domains.proxies.importing.report import Imported, StatementOutcome, placed_by_name
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.streams import stream_problems
from fleetplane.domains.proxies.serving.bundles import Bundle, pointing, streaming
from fleetplane.domains.proxies.typed_options import StreamLimits
from fleetplane.kernel.errors import InvalidArgument

CONFIGS = Path(__file__).parent / "configs"


def written(name: str, folder: Path, **places: object) -> Path:
    """A configuration with the ports and folders of this run."""
    shutil.copytree(CONFIGS / name, folder)
    for file in folder.rglob("*.conf"):
        text = file.read_text()
        for place, value in {"FOLDER": folder, **places}.items():
            text = text.replace(f"@{place}@", str(value))
        file.write_text(text)
    return folder / "nginx.conf"


def bundle(made: Imported, *, raw: bool = True) -> Bundle:
    """As the server takes it, and finds nothing wrong with it."""
    ids = {one.id: CERTIFICATE for one in made.certificates}
    found = msgspec.convert(made.bundle(ids, raw=raw), Bundle)
    around = WorkspaceSurroundings(
        virtual_hosts={}, upstreams={one.id for one in found.upstreams}, certificates={CERTIFICATE}, agents={}
    )
    for one in found.virtual_hosts:
        assert list(rules.host_problems(one.spec(), around)) == []
    for group in found.upstreams:
        assert list(rules.upstream_problems(group.spec())) == []
    groups = {one.id: one.spec() for one in found.upstreams}
    for stream in found.streams or ():
        assert list(stream_problems(stream.spec(), replace(around, upstream_specs=groups))) == []
    return found


def outcomes(made: Imported) -> dict[str, str]:
    return {line.text: line.outcome for line in made.report}


@asynccontextmanager
async def original(config: Path, port: int) -> AsyncIterator[None]:
    arguments = ("-c", str(config), "-p", str(config.parent), "-g", "daemon off;")
    process = await asyncio.create_subprocess_exec(NGINX, *arguments, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                    continue
                writer.close()
                await writer.wait_closed()
                break
        assert process.returncode is None, (config.parent / "error.log").read_text()
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serve(site: Site, found: Bundle) -> None:
    """Under ids as a workspace would give them."""
    ids = {one.id: f"g{number}" for number, one in enumerate(found.upstreams)}
    await site.serve(
        {f"h{number}": pointing(one.spec(), ids, {}) for number, one in enumerate(found.virtual_hosts)},
        {ids[one.id]: one.spec() for one in found.upstreams},
        streams={f"s{number}": streaming(one.spec(), ids) for number, one in enumerate(found.streams or ())},
    )


async def answers(port: int, asked: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    found = []
    async with httpx.AsyncClient(timeout=60.0) as client:
        for name, path, more in asked:
            method = more.get("method", "GET")
            url, there = f"http://127.0.0.1:{port}{path}", {"host": name}
            one = await client.request(method, url, headers=there, content=more.get("content"))
            headers = ("location", "x-site", "content-encoding") if one.status_code < 400 else ()
            told = [one.headers.get(header) for header in headers]
            body = one.text if one.status_code < 300 or name == "nobody.test" else ""
            found.append((name, path, one.status_code, body, *told))
    return found


SITES: list[tuple[str, str, dict[str, Any]]] = [
    ("nobody.test", "/", {}),
    ("shop.test", "/", {}),
    ("www.shop.test", "/a?b=c", {}),
    ("shop.test", "/", {"method": "POST", "content": b"x" * 16}),
    ("shop.test", "/", {"method": "POST", "content": b"x" * 17}),
    ("shop.test", "/v1/x", {"method": "POST", "content": b"x" * 9}),
    ("shop.test", "/internal/x", {}),
    ("shop.test", "/v1/things", {}),
    ("shop.test", "/health", {}),
    ("old.test", "/p?q", {}),
    ("files.test", "/", {}),
    ("files.test", "/a.txt", {}),
    ("files.test", "/no/such", {}),
    ("files.test", "/raw/none", {}),
]


async def test_several_sites_answer_as_before(tmp_path: Path) -> None:
    async with backend("b") as behind, typed_site(tmp_path) as site:
        root = web_folder(site.rig.paths.state)
        root.mkdir()
        (root / "index.html").write_text("home")
        (root / "a.txt").write_text("a file")
        plain, secure = free_port(), free_port()
        config = written(
            "sites", tmp_path / "c", PLAIN=plain, SECURE=secure, BACKEND=behind.address, ROOT=root
        )
        chain, key = site.ca.server(tmp_path)
        shutil.copy(chain, config.parent / "site.crt")
        shutil.copy(key, config.parent / "site.key")
        async with original(config, plain):
            before = await answers(plain, SITES)
            passed_before = [one.split("\r\n")[0] for one in behind.requests]
        behind.requests.clear()
        made = convert(read(config))
        assert [line for line in made.report if line.outcome is StatementOutcome.REFUSED] == []
        raw = [line.text for line in made.report if line.outcome is StatementOutcome.RAW]
        assert raw == ["expires 5m"]
        await serve(site, bundle(made))
        assert await answers(plain, SITES) == before
        assert [one.split("\r\n")[0].replace("1.0", "1.1") for one in behind.requests] == [
            one.replace("1.0", "1.1") for one in passed_before
        ]
        assert any("X-Site: shop" in one for one in behind.requests)
        trust = ssl.create_default_context(cadata=site.ca.pem.decode())
        trust.check_hostname = False
        async with httpx.AsyncClient(verify=trust, timeout=60.0) as client:
            told = {"sni_hostname": "secure.test"}
            there = {"host": "secure.test"}
            answer = await client.get(f"https://127.0.0.1:{secure}/", headers=there, extensions=told)
        assert answer.text == "b"


PHP: list[tuple[str, str, dict[str, Any]]] = [
    ("blog.test", "/page.html", {}),
    ("blog.test", "/.htaccess", {}),
    ("blog.test", "/robots.txt", {}),
]


async def test_the_source_of_a_program_is_not_shown_where_it_cannot_run(tmp_path: Path) -> None:
    async with typed_site(tmp_path) as site:
        root = web_folder(site.rig.paths.state)
        root.mkdir()
        (root / "page.html").write_text("a page")
        (root / "index.php").write_text("<?php secret();")
        (root / ".htaccess").write_text("secret")
        (root / "private").mkdir()
        (root / "private" / "x").write_text("secret")
        plain = free_port()
        config = written("php", tmp_path / "c", PLAIN=plain, ROOT=root)
        async with original(config, plain):
            before = await answers(plain, PHP)
        made = convert(read(config))
        told = outcomes(made)
        assert told["fastcgi_pass 127.0.0.1:9000"] == "refused"
        assert told["location ~ \\.php$"] == "refused"
        assert told["charset utf-8"] == "kept raw"
        assert told["location /private/"] == "refused", "without its users it would be open"
        await serve(site, bundle(made))
        assert await answers(plain, PHP) == before
        closed = await answers(plain, [("blog.test", "/index.php", {}), ("blog.test", "/private/x", {})])
        assert [one[2] for one in closed] == [503, 503]


async def test_a_gateway_passes_on_as_before(tmp_path: Path) -> None:
    ports = {"PLAIN": free_port(), "SECURE": free_port(), "LINES": free_port(), "NAMES": free_datagram_port()}
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(typed_site(tmp_path))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*site.ca.server(site.folder))
        one = await stack.enter_async_context(line_server("one", context))
        two = await stack.enter_async_context(line_server("two", context))
        lines = await stack.enter_async_context(line_server("lines"))
        names = await stack.enter_async_context(datagram_server("names"))
        places = {"ONE": one.address, "TWO": two.address, "BEHIND": lines.address, "RESOLVER": names}
        module = site.rig.site.binary.stream_module
        config = written("gateway", tmp_path / "c", MODULE=module, **ports, **places)

        async def told() -> list[str]:
            trust = site.trust()
            asked = ("a.test", "x.b.test", "other.test")
            return [
                *[await said(ports["SECURE"], trust=trust, name=name) for name in asked],
                re.sub(r" [0-9]+ [0-9]+\r$", "", await said(ports["LINES"])),
                await datagram(ports["NAMES"], "name?"),
            ]

        async with original(config, ports["PLAIN"]):
            before = await told()
            moved = await answers(ports["PLAIN"], [("a.test", "/x", {})])
        assert before == [
            "one hello",
            "two hello",
            "two hello",
            "lines PROXY TCP4 127.0.0.1 127.0.0.1",
            "names name?",
        ]
        made = convert(read(config))
        assert [
            line for line in made.report if line.outcome in (StatementOutcome.REFUSED, StatementOutcome.RAW)
        ] == []
        found = bundle(made)
        assert {one.name: one.limits for one in found.streams or () if one.limits} == {
            f"database-{ports['LINES']}": StreamLimits(connections=20, download_bytes_per_second=1 << 20)
        }
        await serve(site, found)
        assert await told() == before
        assert await answers(ports["PLAIN"], [("a.test", "/x", {})]) == moved


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("listen 127.0.0.1:1; proxy_pass a:1;", "every address"),
        ("listen 1 ssl; proxy_pass a:1;", "listen ssl"),
        ("listen 1; proxy_pass unix:/s;", "must be a group"),
        ("listen 1; proxy_pass $elsewhere;", "only a map"),
        ("listen 1; proxy_pass a:1; ssl_certificate x;", "ssl_certificate x"),
        ("listen 1; proxy_pass a:1; limit_conn unknown 1;", "limit_conn unknown 1"),
        ("listen 1; proxy_pass $by_pattern; ssl_preread on;", "only names"),
        ("listen 1;", "are needed"),
    ],
)
def test_a_stream_of_which_something_is_not_understood_is_not_imported(
    tmp_path: Path, server: str, why: str
) -> None:
    table = "map $ssl_preread_server_name $by_pattern { ~^a a:1; }"
    (tmp_path / "nginx.conf").write_text(f"stream {{ {table} server {{ {server} }} }}")
    made = convert(read(tmp_path / "nginx.conf"))
    refused = [line.why for line in made.report if line.outcome is StatementOutcome.REFUSED]
    assert (made.streams, made.upstreams, len(refused)) == ([], [], 1)
    assert why in refused[0]


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        read(tmp_path / "none")
    (tmp_path / "bad").write_text("http { server {")
    with pytest.raises(InvalidArgument):
        read(tmp_path / "bad")


def test_raw_text_comes_along_only_when_it_is_confirmed(tmp_path: Path) -> None:
    (tmp_path / "nginx.conf").write_text("http { server { listen 80; charset utf-8; return 204; } }")
    made = convert(read(tmp_path / "nginx.conf"))
    assert made.has_raw
    assert bundle(made).virtual_hosts[0].custom_directives == {"charset": "utf-8"}
    assert bundle(made, raw=False).virtual_hosts[0].custom_directives == {}


def test_what_an_agent_shows_is_read_as_the_files_are(tmp_path: Path) -> None:
    config = tmp_path / "nginx.conf"
    config.write_text("http { include sites/*.conf; include sites/b; include /etc/not/shown; }")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.conf").write_text('server { listen 80; location / { return 200 "a"; } }')
    (tmp_path / "sites" / "b").write_text("server { listen 81; bad; }")
    texts = {str(one): one.read_text() for one in tmp_path.rglob("*") if one.is_file()}
    config.write_text("http { include sites/*.conf; include sites/b; }")
    expected = read(config)
    shutil.rmtree(tmp_path / "sites")
    assert read_shown(config, texts) == expected
    texts[str(config)] = f"http {{ include ../{tmp_path.name}/sites/*.conf; include ./sites/../sites/b; }}"
    (found,), (block,) = read_shown(config, texts), expected
    assert [one.words for one in found.block or ()] == [one.words for one in block.block or ()]
    with pytest.raises(InvalidArgument, match=f"{config}.*unexpected end of file"):
        read_shown(config, {str(config): "http {"})


def test_certificates_of_a_workspace_are_found_by_file_or_by_name(tmp_path: Path) -> None:
    text = ""
    for number, name in enumerate(("a.test", "b.test", "x.c.test", "d.test")):
        text += f"server {{ listen 443 ssl; server_name {name}; ssl_certificate {number}.pem;"
        text += f" ssl_certificate_key {number}.key; return 204; }}"
    (tmp_path / "nginx.conf").write_text(f"http {{ {text} }}")
    made = convert(read(tmp_path / "nginx.conf"))
    known = {"a.test": "A", "*.c.test": "C", "e.test": "E"}
    placed = placed_by_name(made.certificates, known, {"1.pem": "B"})
    assert placed == {"certificate-1": "A", "certificate-2": "B", "certificate-3": "C"}
