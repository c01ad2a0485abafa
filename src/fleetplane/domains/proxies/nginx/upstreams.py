"""Groups of servers as NGINX spells them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fleetplane.domains.proxies.nginx.blocks import Node, Unrenderable, block, directive
from fleetplane.domains.proxies.nginx.checks import authority_fault
from fleetplane.domains.proxies.nginx.typed import proxying
from fleetplane.domains.proxies.typed_options import ServerOptions
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

_METHODS: Final = {pb.LEAST_CONNECTIONS: "least_conn", pb.IP_HASH: "ip_hash"}
"""Both kinds of round robin are what NGINX does unasked; weights make the difference."""
UPSTREAM_PREFIX: Final = "fp_"
_SMALL_GROUP: Final = 50
"""Servers whose state fits into 64 KiB with room to spare; a page of it holds about four."""


def name(upstream_id: str) -> str:
    return f"{UPSTREAM_PREFIX}{upstream_id}"


def render(upstreams: Iterable[pb.Upstream], down: Mapping[str, frozenset[str]]) -> Iterator[Node]:
    for upstream in upstreams:
        yield from proxying.sticky(upstream, proxying.options_of(upstream))
        yield block("upstream", name(upstream.id), body=_body(upstream, down.get(upstream.id, frozenset())))


def zone_size(upstream: pb.Upstream) -> str:
    return "64k" if len(upstream.servers) <= _SMALL_GROUP else "512k"


def servers(upstream: pb.Upstream, down: frozenset[str]) -> Iterator[Node]:
    """The servers of a group; `down` are those that active checks have found dead."""
    options = proxying.options_of(upstream)
    for server in upstream.servers:
        given = (options.servers or {}).get(server.address, ServerOptions())
        yield _server(server, given, down=server.down or server.address in down)


def _body(upstream: pb.Upstream, down: frozenset[str]) -> Iterator[Node]:
    yield directive("zone", name(upstream.id), zone_size(upstream))
    options = proxying.options_of(upstream)
    if options.balancing:
        yield from proxying.balancing(upstream, options)
    elif method := _METHODS.get(upstream.algorithm):
        yield directive(method)  # before `keepalive`, which builds on it
    yield from servers(upstream, down)
    if upstream.keepalive_connections:
        yield directive("keepalive", str(upstream.keepalive_connections))
    if options.keepalive and options.keepalive.requests:
        yield directive("keepalive_requests", str(options.keepalive.requests))
    if options.keepalive and options.keepalive.timeout:
        yield directive("keepalive_timeout", f"{options.keepalive.timeout}s")


def _server(server: pb.UpstreamServer, given: ServerOptions, *, down: bool) -> Node:
    if fault := authority_fault(server.address, port=True):
        raise Unrenderable(f"the address {server.address[:80]!r} {fault}")
    return directive(
        "server",
        server.address,
        f"weight={server.weight or 1}",
        f"max_fails={server.max_fails}",
        f"fail_timeout={server.fail_timeout_seconds}s",
        *([f"max_conns={given.max_connections}"] if given.max_connections else []),
        *([f"slow_start={given.slow_start}s"] if given.slow_start else []),
        *(["backup"] if server.backup else []),
        # A server that is down finishes what it has; that is all that draining means here.
        *(["down"] if down or given.draining else []),
    )
