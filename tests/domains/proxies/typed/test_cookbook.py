"""Every recipe of the cookbook, run as printed on one NGINX."""

from __future__ import annotations

import re
import ssl
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from support.proxies.nginx_rig import backend, web_folder
from support.proxies.stream_backends import (
    datagram,
    datagram_server,
    free_datagram_port,
    line_server,
    said,
)
from support.proxies.typed_rig import CERTIFICATE, typed_site
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.kinds.passwords import sealed
from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.rest.bodies import CreateStream, CreateUpstream, CreateVirtualHost
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import HostNeighbours, WorkspaceSurroundings, host_clashes
from fleetplane.domains.proxies.rules.ports import DEFAULT_STREAM_PORTS, PortRanges
from fleetplane.domains.proxies.rules.streams import accept_stream

PAGE = Path(__file__).parents[4] / "docs" / "proxies-cookbook.md"
RECIPES = 20
"""At least so many are promised."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


Recipes = tuple[dict[str, VirtualHostSpec], dict[str, UpstreamSpec], dict[str, StreamSpec]]
PLACES = {
    "backend": "127.0.0.1:9000",
    "root": "/var/www/app",
    "lines": "127.0.0.1:9432",
    "secure": "127.0.0.1:9443",
    "datagrams": "127.0.0.1:9053",
}
"""What stands for something of the reader's."""


def bodies(**places: str) -> Recipes:
    hosts, groups, streams = {}, {}, {}
    for text in blocks("json"):
        made = text.replace('"CERTIFICATE"', f'"{CERTIFICATE}"')
        for place, value in places.items():
            made = made.replace(PLACES[place], value)
        body = msgspec.json.decode(made)
        if "servers" in body:
            groups[body["name"]] = msgspec.convert(body, CreateUpstream).spec()
        elif "server_name" not in body:
            streams[body["name"]] = msgspec.convert(body, CreateStream).spec()
        else:
            hosts[body["name"]] = msgspec.convert(body, CreateVirtualHost).spec()
    return hosts, groups, streams


def test_the_server_takes_every_recipe() -> None:
    hosts, groups, streams = bodies()
    assert PAGE.read_text().count("\n## ") >= RECIPES
    neighbours = HostNeighbours(hosts)
    for name, spec in hosts.items():
        around = WorkspaceSurroundings(
            virtual_hosts=neighbours.of(name, spec), upstreams=groups, certificates={CERTIFICATE}, agents={}
        )
        assert [*rules.host_problems(spec, around), *host_clashes(spec, around)] == [], name
    for group in groups.values():
        assert list(rules.upstream_problems(group)) == []
    for name, stream in streams.items():
        around = WorkspaceSurroundings(
            virtual_hosts=hosts,
            upstreams=groups,
            upstream_specs=groups,
            certificates=(),
            agents={},
            streams={other: spec for other, spec in streams.items() if other != name},
            stream_ports=PortRanges.parse(DEFAULT_STREAM_PORTS, field=""),
        )
        accept_stream(stream, around)


async def test_clients_see_what_the_recipes_say(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(backend("ok"))
        site = await stack.enter_async_context(typed_site(tmp_path))
        lines = await stack.enter_async_context(line_server("db"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*site.ca.server(site.folder))
        secure = await stack.enter_async_context(line_server("a", context))
        datagrams = await stack.enter_async_context(datagram_server("dns"))
        root = web_folder(site.rig.paths.state)
        root.mkdir()
        (root / "index.html").write_text("the app")
        hosts, groups, streams = bodies(
            backend=behind.address,
            root=str(root),
            lines=lines.address,
            secure=secure.address,
            datagrams=datagrams,
        )
        ports = {5432: free_port(), 8443: free_port(), 5353: free_datagram_port()}
        own = {**site.rig.site.ports, **ports}
        site.rig.site = site.rig.nginx.site = replace(site.rig.site, ports=own)
        await site.serve({name: sealed(spec) for name, spec in hosts.items()}, groups, streams=streams)
        async with httpx.AsyncClient(timeout=60.0) as client:
            for block in blocks("http"):
                await _exchange(client, f"http://127.0.0.1:{site.plain}", block)
        assert await said(ports[5432]) == "db hello"
        trust = site.trust()
        told = [await said(ports[8443], trust=trust, name=name) for name in ("x.a.example", "b.example")]
        assert told == ["a hello", ""]
        assert await datagram(ports[5353], "name?") == "dns name?"


async def _exchange(client: httpx.AsyncClient, base: str, block: str) -> None:
    asked, answered, *body = [part.strip() for part in block.split("\n\n")]
    (method, path), headers = asked.splitlines()[0].split(), _headers(asked)
    answer = await client.request(method, base + path, headers=headers)
    told: dict[str, Any] = {name: answer.headers.get(name) for name in _headers(answered)}
    assert (answer.status_code, told) == (int(answered.splitlines()[0]), _headers(answered)), block
    if body:
        assert answer.text == body[0], block


def _headers(part: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in part.splitlines()[1:])
