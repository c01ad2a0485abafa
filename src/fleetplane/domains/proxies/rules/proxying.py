"""Rules of options about passing requests on, and about TLS and listening. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Algorithm, Location
from fleetplane.domains.proxies.rules.access import is_key
from fleetplane.domains.proxies.rules.texts import count_problems, networks_problems, range_problems
from fleetplane.domains.proxies.typed_options import (
    Balancing,
    Canaries,
    HostTls,
    Listening,
    Resolver,
    Retries,
    UpstreamTls,
)
from fleetplane.web.rest.problems import Code, Problem

HSTS_LIMIT_SECONDS = 10 * 31_536_000
PRELOAD_SECONDS = 31_536_000
"""What the lists of browsers ask for."""
DEPTH_LIMIT = 10


def tls_problems(spec: VirtualHostSpec, certificates: Collection[str]) -> Iterator[Problem]:
    """`certificates` are those that there are."""
    tls = spec.tls
    if not tls:
        return
    if not spec.ssl_enabled and tls != HostTls():
        yield Problem(field="tls", message="Needs ssl_enabled to be true", code=Code.INCOMPATIBLE)
    if tls.force_https and spec.listen_port == 80:
        yield Problem(
            field="tls.force_https",
            message="The host itself listens on port 80; give it another port, such as 443",
            code=Code.INCOMPATIBLE,
        )
    if hsts := tls.hsts:
        if not 0 <= hsts.max_age <= HSTS_LIMIT_SECONDS:
            yield Problem(
                field="tls.hsts.max_age",
                message=f"Must be between 0 and {HSTS_LIMIT_SECONDS}",
                code=Code.OUT_OF_RANGE,
            )
        if hsts.preload and not (hsts.include_subdomains and hsts.max_age >= PRELOAD_SECONDS):
            yield Problem(
                field="tls.hsts.preload",
                message=f"Needs include_subdomains and a max_age of {PRELOAD_SECONDS} or more",
                code=Code.INCOMPATIBLE,
            )
    if clients := tls.client_certificates:
        if clients.authority_id not in certificates:
            yield Problem(
                field="tls.client_certificates.authority_id",
                message="There is no such certificate in this workspace",
                code=Code.UNKNOWN_REFERENCE,
            )
        if not 1 <= clients.depth <= DEPTH_LIMIT:
            yield Problem(
                field="tls.client_certificates.depth",
                message=f"Must be between 1 and {DEPTH_LIMIT}",
                code=Code.OUT_OF_RANGE,
            )


def listening_problems(listening: Listening) -> Iterator[Problem]:
    if isinstance(listening.proxy_protocol_from, tuple):
        yield from networks_problems(listening.proxy_protocol_from, "listening.proxy_protocol_from")


def host_needs(spec: VirtualHostSpec) -> Iterator[tuple[str, str]]:
    """Features that the agents of a host must have, each with the field that needs it."""
    if spec.tls:
        yield "tls", "tls"
    if spec.listening and spec.listening.proxy_protocol_from:
        yield "realip", "listening.proxy_protocol_from"


CANARIES_LIMIT = 8
RESOLVERS_LIMIT = 4
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{0,20}}")
_COOKIE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESOLVER = re.compile(
    r"(?P<v4>[0-9.]+)(?P<port>:[0-9]{1,5})?|\[(?P<v6>[0-9A-Fa-f:.]+)\](?P<port6>:[0-9]{1,5})?"
)


def upstream_problems(spec: UpstreamSpec, certificates: Collection[str] | None) -> Iterator[Problem]:
    """`certificates` are those that there are; None where that is not known."""
    if spec.tls:
        yield from _tls_problems(spec, spec.tls, certificates)
    if spec.balancing:
        yield from _balancing_problems(spec, spec.balancing)
    if spec.keepalive:
        yield from range_problems(spec.keepalive.requests, 1, 1_000_000, "keepalive.requests")
        yield from range_problems(spec.keepalive.timeout, 1, 86_400, "keepalive.timeout")
        if not spec.keepalive_connections:
            message = "Needs keepalive_connections to be more than 0"
            yield Problem(field="keepalive", message=message, code=Code.INCOMPATIBLE)
    if spec.retries:
        yield from _retries_problems(spec.retries)
    for index, server in enumerate(spec.servers):
        yield from range_problems(server.max_connections, 1, 1_000_000, f"servers.{index}.max_connections")
        yield from range_problems(server.slow_start, 1, 86_400, f"servers.{index}.slow_start")
    working = [server for server in spec.servers if not (server.draining or server.down or server.backup)]
    if any(server.draining for server in spec.servers) and not working:
        yield Problem(field="servers", message="All servers are drained or down", code=Code.INCOMPATIBLE)


def _tls_problems(
    spec: UpstreamSpec, tls: UpstreamTls, certificates: Collection[str] | None
) -> Iterator[Problem]:
    if not (isinstance(spec.protocol, str) and spec.protocol.endswith("s")):
        message = "Needs the protocol https or grpcs"
        yield Problem(field="tls", message=message, code=Code.INCOMPATIBLE)
    if isinstance(tls.name, str) and (len(tls.name) > 253 or not _NAME.fullmatch(tls.name)):
        yield Problem(field="tls.name", message="Must be the name of a host")
    for name in ("authority_id", "client_certificate_id"):
        identity = getattr(tls, name)
        if isinstance(identity, str) and certificates is not None and identity not in certificates:
            yield Problem(
                field=f"tls.{name}",
                message="There is no such certificate in this workspace",
                code=Code.UNKNOWN_REFERENCE,
            )


def _balancing_problems(spec: UpstreamSpec, given: Balancing) -> Iterator[Problem]:
    if spec.algorithm not in (Algorithm.ROUND_ROBIN, Algorithm.WEIGHTED_ROUND_ROBIN):
        message = "Needs the algorithm round_robin, which it takes the place of"
        yield Problem(field="balancing", message=message, code=Code.INCOMPATIBLE)
    if given.method == "hash" and not is_key(given.key):
        message = "Must be address, host, uri, header:NAME or cookie:NAME"
        yield Problem(field="balancing.key", message=message)
    if not _COOKIE.fullmatch(given.cookie):
        yield Problem(field="balancing.cookie", message="Must be letters, digits and '_'")
    for index, server in enumerate(spec.servers):
        if server.backup:
            message = f"{given.method} has no backup servers"
            yield Problem(field=f"servers.{index}.backup", message=message, code=Code.INCOMPATIBLE)


def _retries_problems(retries: Retries) -> Iterator[Problem]:
    if len(set(retries.on)) < len(retries.on):
        yield Problem(field="retries.on", message="A reason is given twice", code=Code.NOT_UNIQUE)
    yield from range_problems(retries.tries, 1, 100, "retries.tries")
    yield from range_problems(retries.timeout, 1, 86_400, "retries.timeout")


def location_problems(location: Location, field: str, upstreams: Collection[str]) -> Iterator[Problem]:
    if location.canaries:
        yield from _canary_problems(location, location.canaries, f"{field}.canaries", upstreams)
    if location.resolver:
        yield from _resolver_problems(location, location.resolver, f"{field}.resolver")


def _canary_problems(
    location: Location, split: Canaries, field: str, upstreams: Collection[str]
) -> Iterator[Problem]:
    if not isinstance(location.upstream_id, str):
        message = "Only of a location with upstream_id, which gets the rest"
        yield Problem(field=field, message=message, code=Code.INCOMPATIBLE)
    if not split.to:
        yield Problem(field=f"{field}.to", message="At least one is required", code=Code.REQUIRED)
    yield from count_problems(split.to, CANARIES_LIMIT, f"{field}.to")
    for index, one in enumerate(split.to[:CANARIES_LIMIT]):
        yield from range_problems(one.percent, 1, 99, f"{field}.to.{index}.percent")
        if one.upstream_id not in upstreams:
            yield Problem(
                field=f"{field}.to.{index}.upstream_id",
                message="There is no such upstream in this workspace",
                code=Code.UNKNOWN_REFERENCE,
            )
    if sum(one.percent for one in split.to[:CANARIES_LIMIT]) >= 100:
        message = "Together they must be less than 100: the location's own upstream gets the rest"
        yield Problem(field=f"{field}.to", message=message, code=Code.OUT_OF_RANGE)
    if split.key != "request" and not is_key(split.key):
        message = "Must be request, address, host, uri, header:NAME or cookie:NAME"
        yield Problem(field=f"{field}.key", message=message)


def _resolver_problems(location: Location, resolver: Resolver, field: str) -> Iterator[Problem]:
    try:
        url = urlsplit(location.proxy_pass) if isinstance(location.proxy_pass, str) else None
    except ValueError:  # which is a problem of proxy_pass already
        return
    if url is None or url.path or url.query:
        message = "Only of a location with a proxy_pass that has no path"
        yield Problem(field=field, message=message, code=Code.INCOMPATIBLE)
    if not resolver.addresses:
        yield Problem(field=f"{field}.addresses", message="At least one is required", code=Code.REQUIRED)
    yield from count_problems(resolver.addresses, RESOLVERS_LIMIT, f"{field}.addresses")
    for index, one in enumerate(resolver.addresses[:RESOLVERS_LIMIT]):
        if not _is_resolver(one):
            message = "Must be an address such as 10.0.0.53 or [fd00::53]:5353"
            yield Problem(field=f"{field}.addresses.{index}", message=message)
    yield from range_problems(resolver.valid, 1, 86_400, f"{field}.valid")


def _is_resolver(text: str) -> bool:
    found = _RESOLVER.fullmatch(text)
    if found is None:
        return False
    port = found["port"] or found["port6"]
    try:
        ipaddress.ip_address(found["v4"] or found["v6"])
    except ValueError:
        return False
    return not port or 1 <= int(port[1:]) <= 65535
