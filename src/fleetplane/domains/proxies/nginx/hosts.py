"""Virtual hosts and their locations as NGINX spells them. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.domains.proxies.nginx import checks, judging, upstreams
from fleetplane.domains.proxies.nginx.blocks import Directive, Node, Unrenderable, block, directive, literal
from fleetplane.domains.proxies.nginx.context import PartUnrenderable, RenderingContext, rendering_part
from fleetplane.domains.proxies.nginx.paths import GUARD
from fleetplane.domains.proxies.nginx.table import DirectiveContext as Place
from fleetplane.domains.proxies.nginx.typed import access, content, proxying, tls, upkeep
from fleetplane.domains.proxies.nginx.typed.naming import HostParts
from fleetplane.domains.proxies.nginx.typed.proxying import PassTarget
from fleetplane.domains.proxies.typed_options import (
    Access,
    Content,
    HostOptions,
    LocationOptions,
    host_options,
    location_options,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

CHALLENGE_PATH: Final = "/.well-known/acme-challenge/"
PLAIN_PORT: Final = 80
MISDIRECTED: Final = "421"
"""RFC 9110: the server does not answer for this host."""
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_SERVER_NAME: Final = re.compile(rf"_|(?:\*\.|\.)?{_LABEL}(?:\.{_LABEL})*")
_LOCATION: Final = re.compile(r"(?:(=|\^~)\s+)?(/.*)|(~\*?)\s+(.+)")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
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
_REDIRECTS: Final = ("redirect", "permanent")


def render(context: RenderingContext) -> Iterator[tuple[str, str, list[Node]]]:
    """One file a virtual host, with its id, and one for what answers requests that are for none of them."""
    by_port: dict[int, list[_Claim]] = defaultdict(list)
    known: dict[str, HostOptions] = {}
    for host in context.update.virtual_hosts:
        with rendering_part(f"virtual_host/{host.id}"):
            options = known[host.id] = _options(host)
        for claim in _claims(host, options):
            by_port[context.site.ports.get(claim.port, claim.port)].append(claim)
    for port, sharing in by_port.items():
        _check_port(context, port, sharing)
    for host in context.update.virtual_hosts:
        with rendering_part(f"virtual_host/{host.id}"):
            parts = HostParts(host=host.id)
            server = block("server", body=_server(context, host, known[host.id], parts))
            nodes: list[Node] = [*(one for each in parts.before.values() for one in each), server]
            context.user_files |= parts.user_files
            if tls.forces_https(known[host.id]):
                nodes.append(_redirecting(context, host, known[host.id]))
        yield f"host-{host.id}", host.id, nodes
    if rest := list(_fallbacks(context, by_port)):
        yield "fallbacks", "", rest


@dataclass(frozen=True, slots=True)
class _Claim:
    """A port on which a host is served."""

    port: int
    secure: bool
    host: pb.VirtualHost
    options: HostOptions


def _claims(host: pb.VirtualHost, options: HostOptions) -> Iterator[_Claim]:
    yield _Claim(host.listen_port, host.ssl_enabled, host, options)
    if tls.forces_https(options):
        yield _Claim(tls.HTTP_PORT, False, host, options)


def served_ports(host: pb.VirtualHost) -> list[int]:
    """Every port that a host is served on, as it was asked for."""
    return [claim.port for claim in _claims(host, _options(host))]


def _options(host: pb.VirtualHost) -> HostOptions:
    try:
        return host_options(host.options)
    except msgspec.MsgspecError as error:
        raise Unrenderable(f"this agent does not know an option of the virtual host: {error}") from error


def _check_port(context: RenderingContext, port: int, sharing: Sequence[_Claim]) -> None:
    """What NGINX takes with a warning at most, and then serves differently than asked for."""
    if not 1 <= port <= 65535:
        raise PartUnrenderable(f"there is no port {port}", part=f"virtual_host/{sharing[0].host.id}")
    ordered = sorted(sharing, key=lambda claim: _claim(context, claim.host))
    seen: set[str] = set()
    for claim in ordered:
        host = claim.host
        if tls.listen_options(claim.options) != tls.listen_options(ordered[0].options):
            words = f"port {port} is asked for both with and without the PROXY protocol"
            raise PartUnrenderable(words, part=f"virtual_host/{host.id}")
        if claim.secure != ordered[0].secure:
            words = f"port {port} is asked for both with and without TLS"
            raise PartUnrenderable(words, part=f"virtual_host/{host.id}")
        for server_name in host.server_name.lower().split():
            if server_name in seen:
                words = f"conflicting server name {server_name!r} on port {port}"
                raise PartUnrenderable(words, part=f"virtual_host/{host.id}")
            seen.add(server_name)


def _claim(context: RenderingContext, host: pb.VirtualHost) -> int:
    """Who has a name or a port first: what is in service, then what is asked for, then earlier forms."""
    if host.id in context.former:
        return 2
    return 0 if host.id in context.in_service else 1


# Servers.


def _server(
    context: RenderingContext, host: pb.VirtualHost, options: HostOptions, parts: HostParts
) -> Iterator[Node]:
    if not 1 <= host.listen_port <= 65535:
        raise Unrenderable(f"there is no port {host.listen_port}")
    names = host.server_name.split()
    for one in names:
        if not _SERVER_NAME.fullmatch(one):
            raise Unrenderable(f"{one[:80]!r} is not a server name")
    yield from _listen(context, host, options, default="_" in names)
    yield directive("server_name", *(names or [""]))
    yield from upkeep.place(host.id)
    if host.ssl_enabled:
        if host.ssl_certificate_id not in context.update.certificates:
            raise Unrenderable(f"virtual host {host.name[:80]!r}: its certificate is missing")
        yield directive("ssl_certificate", f"certs/{host.ssl_certificate_id}.pem")
        yield directive("ssl_certificate_key", f"certs/{host.ssl_certificate_id}.key")
        if options.authority_pem:
            context.made[tls.authority_file(host.id)] = options.authority_pem.encode()
    typed = [
        *tls.secured(host.id, host.ssl_certificate_id, options if host.ssl_enabled else HostOptions()),
        *tls.real_addresses(options),
    ]
    where = f"virtual host {host.name[:80]!r}"
    own = judging.raw(host.custom_directives, {Place.SERVER}, context.files, where=where)
    challenged = bool(context.acme_responder) and not host.ssl_enabled
    # A redirect of the whole server would also catch the challenge, so each location gets it instead.
    everywhere: list[Node] = [one for one in own if challenged and _redirects(one)]
    moved = list(content.redirects((options.pages and options.pages.redirects) or ()))
    said = {one.name for one in own}
    # Raw text is an administrator's, and counts more.
    yield from (one for one in typed if one.name not in said or one.name == "add_header")
    yield from guarded(context, [one for one in own if one not in everywhere])
    if options.cache:
        upkeep.zone(options.cache, parts, str(context.site.paths.temporary))
    if options.logging:
        yield from upkeep.logged(options.logging, parts, str(context.site.paths.access_log))
    yield from access.banned(options.access or Access(), parts)
    if options.pages:
        if options.pages.maintenance:
            yield from content.maintenance(options.pages.maintenance, parts)
        yield from content.error_pages(options.pages.errors or (), parts)
    everywhere = [*moved, *everywhere] if challenged else everywhere
    yield from () if challenged else moved
    if challenged and not any(_takes_challenges(location) for location in host.locations):
        yield _challenge(context)
    for location in host.locations:
        yield _location(context, location, _Around(options, parts, [*typed, *own]), everywhere)
    yield from parts.locations.values()
    if everywhere and "/" not in {location.path for location in host.locations}:
        yield block("location", "/", body=everywhere)


def _redirects(node: Directive) -> bool:
    return node.name == "return" or (
        node.name == "rewrite" and node.arguments[-1:] in [(f,) for f in _REDIRECTS]
    )


def _redirecting(context: RenderingContext, host: pb.VirtualHost, options: HostOptions) -> Node:
    """The same names without TLS: challenges are answered, everything else is sent to the host itself."""
    names = host.server_name.split()
    listen = ["default_server"] if "_" in names else []
    return block(
        "server",
        body=[
            *(
                directive("listen", address, *tls.listen_options(options), *listen)
                for address in tls.addresses(context.site.listen(tls.HTTP_PORT), options)
            ),
            directive("server_name", *names),
            *upkeep.place(host.id),
            *tls.real_addresses(options),
            *([_challenge(context)] if context.acme_responder else []),
            block("location", "/", body=[directive("return", "308", tls.https_url(host.listen_port))]),
        ],
    )


def _listen(
    context: RenderingContext, host: pb.VirtualHost, typed: HostOptions, *, default: bool
) -> Iterator[Node]:
    binary = context.site.binary
    http2 = host.http2_enabled and host.ssl_enabled and binary.http2
    if host.http2_enabled and not http2:
        # Without TLS this port would speak HTTP/2 alone, and turn every other client away.
        context.note("http2_left_out", f"HTTP/2 needs TLS and an NGINX that has it: {host.name[:80]}")
    options = [
        *(["ssl"] if host.ssl_enabled else []),
        *(["http2"] if http2 and not binary.http2_directive else []),
        *(["default_server"] if default else []),
        *tls.listen_options(typed),
    ]
    addresses = tls.addresses(context.site.listen(host.listen_port), typed)
    if not addresses:
        raise Unrenderable("listening.ipv6: this node has no IPv4 address to listen on")
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


def _challenge(context: RenderingContext) -> Node:
    return block(
        "location",
        "^~",
        CHALLENGE_PATH,
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
    )


def _fallbacks(context: RenderingContext, by_port: dict[int, list[_Claim]]) -> Iterator[Node]:
    """What answers requests for no virtual host; without it NGINX gives them to the first one of the port."""
    site = context.site
    for port, sharing in by_port.items():
        addresses = [f"{address}:{port}" for address in site.addresses]
        if any("_" in claim.host.server_name.split() for claim in sharing):
            continue
        typed = tls.listen_options(sharing[0].options)
        if sharing[0].secure:
            # A name nobody serves gets no certificate of somebody else's.
            listen = [directive("listen", address, "ssl", "default_server", *typed) for address in addresses]
            if site.binary.http3 and any(claim.host.http3_enabled for claim in sharing):
                listen += [directive("listen", address, "quic", "default_server") for address in addresses]
            protocols = tls.profile([claim.options for claim in sharing])
            yield block("server", body=[*listen, *protocols, directive("ssl_reject_handshake", "on")])
        else:
            yield _refusing(context, addresses, typed)
    plain = site.ports.get(PLAIN_PORT, PLAIN_PORT)
    if context.acme_responder and plain not in by_port:
        yield _refusing(context, site.listen(PLAIN_PORT))


def _refusing(context: RenderingContext, addresses: Sequence[str], options: Sequence[str] = ()) -> Node:
    """Challenges are answered for every name: a certificate may come before its virtual host."""
    return block(
        "server",
        body=[
            *(directive("listen", address, "default_server", *options) for address in addresses),
            *upkeep.place(""),
            *([_challenge(context)] if context.acme_responder else []),
            block("location", "/", body=[directive("return", MISDIRECTED)]),
        ],
    )


# Locations.


@dataclass(frozen=True, slots=True)
class _Around:
    """What a location stands in."""

    options: HostOptions
    parts: HostParts
    directives: list[Directive]
    """Of the host; those that NGINX would drop in a location are repeated there."""


def _location(
    context: RenderingContext, location: pb.Location, around: _Around, everywhere: Sequence[Node]
) -> Node:
    found = _LOCATION.fullmatch(location.path)
    if found is None:
        raise Unrenderable(f"{location.path[:80]!r} is not the path of a location")
    modifier, prefix, regex, pattern = found.groups()
    arguments = [part for part in (modifier or regex, prefix or pattern) if part]
    try:
        options = location_options(location.options)
    except msgspec.MsgspecError as error:
        raise Unrenderable(f"this agent does not know an option of {location.path[:80]}: {error}") from error
    body = list(_location_body(context, location, around, options))
    target = _target(context, location, options, around.parts)
    to = target.url.partition("://")[2] if target is not None and target.upstream is not None else ""
    logged = upkeep.chosen(location.path, to, around.parts)
    return block("location", *arguments, body=[*logged, *everywhere, *body])


def _location_body(
    context: RenderingContext, location: pb.Location, around: _Around, options: LocationOptions
) -> Iterator[Node]:
    where = f"location {location.path[:80]}"
    own = judging.raw(location.custom_directives, {Place.LOCATION}, context.files, where=where)
    names = {one.name for one in (*own, *around.directives, *context.settings)}
    target = _target(context, location, options, around.parts)
    look = content.merged(around.options.content or Content(), options.content or Content())
    admitted = options.access if options.access is not msgspec.UNSET else around.options.access
    yield from _admission(context, admitted or Access(), names, around.parts)
    if admitted and admitted.forward_auth and around.options.pages:
        # Its page for 401 would cancel those of the host.
        yield from content.error_pages(around.options.pages.errors or (), around.parts)
    said, preflight = content.cors(look.cors, around.parts) if look.cors else ([], None)
    yield from (preflight,) if preflight is not None else ()
    for rule in location.rewrite_rules:
        if rule.flag not in _FLAGS:
            raise Unrenderable(f"{where}: {rule.flag[:80]!r} is not a flag of a rewrite")
        yield directive("rewrite", rule.pattern, rule.replacement, *([rule.flag] if rule.flag else []))
    headers: list[Node] = [
        *_headers(location, proxying=bool(target)),
        *said,
        *content.response_headers(look.headers or (), proxying=bool(target)),
    ]
    headers += _inherited(context, headers, own, around.directives, proxying=bool(target))
    if target:
        headers += proxying.sticky_header(target)
        given = {_header_name(node) for node in (*headers, *own)}
        told = _told(around.options, look, admitted or Access())
        yield from _proxying(context, target, names, given, told)
        if options.cache:
            yield from upkeep.cached(options.cache, around.options.cache, around.parts)
    elif location.root:
        yield from guarded(context, [directive("root", literal(location.root, what="root"))])
    yield from _looks(context, look, around.options, names, proxying=bool(target))
    if location.root and look.fallback:
        yield directive("try_files", "$uri", "$uri/", literal(look.fallback, what="fallback"))
    if location.index:
        yield directive("index", *literal(location.index, what="index").split())
    yield from headers
    if options.respond:
        yield from content.respond(options.respond, around.parts)
    yield from guarded(context, own, location=location.path)


def _admission(context: RenderingContext, given: Access, names: set[str], parts: HostParts) -> Iterator[Node]:
    """An administrator's raw directives about the same are never replaced by typed options."""
    if given == Access():
        return
    if raw := sorted(names & access.DECIDING):
        raise Unrenderable(
            f"access: raw text says {raw[0]} already; an administrator has to remove one of them"
        )
    if given.forward_auth and not context.site.binary.features()["auth-request"]:
        raise Unrenderable("access.forward_auth: this NGINX has no auth_request")
    yield from access.nodes(given, parts, context.users_folder)


def _told(options: HostOptions, look: Content, given: Access) -> dict[str, str]:
    """Headers of requests that are passed on; what says who the client is comes last, and wins."""
    told: dict[str, tuple[str, str]] = {}
    for each in (
        _PROXY_HEADERS,
        content.request_headers(look.headers or ()),
        tls.client_headers(options),
        access.forwarded_headers(given),
    ):
        told |= {name.lower(): (name, value) for name, value in each.items()}
    return dict(told.values())


def _looks(
    context: RenderingContext, look: Content, options: HostOptions, names: set[str], *, proxying: bool
) -> Iterator[Node]:
    made = list(content.limits(look, proxying=proxying))
    if look.compression:
        brotli = context.site.binary.features()["brotli"]
        made += content.compressed(look.compression, brotli=brotli)
        if look.compression.brotli and not brotli:
            context.note("brotli_left_out", f"NGINX {context.site.binary.words} has no brotli")
    if proxying and options.pages and options.pages.errors:
        made.append(directive("proxy_intercept_errors", "on"))
    yield from (one for one in made if one.name not in names)


def guarded(context: RenderingContext, nodes: Sequence[Directive], *, location: str = "") -> Iterator[Node]:
    """The directives with roots that neither `..` nor a symbolic link can leave."""
    for node in nodes:
        if node.name not in ("root", "alias"):
            yield node
            continue
        (path,) = node.arguments
        if fault := context.files.fault(path):
            raise Unrenderable(f"{node.name}: {fault}")
        resolved, top = context.files.resolve(path.rstrip("/")), context.files.root_of(path)
        if node.name == "alias":
            resolved += _alias_end(location)
        yield directive(node.name, GUARD + resolved)
        yield directive("disable_symlinks", "on", f"from={top}")


def _alias_end(location: str) -> str:
    """What follows an alias must begin a new segment: `/files../` would lead out of it otherwise."""
    if location.startswith("="):
        return ""
    if location.startswith("~") or not location.endswith("/"):
        raise Unrenderable(f"alias: the path of its location must end with '/', not {location[:80]!r}")
    return "/"


def _inherited(
    context: RenderingContext,
    headers: Sequence[Node],
    own: Sequence[Directive],
    around: Sequence[Directive],
    *,
    proxying: bool,
) -> Iterator[Node]:
    """What administrators said further out: NGINX forgets all of it where a location says one of its own."""
    said = {node.name for node in headers} | ({"proxy_set_header"} if proxying else set())
    given = {_header_name(node) for node in headers}
    for name in ("add_header", "proxy_set_header"):
        if name not in said or any(node.name == name for node in own):
            continue
        outer = [node for node in around if node.name == name] or context.settings
        yield from (node for node in outer if node.name == name and _header_name(node) not in given)


def _header_name(node: Node) -> tuple[str, str]:
    return node.name, node.arguments[0].lower() if node.arguments else ""


def mentioned_upstreams(location: pb.Location) -> list[str]:
    """The upstreams that a location passes requests on to."""
    try:
        split = location_options(location.options).canaries
    except msgspec.MsgspecError:  # told where the location is rendered
        split = msgspec.UNSET
    found = [location.upstream_id] if location.upstream_id else []
    return [*found, *(one.upstream_id for one in (split.to if split else ()))]


def _target(
    context: RenderingContext, location: pb.Location, options: LocationOptions, parts: HostParts
) -> PassTarget | None:
    groups = {upstream.id: upstream for upstream in context.update.upstreams}
    if location.upstream_id:
        if any(one not in groups for one in mentioned_upstreams(location)):
            raise Unrenderable(f"location {location.path[:80]}: its upstream is missing")
        group = groups[location.upstream_id]
        given = proxying.options_of(group)
        protocol = given.protocol or "http"
        to = upstreams.name(group.id)
        if options.canaries:
            if any(
                (proxying.options_of(groups[one.upstream_id]).protocol or "http") != protocol
                for one in options.canaries.to
            ):
                raise Unrenderable("canaries: all upstreams must speak the same protocol")
            names = {identity: upstreams.name(identity) for identity in groups}
            to = proxying.canaries(options.canaries, to, names, parts)
        if given.authority_pem:
            context.made[proxying.authority_file(group.id)] = given.authority_pem.encode()
        return PassTarget(f"{protocol}://{to}", protocol, group, given)
    if not location.proxy_pass:
        return None
    if fault := checks.url_fault(location.proxy_pass, "http", "https"):
        raise Unrenderable(f"proxy_pass {location.proxy_pass[:80]!r} {fault}")
    if options.resolver:
        return proxying.resolved(location.proxy_pass, options.resolver, parts)
    return PassTarget(location.proxy_pass)


def _proxying(
    context: RenderingContext,
    target: PassTarget,
    given: set[str],
    headers: set[tuple[str, str]],
    told: Mapping[str, str],
) -> Iterator[Node]:
    grpc = target.prefix == "grpc"
    yield from target.needed
    made = [
        *(() if grpc else (directive("proxy_http_version", "1.1"),)),
        *proxying.retried(target),
        directive(f"{target.prefix}_pass", target.url),
        *proxying.secured(target, str(context.site.ca_bundle or "")),
    ]
    yield from (one for one in made if one.name not in given)
    for name, value in told.items():
        if grpc and name.lower() in ("upgrade", "connection"):
            continue
        if (f"{target.prefix}_set_header", name.lower()) not in headers:
            yield directive(f"{target.prefix}_set_header", name, value)


def _headers(location: pb.Location, *, proxying: bool) -> Iterator[Node]:
    for header in location.custom_headers:
        if not _HEADER.fullmatch(header.name):
            raise Unrenderable(f"{header.name[:80]!r} is not the name of a header")
        if proxying and not header.always:
            yield directive("proxy_set_header", header.name, header.value)
        else:
            yield directive("add_header", header.name, header.value, *(["always"] if header.always else []))
