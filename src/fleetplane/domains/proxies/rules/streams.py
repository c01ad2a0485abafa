"""What a stream may be, and what it cannot be served together with. Pure.

Ports that streams may listen on: an allow-list of the server's owner. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.nginx.site import LACKS, STREAMS
from fleetplane.domains.proxies.nginx.streams import unsuited
from fleetplane.domains.proxies.rules import directives
from fleetplane.domains.proxies.rules.access import rules_problems
from fleetplane.domains.proxies.rules.conflicts import (
    WorkspaceSurroundings,
    may_meet,
    served_names,
    served_ports,
    targets,
)
from fleetplane.domains.proxies.rules.features import unable_problem
from fleetplane.domains.proxies.rules.texts import target_problems
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem, Rejected

STREAMS_PER_WORKSPACE: Final = 500
ROUTES_LIMIT: Final = 200
NAMES_LIMIT: Final = 50
"""Of one route."""
CONNECTIONS_LIMIT: Final = 65_535
RATE_LIMIT: Final = 1 << 40
"""Bytes a second: 8 Tbit/s, more than any line has."""
SECONDS_LIMIT: Final = 86_400
RESPONSES_LIMIT: Final = 1_000_000
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ROUTED: Final = re.compile(rf"(?:\*\.|\.)?{_LABEL}(?:\.{_LABEL})*")
_NO_NAMES: Final = frozenset({"default", "hostnames", "include", "volatile"})
"""Words of NGINX's tables, which would not be taken for names."""
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_TCP_ONLY: Final = ("routes", "send_proxy_protocol")


def stream_upstreams(spec: StreamSpec) -> set[str]:
    """The upstreams that a stream passes on to."""
    own = {spec.upstream_id} if spec.upstream_id else set()
    return own | {route.upstream_id for route in spec.routes or ()}


def stream_problems(spec: StreamSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """What is wrong with a stream by itself, and with what it refers to."""
    yield from shape_problems(spec)
    if 1 <= spec.listen_port <= 65535 and spec.listen_port not in around.stream_ports:
        yield Problem(
            field="listen_port",
            message=f"Port {spec.listen_port} is not one that streams may have here: {around.stream_ports}. "
            "The server's owner allows more with proxies.stream_ports",
            code=Code.OUT_OF_RANGE,
        )
    for field, identity in _references(spec):
        if identity not in around.upstreams:
            message = "There is no such upstream in this workspace"
            yield Problem(field=field, message=message, code=Code.UNKNOWN_REFERENCE)
        elif (found := around.upstream_specs.get(identity)) is not None and (fault := upstream_fault(found)):
            message = f"Upstream {found.name!r} {fault}"
            yield Problem(field=field, message=message, code=Code.INCOMPATIBLE)
    if targeted := list(target_problems(spec.target_agents, around)):
        yield from targeted
    else:
        yield from _feature_problems(spec, around)


def shape_problems(spec: StreamSpec) -> Iterator[Problem]:
    """What no NGINX could serve, whatever is around it."""
    if not _NAME.fullmatch(spec.name):
        yield Problem(field="name", message="Must be 1 to 63 of a-z, 0-9 and '-', with no '-' at either end")
    yield from _range(spec.listen_port, 1, 65535, "listen_port")
    if not spec.upstream_id and not spec.routes:
        message = "Required unless routes say where connections go"
        yield Problem(field="upstream_id", message=message, code=Code.REQUIRED)
    if spec.protocol == "udp":
        for field in _TCP_ONLY:
            if getattr(spec, field):
                yield Problem(field=field, message="Only with the protocol tcp", code=Code.INCOMPATIBLE)
    elif isinstance(spec.responses, int):
        yield Problem(field="responses", message="Only with the protocol udp", code=Code.INCOMPATIBLE)
    yield from _route_problems(spec)
    yield from rules_problems(spec.rules or (), "rules")
    yield from _bound_problems(spec)


def _references(spec: StreamSpec) -> Iterator[tuple[str, str]]:
    if spec.upstream_id:
        yield "upstream_id", spec.upstream_id
    for index, route in enumerate(spec.routes or ()):
        yield f"routes.{index}.upstream_id", route.upstream_id


def _route_problems(spec: StreamSpec) -> Iterator[Problem]:
    routes = spec.routes or ()
    if len(routes) > ROUTES_LIMIT:
        yield Problem(field="routes", message=f"More than {ROUTES_LIMIT} routes", code=Code.TOO_MANY)
        return
    seen: set[str] = set()
    for index, route in enumerate(routes):
        field = f"routes.{index}.names"
        if not route.names:
            yield Problem(field=field, message="At least one name is required", code=Code.REQUIRED)
        if len(route.names) > NAMES_LIMIT:
            yield Problem(field=field, message=f"More than {NAMES_LIMIT} names", code=Code.TOO_MANY)
            continue
        for position, name in enumerate(route.names):
            claimed = served_names(name)
            if len(name) > 253 or not _ROUTED.fullmatch(name) or name.lower() in _NO_NAMES:
                message = "Must be a name such as a.example.com, *.example.com or .example.com"
                yield Problem(field=f"{field}.{position}", message=message)
            elif seen & claimed:
                message = f"{min(seen & claimed)} is routed twice"
                yield Problem(field=f"{field}.{position}", message=message, code=Code.NOT_UNIQUE)
            seen |= claimed


def _bound_problems(spec: StreamSpec) -> Iterator[Problem]:
    limits, timeouts = spec.limits, spec.timeouts
    bounds: tuple[tuple[object, str, int, int], ...] = (
        (limits and limits.connections, "limits.connections", 1, CONNECTIONS_LIMIT),
        (limits and limits.download_bytes_per_second, "limits.download_bytes_per_second", 1, RATE_LIMIT),
        (limits and limits.upload_bytes_per_second, "limits.upload_bytes_per_second", 1, RATE_LIMIT),
        (timeouts and timeouts.connect, "timeouts.connect", 1, SECONDS_LIMIT),
        (timeouts and timeouts.idle, "timeouts.idle", 1, SECONDS_LIMIT),
        (spec.responses, "responses", 0, RESPONSES_LIMIT),
    )
    for value, field, low, high in bounds:
        if isinstance(value, int):
            yield from _range(value, low, high, field)


def _range(value: int, low: int, high: int, field: str) -> Iterator[Problem]:
    if not low <= value <= high:
        yield Problem(field=field, message=f"Must be between {low} and {high}", code=Code.OUT_OF_RANGE)


def _feature_problems(spec: StreamSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    serving = {
        agent: around.capabilities[agent]
        for agent, labels in around.agents.items()
        if agent in around.capabilities and targets(spec.target_agents, agent, labels)
    }
    lacking = [agent for agent, known in serving.items() if f"{LACKS}stream" in known]
    if lacking:
        words = "has an NGINX without the stream module: install it, or choose other agents"
        yield unable_problem("protocol", words, lacking)
    old = [agent for agent, known in serving.items() if STREAMS not in known and agent not in lacking]
    if old:
        yield unable_problem("protocol", "does not know streams: update its program", old)
    blind = [agent for agent, known in serving.items() if f"{LACKS}stream-sni" in known]
    if spec.routes and (blind := [agent for agent in blind if agent not in lacking]):
        yield unable_problem("routes", "has an NGINX that cannot read names from TLS handshakes", blind)


def upstream_fault(spec: UpstreamSpec) -> str:
    """Why an upstream cannot be a stream's; empty if it can."""
    balancing = spec.balancing
    return unsuited(
        tls=bool(spec.tls),
        method=balancing.method if balancing else "",
        key=balancing.key if balancing else "",
    )


def upstream_of_streams_problems(
    identity: str, spec: UpstreamSpec, streams: Mapping[str, StreamSpec]
) -> Iterator[Problem]:
    """An upstream that a stream has cannot come to be one that no stream can have."""
    fault = upstream_fault(spec)
    using = [one.name for one in streams.values() if identity in stream_upstreams(one)] if fault else []
    if using:
        field = "tls" if spec.tls else "balancing"
        message = f"Stream {min(using)!r} uses this upstream, which {fault}"
        yield Problem(field=field, message=directives.capital(message), code=Code.INCOMPATIBLE)


# Together.


def stream_clashes(spec: StreamSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """Other streams, and virtual hosts, on the same port of an agent."""
    for identity, other in around.streams.items():
        if (other.protocol, other.listen_port) == (spec.protocol, spec.listen_port) and may_meet(
            spec.target_agents, other.target_agents, around.agents
        ):
            yield _taken(spec, f"stream {other.name!r} ({identity})")
    for identity, host in around.virtual_hosts.items():
        if spec.listen_port in host_ports(host, spec.protocol) and may_meet(
            spec.target_agents, host.target_agents, around.agents
        ):
            yield _taken(spec, f"virtual host {host.name!r} ({identity})")


def _taken(spec: StreamSpec, told: str) -> Problem:
    message = f"{spec.protocol.upper()} port {spec.listen_port} is served by {told}"
    return Problem(field="listen_port", message=message, code=Code.NOT_UNIQUE)


def host_ports(host: VirtualHostSpec, protocol: str) -> set[int]:
    """The ports of a protocol that a virtual host is served on."""
    if protocol == "udp":
        return {host.listen_port} if host.http3_enabled else set()
    return {port for port, _ in served_ports(host)}


def host_and_stream_clashes(host: VirtualHostSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """Streams on a port that a virtual host asks for."""
    for identity, stream in around.streams.items():
        if stream.listen_port in host_ports(host, stream.protocol) and may_meet(
            host.target_agents, stream.target_agents, around.agents
        ):
            field = "listen_port" if stream.listen_port == host.listen_port else "tls.force_https"
            yield Problem(
                field=field,
                message=f"{stream.protocol.upper()} port {stream.listen_port} is served by "
                f"stream {stream.name!r} ({identity})",
                code=Code.NOT_UNIQUE,
            )


def labelled_clashes(
    agent: str,
    labels: Mapping[str, str],
    hosts: Mapping[str, VirtualHostSpec],
    streams: Mapping[str, StreamSpec],
) -> Iterator[Problem]:
    """Streams that an agent with these labels would serve, and cannot serve with what else it would."""
    taken: dict[tuple[str, int], str] = {}
    for host in hosts.values():
        if targets(host.target_agents, agent, labels):
            for protocol in ("tcp", "udp"):
                taken |= dict.fromkeys(((protocol, port) for port in host_ports(host, protocol)), host.name)
    for stream in streams.values():
        if not targets(stream.target_agents, agent, labels):
            continue
        place = (stream.protocol, stream.listen_port)
        if place in taken:
            message = (
                f"{stream.protocol} port {stream.listen_port} would be served by {taken[place]!r} and "
                f"{stream.name!r} at once"
            )
            yield Problem(field="labels", message=message, code=Code.INCOMPATIBLE)
        taken[place] = stream.name


def accept_stream(spec: StreamSpec, around: WorkspaceSurroundings) -> None:
    """Refuse a stream that is wrong, then one that clashes."""
    if problems := list(stream_problems(spec, around)):
        raise Rejected(*problems)
    if clashes := list(stream_clashes(spec, around)):
        raise ConflictBlocker("the stream clashes with another listener", clashes)
