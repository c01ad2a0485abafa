"""Streams as NGINX spells them: TCP and UDP that is passed on as it comes. Pure.

`stream` is a context of its own beside `http`, with groups of servers of its own: one that both mention is
written twice, with a zone for each, since a zone belongs to one module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from fleetplane.domains.proxies.nginx import hosts, upstreams
from fleetplane.domains.proxies.nginx.blocks import Directive, Node, Unrenderable, block, directive
from fleetplane.domains.proxies.nginx.context import PartUnrenderable, RenderingContext, rendering_part
from fleetplane.domains.proxies.nginx.typed import proxying
from fleetplane.domains.proxies.nginx.typed.naming import tag
from fleetplane.domains.proxies.nginx.typed.upkeep import log_format
from fleetplane.domains.proxies.typed_options import SentStream, stream_options
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

INCLUDED: Final = "stream.d/*.conf"
UDP_IDLE_SECONDS: Final = 60
"""Datagrams have no end: NGINX by itself keeps what it knows of a client for ten minutes."""
ZONE_SIZE: Final = "1m"
"""Addresses that are counted at once: about 16,000."""
_LOG_FIELDS: Final = {
    "time": "$msec",
    "remote_addr": "$remote_addr",
    "method": "$protocol",
    "uri": ":$server_port",
    "status": "$status",
    "bytes_sent": "$bytes_sent",
    "request_length": "$bytes_received",
    "request_time": "$session_time",
    "upstream_response_time": "$upstream_session_time",
}
"""As far as a connection has what a request has; all of them strings, as in the log of requests."""


def options_of(stream: pb.Stream) -> SentStream:
    try:
        return stream_options(stream.options)
    except msgspec.MsgspecError as error:
        raise Unrenderable(f"this agent does not know an option of the stream: {error}") from error


def mentioned_upstreams(options: SentStream) -> set[str]:
    own = {options.upstream_id} if options.upstream_id else set()
    return own | {route.upstream_id for route in options.routes or ()}


def upstreams_of(stream: pb.Stream) -> set[str]:
    """The groups that a stream mentions; none of one that cannot be read, as rendering tells."""
    try:
        return mentioned_upstreams(options_of(stream))
    except Unrenderable:
        return set()


def served_ports(stream: pb.Stream) -> list[int]:
    """The ports that a stream is served on, as it was asked for."""
    try:
        return [options_of(stream).listen_port]
    except Unrenderable:
        return []


def needed_upstreams(update: pb.ConfigUpdate) -> set[str]:
    """The groups that any stream of a configuration mentions."""
    return {one for stream in update.streams for one in upstreams_of(stream)}


def only_for_streams(update: pb.ConfigUpdate) -> set[str]:
    """The groups that streams mention and no virtual host does."""
    of_hosts = {
        one
        for host in update.virtual_hosts
        for location in host.locations
        for one in hosts.mentioned_upstreams(location)
    }
    return needed_upstreams(update) - of_hosts


def main_block(context: RenderingContext) -> Iterator[Node]:
    """The `stream` block, and what must be loaded for it; nothing where there are no streams."""
    if not context.update.streams:
        return
    yield block(
        "stream",
        body=[
            # Names of hosts have up to 253 characters; a row of a table has to fit into one bucket.
            directive("map_hash_bucket_size", "512"),
            directive("map_hash_max_size", "8192"),
            directive("include", INCLUDED),
        ],
    )


def loaded(context: RenderingContext) -> Iterator[Directive]:
    """Said before everything else, where NGINX has streams in a file of their own."""
    binary = context.site.binary
    if context.update.streams and binary.stream_module is not None:
        yield directive("load_module", str(binary.stream_module))


def render(
    context: RenderingContext, down: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, str, list[Node]]]:
    """One file a stream and one a group, each with the part that it belongs to."""
    if not context.update.streams:
        return
    taken = _ports_of_hosts(context)
    groups = {one.id: one for one in context.update.upstreams}
    for stream in context.update.streams:
        with rendering_part(f"stream/{stream.id}"):
            if not context.site.binary.stream:
                raise Unrenderable("this NGINX has no stream module: install it, or name another NGINX")
            options = options_of(stream)
            _claim_port(context, options, taken)
            for one in sorted(mentioned_upstreams(options)):
                if one not in groups:
                    raise Unrenderable(f"its upstream {one[:80]!r} is missing")
                _suits(groups[one])
            nodes = list(_stream(context, stream.id, options, groups))
        yield f"stream.d/stream-{stream.id}", f"stream/{stream.id}", nodes
    for identity in sorted(needed_upstreams(context.update)):
        with rendering_part(f"upstream/{identity}"):
            group = _group(groups[identity], down.get(identity, frozenset()))
        yield f"stream.d/upstream-{identity}", f"upstream/{identity}", [group]


def _ports_of_hosts(context: RenderingContext) -> dict[tuple[str, int], str]:
    taken: dict[tuple[str, int], str] = {}
    for host in context.update.virtual_hosts:
        try:
            ports = hosts.served_ports(host)
        except Unrenderable as error:
            raise PartUnrenderable(error.message, part=f"virtual_host/{host.id}") from error
        taken |= {("tcp", context.site.ports.get(port, port)): f"virtual host {host.id}" for port in ports}
        if host.http3_enabled and context.site.binary.http3:
            port = context.site.ports.get(host.listen_port, host.listen_port)
            taken["udp", port] = f"virtual host {host.id}"
    return taken


def _claim_port(context: RenderingContext, options: SentStream, taken: dict[tuple[str, int], str]) -> None:
    if not 1 <= options.listen_port <= 65535:
        raise Unrenderable(f"there is no port {options.listen_port}")
    port = context.site.ports.get(options.listen_port, options.listen_port)
    if other := taken.get((options.protocol, port)):
        raise Unrenderable(f"listen_port: {options.protocol} port {port} is served by {other}")
    taken[options.protocol, port] = f"stream {options.name[:80]!r}"


def _suits(upstream: pb.Upstream) -> None:
    """Refuse a group whose options only requests can have."""
    options = proxying.options_of(upstream)
    if fault := unsuited(
        tls=bool(options.tls),
        method=options.balancing.method if options.balancing else "",
        key=options.balancing.key if options.balancing else "",
    ):
        raise Unrenderable(f"upstream {upstream.name[:80]!r}: {fault}")


def unsuited(*, tls: bool, method: str, key: str) -> str:
    """Why a group of servers cannot be a stream's; empty if it can."""
    if tls:
        return "has `tls`, and streams pass on what clients send without a TLS of their own"
    if method == "sticky_cookie":
        return "is balanced by cookie, which streams do not read"
    if method == "hash" and key != "address":
        return f"is balanced by {key[:80]!r}, which streams do not read: use `address`"
    return ""


def group_name(upstream: str) -> str:
    return f"fps_{upstream}"


def _group(upstream: pb.Upstream, down: frozenset[str]) -> Node:
    options = proxying.options_of(upstream)
    body: list[Node] = [directive("zone", group_name(upstream.id), upstreams.zone_size(upstream))]
    if options.balancing and options.balancing.method == "random":
        body.append(directive("random", "two", "least_conn"))
    elif options.balancing or upstream.algorithm == pb.IP_HASH:
        body.append(directive("hash", "$remote_addr", "consistent"))
    elif upstream.algorithm == pb.LEAST_CONNECTIONS:
        body.append(directive("least_conn"))
    return block("upstream", group_name(upstream.id), body=[*body, *upstreams.servers(upstream, down)])


def _stream(
    context: RenderingContext, identity: str, options: SentStream, groups: Mapping[str, pb.Upstream]
) -> Iterator[Node]:
    own = tag("stream", identity)
    counted, most = f"fps_conn_{own}", options.limits.connections if options.limits else 0
    if most:
        yield directive("limit_conn_zone", "$binary_remote_addr", f"zone={counted}:{ZONE_SIZE}")
    logged = options.log is not False
    if logged:
        fields = {**_LOG_FIELDS, "stream_id": identity}
        if options.routes:
            fields["host"] = "$ssl_preread_server_name"
        yield log_format(f"fps_log_{own}", fields)
    target = group_name(options.upstream_id) if options.upstream_id else ""
    if options.routes:
        variable = f"$fleetplane_sni_{own}"
        yield _chosen(context, options, variable, target)
        target = variable
    body = [
        *(_listen(context, options)),
        *([directive("ssl_preread", "on")] if options.routes else []),
        *(directive(rule.action, rule.network) for rule in options.rules or ()),
        *([directive("limit_conn", counted, str(most))] if most else []),
        *_passing(options, groups),
        directive("proxy_pass", target),
        directive("access_log", str(context.site.paths.access_log), f"fps_log_{own}")
        if logged
        else directive("access_log", "off"),
    ]
    yield block("server", body=body)


def _chosen(context: RenderingContext, options: SentStream, variable: str, default: str) -> Node:
    """The group by the name that a TLS handshake asks for. With none, NGINX closes the connection."""
    if not context.site.binary.stream_sni:
        raise Unrenderable("routes: this NGINX cannot read the name from a TLS handshake")
    body = [directive("hostnames"), directive("default", default)]
    for route in options.routes or ():
        body += [directive(name.lower(), group_name(route.upstream_id)) for name in route.names]
    return block("map", "$ssl_preread_server_name", variable, body=body)


def _listen(context: RenderingContext, options: SentStream) -> Iterator[Directive]:
    for address in context.site.listen(options.listen_port):
        yield directive("listen", address, *(["udp"] if options.protocol == "udp" else []))


def _passing(options: SentStream, groups: Mapping[str, pb.Upstream]) -> Iterator[Directive]:
    if options.send_proxy_protocol:
        yield directive("proxy_protocol", "on")
    timeouts, limits = options.timeouts, options.limits
    if timeouts and timeouts.connect:
        yield directive("proxy_connect_timeout", f"{timeouts.connect}s")
    if timeouts and timeouts.idle:
        yield directive("proxy_timeout", f"{timeouts.idle}s")
    elif options.protocol == "udp":
        yield directive("proxy_timeout", f"{UDP_IDLE_SECONDS}s")
    if isinstance(options.responses, int):
        yield directive("proxy_responses", str(options.responses))
    if limits and limits.download_bytes_per_second:
        yield directive("proxy_download_rate", str(limits.download_bytes_per_second))
    if limits and limits.upload_bytes_per_second:
        yield directive("proxy_upload_rate", str(limits.upload_bytes_per_second))
    retries = proxying.options_of(groups[options.upstream_id]).retries if options.upstream_id else None
    if retries and isinstance(retries.tries, int):
        yield directive("proxy_next_upstream_tries", str(retries.tries))
    if retries and isinstance(retries.timeout, int):
        yield directive("proxy_next_upstream_timeout", f"{retries.timeout}s")
