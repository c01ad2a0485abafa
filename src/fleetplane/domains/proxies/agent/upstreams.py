"""Groups of servers as NGINX spells them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fleetplane.domains.proxies.agent.blocks import Node, block, directive
from fleetplane.domains.proxies.agent.quoting import Unrenderable
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251})|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_METHODS: Final = {pb.LEAST_CONNECTIONS: "least_conn", pb.IP_HASH: "ip_hash"}
"""Both kinds of round robin are what NGINX does unasked; weights make the difference."""
_SMALL_GROUP: Final = 50
"""Servers whose state fits into 64 KiB with room to spare; a page of it holds about four."""


def name(upstream_id: str) -> str:
    return f"fp_{upstream_id}"


def render(upstreams: Iterable[pb.Upstream], down: Mapping[str, frozenset[str]]) -> Iterator[Node]:
    for upstream in upstreams:
        yield block("upstream", name(upstream.id), body=_body(upstream, down.get(upstream.id, frozenset())))


def _body(upstream: pb.Upstream, down: frozenset[str]) -> Iterator[Node]:
    yield directive("zone", name(upstream.id), "64k" if len(upstream.servers) <= _SMALL_GROUP else "512k")
    if method := _METHODS.get(upstream.algorithm):
        yield directive(method)  # before `keepalive`, which builds on it
    for server in upstream.servers:
        yield _server(server, down=server.down or server.address in down)
    if upstream.keepalive_connections:
        yield directive("keepalive", str(upstream.keepalive_connections))


def _server(server: pb.UpstreamServer, *, down: bool) -> Node:
    if not _ADDRESS.fullmatch(server.address):
        raise Unrenderable(f"{server.address[:80]!r} is not host:port")
    return directive(
        "server",
        server.address,
        f"weight={server.weight or 1}",
        f"max_fails={server.max_fails}",
        f"fail_timeout={server.fail_timeout_seconds}s",
        *(["backup"] if server.backup else []),
        *(["down"] if down else []),
    )
