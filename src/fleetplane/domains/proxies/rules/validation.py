"""What may be served: every check that saves agents from a configuration they could not accept.

Pure: a change is judged against the workspace as it would be. What can never be right is a
list of problems (422); what clashes with something else that is there is a `ConflictBlocker` (409) that
names it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator

from msgspec import UNSET

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import (
    Algorithm,
    HealthCheck,
    UpstreamServer,
)
from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules import directives, proxying
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings, host_clashes, served_names
from fleetplane.domains.proxies.rules.content import cache_room_problems, kept_problems, pages_problems
from fleetplane.domains.proxies.rules.features import feature_problems, upstream_feature_problems
from fleetplane.domains.proxies.rules.locations import BLANK_OR_QUOTE, location_problems, place
from fleetplane.domains.proxies.rules.proxying import listening_problems, tls_problems
from fleetplane.domains.proxies.rules.shared import option_problems, raw_beside_access
from fleetplane.domains.proxies.rules.streams import host_and_stream_clashes, upstream_of_streams_problems
from fleetplane.domains.proxies.rules.texts import target_problems
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem, Rejected

NAME_LIMIT = 100
SERVER_NAMES_LIMIT = 50
LOCATIONS_LIMIT = 100
SERVERS_LIMIT = 200
KEEPALIVE_LIMIT = 10_000
WEIGHT_LIMIT = 65_535
SECONDS_LIMIT = 86_400
HOSTS_PER_WORKSPACE = 500
UPSTREAMS_PER_WORKSPACE = 500

SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_SERVER_NAME = re.compile(rf"_|(?:\*\.|\.)?{_LABEL}(?:\.{_LABEL})*")
_UPSTREAM_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


# Small texts.


def name_problems(name: str, *, field: str = "name", limit: int = NAME_LIMIT) -> Iterator[Problem]:
    if not name.strip():
        yield Problem(field=field, message="Must not be empty", code=Code.REQUIRED)
    elif len(name) > limit:
        yield Problem(field=field, message=f"Longer than {limit} characters", code=Code.TOO_LONG)
    elif fault := directives.text_fault(name):
        yield Problem(field=field, message=fault)


def slug_problems(slug: str, *, field: str = "slug") -> Iterator[Problem]:
    if not SLUG.fullmatch(slug):
        yield Problem(field=field, message="Must be 1 to 63 of a-z, 0-9 and '-', with no '-' at either end")


def domain_problems(domain: str, *, field: str = "domain") -> Iterator[Problem]:
    plain = domain.removeprefix("*.")
    if len(domain) > 253 or "." not in plain or not _HOST.fullmatch(plain) or "_" in plain:
        yield Problem(field=field, message="Invalid domain format")


def _range(value: int, low: int, high: int, field: str) -> Iterator[Problem]:
    if not low <= value <= high:
        yield Problem(field=field, message=f"Must be between {low} and {high}", code=Code.OUT_OF_RANGE)


# Upstreams.


def upstream_problems(spec: UpstreamSpec, certificates: Collection[str] | None = None) -> Iterator[Problem]:
    """`certificates` are those that there are; None where that is not known."""
    if not _UPSTREAM_NAME.fullmatch(spec.name):
        yield Problem(field="name", message="Must be 1 to 63 of a-z, 0-9 and '-', with no '-' at either end")
    if not spec.servers:
        yield Problem(field="servers", message="At least one server is required", code=Code.REQUIRED)
    elif all(server.backup for server in spec.servers):
        yield Problem(field="servers", message="All servers are backups", code=Code.INCOMPATIBLE)
    if len(spec.servers) > SERVERS_LIMIT:
        yield Problem(field="servers", message=f"More than {SERVERS_LIMIT} servers", code=Code.TOO_MANY)
        return
    for index, server in enumerate(spec.servers):
        yield from _server_problems(server, f"servers.{index}")
        if server.backup and spec.algorithm is Algorithm.IP_HASH:
            yield Problem(
                field=f"servers.{index}.backup",
                message="ip_hash has no backup servers",
                code=Code.INCOMPATIBLE,
            )
    yield from _range(spec.keepalive_connections, 0, KEEPALIVE_LIMIT, "keepalive_connections")
    yield from _health_check_problems(spec.health_check)
    yield from proxying.upstream_problems(spec, certificates)


def _server_problems(server: UpstreamServer, field: str) -> Iterator[Problem]:
    if fault := checks.authority_fault(server.address, port=True):
        yield Problem(field=f"{field}.address", message=directives.capital(fault))
    elif not _is_address(server.address):
        yield Problem(field=f"{field}.address", message="Must be host:port or [v6]:port")
    yield from _range(server.weight, 1, WEIGHT_LIMIT, f"{field}.weight")
    yield from _range(server.max_fails, 0, WEIGHT_LIMIT, f"{field}.max_fails")
    yield from _range(server.fail_timeout, 0, SECONDS_LIMIT, f"{field}.fail_timeout")


def _is_address(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535:
        return False
    if host.startswith("["):
        try:
            return host.endswith("]") and bool(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return False
    return len(host) <= 253 and _HOST.fullmatch(host) is not None


def _health_check_problems(check: HealthCheck) -> Iterator[Problem]:
    field = "health_check"
    if not check.path.startswith("/") or BLANK_OR_QUOTE.search(check.path) or len(check.path) > 1024:
        yield Problem(field=f"{field}.path", message="Must be a path that starts with '/'")
    yield from _range(check.interval, 1, SECONDS_LIMIT, f"{field}.interval")
    yield from _range(check.timeout, 1, SECONDS_LIMIT, f"{field}.timeout")
    if check.timeout >= check.interval:
        yield Problem(
            field=f"{field}.timeout", message="Must be less than the interval", code=Code.INCOMPATIBLE
        )
    for name in ("healthy_threshold", "unhealthy_threshold"):
        if (threshold := getattr(check, name)) is not UNSET:
            yield from _range(threshold, 1, 100, f"{field}.{name}")


# Virtual hosts.


def host_problems(spec: VirtualHostSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    yield from name_problems(spec.name)
    yield from _server_name_problems(spec.server_name)
    yield from _range(spec.listen_port, 1, 65535, "listen_port")
    if spec.ssl_enabled and spec.ssl_certificate_id is None:
        yield Problem(
            field="ssl_certificate_id", message="Required when ssl_enabled is true", code=Code.REQUIRED
        )
    if spec.ssl_certificate_id is not None and spec.ssl_certificate_id not in around.certificates:
        yield Problem(
            field="ssl_certificate_id",
            message="There is no such certificate in this workspace",
            code=Code.UNKNOWN_REFERENCE,
        )
    yield from tls_problems(spec, around.certificates)
    if spec.listening:
        yield from listening_problems(spec.listening)
    yield from option_problems(spec, "", around)
    if spec.pages:
        yield from pages_problems(spec.pages)
    yield from raw_beside_access(spec)
    yield from kept_problems(spec)
    if len(spec.locations) > LOCATIONS_LIMIT:
        yield Problem(field="locations", message=f"More than {LOCATIONS_LIMIT} locations", code=Code.TOO_MANY)
        return
    seen: set[tuple[str, str]] = set()
    for index, location in enumerate(spec.locations):
        field = f"locations.{index}"
        yield from location_problems(location, field, around.upstreams)
        yield from option_problems(location, field, around)
        normal = place(location.path)
        if normal in seen:
            yield Problem(
                field=f"{field}.path", message="Another location has this path", code=Code.NOT_UNIQUE
            )
        seen.add(normal)
    yield from directives.problems(
        spec.custom_directives, field="custom_directives", contexts={DirectiveContext.SERVER}
    )
    if targeted := list(target_problems(spec.target_agents, around)):
        yield from targeted
    else:
        yield from feature_problems(spec, around)


def _server_name_problems(text: str) -> Iterator[Problem]:
    names = text.split()
    if not names:
        yield Problem(field="server_name", message="At least one name is required", code=Code.REQUIRED)
    elif len(names) > SERVER_NAMES_LIMIT:
        yield Problem(
            field="server_name", message=f"More than {SERVER_NAMES_LIMIT} names", code=Code.TOO_MANY
        )
    elif any(len(name) > 253 or not _SERVER_NAME.fullmatch(name) for name in names):
        yield Problem(field="server_name", message="Invalid domain format")
    elif len(served_names(text)) < sum(len(served_names(name)) for name in names):
        yield Problem(field="server_name", message="A name is given twice", code=Code.NOT_UNIQUE)


def accept_host(spec: VirtualHostSpec, around: WorkspaceSurroundings) -> None:
    """Refuse a virtual host that is wrong, then one that clashes."""
    problems = list(host_problems(spec, around))
    if spec.cache:
        problems += cache_room_problems((spec, *around.virtual_hosts.values()), "cache.max_mb")
    if problems:
        raise Rejected(*problems)
    if clashes := [*host_clashes(spec, around), *host_and_stream_clashes(spec, around)]:
        raise ConflictBlocker("the virtual host clashes with another", clashes)


def accept_upstream(spec: UpstreamSpec, around: WorkspaceSurroundings, *, identity: str = "") -> None:
    """Refuse an upstream that is wrong, or that agents cannot serve, or the streams that have it."""
    problems = [
        *upstream_problems(spec, around.certificates),
        *upstream_feature_problems(spec, around),
        *upstream_of_streams_problems(identity, spec, around.streams),
    ]
    if problems:
        raise Rejected(*problems)
