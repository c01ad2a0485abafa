"""Virtual hosts and their locations as NGINX spells them. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from fleetplane.domains.proxies.agent import upstreams
from fleetplane.domains.proxies.agent.blocks import Directive, Node, block, custom, directive
from fleetplane.domains.proxies.agent.context import Context
from fleetplane.domains.proxies.agent.quoting import Unrenderable, literal
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

CHALLENGE_PATH: Final = "/.well-known/acme-challenge/"
PLAIN_PORT: Final = 80
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_SERVER_NAME: Final = re.compile(rf"_|(?:\*\.|\.)?{_LABEL}(?:\.{_LABEL})*")
_LOCATION: Final = re.compile(r"(?:(=|\^~)\s+)?(/.*)|(~\*?)\s+(.+)")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_URL: Final = re.compile(r"https?://(?!unix:)[^\s\"'`;{}\\]+")
_FLAGS: Final = frozenset({"", "last", "break", "redirect", "permanent"})
_PROXY_HEADERS: Final = {
    "Host": "$host",
    "X-Real-IP": "$remote_addr",
    "X-Forwarded-For": "$proxy_add_x_forwarded_for",
    "X-Forwarded-Proto": "$scheme",
    "X-Request-ID": "$request_id",
    "Upgrade": "$http_upgrade",
    "Connection": "$fleetplane_connection",
}
"""Said in every location that proxies: one header of its own there cancels all that are inherited."""
_RETRIED: Final = ("error", "timeout", "http_502", "http_503", "http_504")
"""NGINX itself counts no answer as a failure, however bad. Only idempotent requests are repeated."""
_REDIRECTS: Final = ("redirect", "permanent")


def render(context: Context) -> Iterator[tuple[str, list[Node]]]:
    """One file a virtual host, and one for what answers requests that are for none of them."""
    by_port: dict[int, list[pb.VirtualHost]] = defaultdict(list)
    for host in context.update.virtual_hosts:
        by_port[context.site.ports.get(host.listen_port, host.listen_port)].append(host)
    for port, sharing in by_port.items():
        _check_port(port, sharing)
    for host in context.update.virtual_hosts:
        yield f"host-{host.id}", [block("server", body=_server(context, host))]
    if rest := list(_fallbacks(context, by_port)):
        yield "fallbacks", rest


def _check_port(port: int, sharing: Sequence[pb.VirtualHost]) -> None:
    """What NGINX takes with a warning at most, and then serves differently than asked for."""
    if not 1 <= port <= 65535:
        raise Unrenderable(f"there is no port {port}")
    if len({host.ssl_enabled for host in sharing}) > 1:
        raise Unrenderable(f"port {port} is asked for both with and without TLS")
    seen: set[str] = set()
    for host in sharing:
        for server_name in host.server_name.lower().split():
            if server_name in seen:
                raise Unrenderable(f"conflicting server name {server_name!r} on port {port}")
            seen.add(server_name)


# Servers.


def _server(context: Context, host: pb.VirtualHost) -> Iterator[Node]:
    if not 1 <= host.listen_port <= 65535:
        raise Unrenderable(f"there is no port {host.listen_port}")
    names = host.server_name.split()
    for one in names:
        if not _SERVER_NAME.fullmatch(one):
            raise Unrenderable(f"{one[:80]!r} is not a server name")
    yield from _listen(context, host, default="_" in names)
    yield directive("server_name", *(names or [""]))
    yield directive("set", "$fleetplane_host", host.id)
    if host.ssl_enabled:
        if host.ssl_certificate_id not in context.update.certificates:
            raise Unrenderable(f"virtual host {host.name[:80]!r}: its certificate is missing")
        yield directive("ssl_certificate", f"certs/{host.ssl_certificate_id}.pem")
        yield directive("ssl_certificate_key", f"certs/{host.ssl_certificate_id}.key")
    own = custom(host.custom_directives, where=f"virtual host {host.name[:80]!r}")
    challenged = bool(context.acme_responder) and not host.ssl_enabled
    # A redirect of the whole server would also catch the challenge, so each location gets it instead.
    everywhere = [one for one in own if challenged and _redirects(one)]
    yield from (one for one in own if one not in everywhere)
    if challenged and not any(_takes_challenges(location) for location in host.locations):
        yield _challenge(context)
    for location in host.locations:
        yield _location(context, location, everywhere)
    if everywhere and "/" not in {location.path for location in host.locations}:
        yield block("location", "/", body=everywhere)


def _redirects(node: Directive) -> bool:
    return node.name == "return" or (
        node.name == "rewrite" and node.arguments[-1:] in [(f,) for f in _REDIRECTS]
    )


def _listen(context: Context, host: pb.VirtualHost, *, default: bool) -> Iterator[Node]:
    binary = context.site.binary
    http2 = host.http2_enabled and host.ssl_enabled and binary.http2
    if host.http2_enabled and not http2:
        # Without TLS this port would speak HTTP/2 alone, and turn every other client away.
        context.note("http2_left_out", f"HTTP/2 needs TLS and an NGINX that has it: {host.name[:80]}")
    options = [
        *(["ssl"] if host.ssl_enabled else []),
        *(["http2"] if http2 and not binary.http2_directive else []),
        *(["default_server"] if default else []),
    ]
    addresses = context.site.listen(host.listen_port)
    yield from (directive("listen", address, *options) for address in addresses)
    if http2 and binary.http2_directive:
        yield directive("http2", "on")
    if host.http3_enabled and host.ssl_enabled and binary.http3:
        yield from (directive("listen", address, "quic") for address in addresses)
        yield directive("http3", "on")
    elif host.http3_enabled:
        context.note("http3_left_out", f"NGINX {binary.words} has no HTTP/3: {host.name[:80]}")


def _takes_challenges(location: pb.Location) -> bool:
    """A host that has this location proves its names in its own way; NGINX would not take it twice."""
    found = _LOCATION.fullmatch(location.path)
    return found is not None and found[2] == CHALLENGE_PATH and found[1] != "="


def _challenge(context: Context) -> Node:
    return block(
        "location", "^~", CHALLENGE_PATH,
        body=[
            directive("auth_basic", "off"),
            directive("allow", "all"),
            # The responder speaks HTTP/1.1 and newer; NGINX on its own would ask in HTTP/1.0.
            directive("proxy_http_version", "1.1"),
            directive("proxy_set_header", "Host", "$host"),
            # Always set, so that a visitor cannot; an empty one is not passed on at all.
            directive("proxy_set_header", "X-Fleetplane-Workspace", context.acme_workspace),
            directive("proxy_pass", f"http://{context.acme_responder}"),
        ],
    )  # fmt: skip


def _fallbacks(context: Context, by_port: dict[int, list[pb.VirtualHost]]) -> Iterator[Node]:
    site = context.site
    for port, sharing in by_port.items():
        caught = any("_" in host.server_name.split() for host in sharing)
        if sharing[0].ssl_enabled and not caught:
            # A name nobody serves gets no certificate of somebody else's.
            listen = [
                directive("listen", f"{address}:{port}", "ssl", "default_server")
                for address in site.addresses
            ]
            yield block("server", body=[*listen, directive("ssl_reject_handshake", "on")])
    plain = site.ports.get(PLAIN_PORT, PLAIN_PORT)
    if context.acme_responder and plain not in by_port:
        listen = [directive("listen", address) for address in site.listen(PLAIN_PORT)]
        nowhere = block("location", "/", body=[directive("return", "404")])
        yield block("server", body=[*listen, _challenge(context), nowhere])


# Locations.


def _location(context: Context, location: pb.Location, everywhere: list[Directive]) -> Node:
    found = _LOCATION.fullmatch(location.path)
    if found is None:
        raise Unrenderable(f"{location.path[:80]!r} is not the path of a location")
    modifier, prefix, regex, pattern = found.groups()
    arguments = [part for part in (modifier or regex, prefix or pattern) if part]
    return block("location", *arguments, body=[*everywhere, *_location_body(context, location)])


def _location_body(context: Context, location: pb.Location) -> Iterator[Node]:
    where = f"location {location.path[:80]}"
    own = custom(location.custom_directives, where=where)
    names = {one.name for one in own}
    target = _target(context, location)
    for rule in location.rewrite_rules:
        if rule.flag not in _FLAGS:
            raise Unrenderable(f"{where}: {rule.flag[:80]!r} is not a flag of a rewrite")
        yield directive("rewrite", rule.pattern, rule.replacement, *([rule.flag] if rule.flag else []))
    if target:
        yield from _proxying(location, target, names)
    elif location.root:
        yield directive("root", literal(location.root, what="root"))
    if location.index:
        yield directive("index", *literal(location.index, what="index").split())
    yield from _headers(location, proxying=bool(target))
    yield from own


def _target(context: Context, location: pb.Location) -> str:
    if location.upstream_id:
        if location.upstream_id not in {upstream.id for upstream in context.update.upstreams}:
            raise Unrenderable(f"location {location.path[:80]}: its upstream is missing")
        return f"http://{upstreams.name(location.upstream_id)}"
    if location.proxy_pass and not _URL.fullmatch(location.proxy_pass):
        raise Unrenderable(f"{location.proxy_pass[:80]!r} is not an http or https URL")
    return location.proxy_pass


def _proxying(location: pb.Location, target: str, given: set[str]) -> Iterator[Node]:
    defaults = {"proxy_http_version": ("1.1",), "proxy_next_upstream": _RETRIED, "proxy_pass": (target,)}
    yield from (directive(name, *values) for name, values in defaults.items() if name not in given)
    overridden = {header.name.lower() for header in location.custom_headers if not header.always}
    for name, value in _PROXY_HEADERS.items():
        if name.lower() not in overridden:
            yield directive("proxy_set_header", name, value)


def _headers(location: pb.Location, *, proxying: bool) -> Iterator[Node]:
    for header in location.custom_headers:
        if not _HEADER.fullmatch(header.name):
            raise Unrenderable(f"{header.name[:80]!r} is not the name of a header")
        if proxying and not header.always:
            yield directive("proxy_set_header", header.name, header.value)
        else:
            yield directive("add_header", header.name, header.value, *(["always"] if header.always else []))
