"""What may be served: every check that saves agents from a configuration they could not accept.

Pure: a change is judged against the workspace as it would be. What can never be right is a
list of problems (422); what clashes with something else that is there is a `Held` (409) that
names it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import UNSET

from fleetplane.domains.proxies import directives, selectors
from fleetplane.domains.proxies.clashes import Surroundings, host_clashes
from fleetplane.domains.proxies.kinds import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.values import (
    Algorithm,
    HealthCheck,
    Location,
    NamedAgents,
    SelectedAgents,
    TargetAgents,
    UpstreamServer,
)
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.problems import Code, Held, Problem, Rejected

NAME_LIMIT = 100
SERVER_NAMES_LIMIT = 50
LOCATIONS_LIMIT = 100
SERVERS_LIMIT = 200
HEADERS_LIMIT = 64
REWRITES_LIMIT = 64
AGENT_IDS_LIMIT = 1000
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
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_PATH = re.compile(r"(?:(?:=|\^~)\s+)?/\S*|~\*?\s+\S+")
_BLANK_OR_QUOTE = re.compile(r"[\s\"'`;{}\\]")


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


def upstream_problems(spec: UpstreamSpec) -> Iterator[Problem]:
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
                field=f"servers.{index}.backup", message="ip_hash has no backup servers",
                code=Code.INCOMPATIBLE,
            )  # fmt: skip
    yield from _range(spec.keepalive_connections, 0, KEEPALIVE_LIMIT, "keepalive_connections")
    yield from _health_check_problems(spec.health_check)


def _server_problems(server: UpstreamServer, field: str) -> Iterator[Problem]:
    if not _is_address(server.address):
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
    if not check.path.startswith("/") or _BLANK_OR_QUOTE.search(check.path) or len(check.path) > 1024:
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


def host_problems(spec: VirtualHostSpec, around: Surroundings) -> Iterator[Problem]:
    yield from name_problems(spec.name)
    yield from _server_name_problems(spec.server_name)
    yield from _range(spec.listen_port, 1, 65535, "listen_port")
    if spec.ssl_enabled and spec.ssl_certificate_id is None:
        yield Problem(
            field="ssl_certificate_id", message="Required when ssl_enabled is true", code=Code.REQUIRED
        )
    if spec.ssl_certificate_id is not None and spec.ssl_certificate_id not in around.certificates:
        yield Problem(
            field="ssl_certificate_id", message="There is no such certificate in this workspace",
            code=Code.UNKNOWN_REFERENCE,
        )  # fmt: skip
    if len(spec.locations) > LOCATIONS_LIMIT:
        yield Problem(field="locations", message=f"More than {LOCATIONS_LIMIT} locations", code=Code.TOO_MANY)
        return
    seen: set[str] = set()
    for index, location in enumerate(spec.locations):
        field = f"locations.{index}"
        yield from _location_problems(location, field, around)
        normal = " ".join(location.path.split())
        if normal in seen:
            yield Problem(
                field=f"{field}.path", message="Another location has this path", code=Code.NOT_UNIQUE
            )
        seen.add(normal)
    yield from directives.problems(spec.custom_directives, field="custom_directives")
    yield from _target_problems(spec.target_agents, around)


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
    elif len({name.lower() for name in names}) < len(names):
        yield Problem(field="server_name", message="A name is given twice", code=Code.NOT_UNIQUE)


def _location_problems(location: Location, field: str, around: Surroundings) -> Iterator[Problem]:
    fault = directives.text_fault(location.path)
    if fault or not _PATH.fullmatch(location.path):
        yield Problem(field=f"{field}.path", message=fault or "Must start with '/', '= /', '^~ /' or '~ '")
    served = [name for name in ("upstream_id", "proxy_pass", "root") if getattr(location, name) is not UNSET]
    if len(served) != 1:
        yield Problem(
            field=field, message="Exactly one of upstream_id, proxy_pass and root is required",
            code=Code.INCOMPATIBLE if served else Code.REQUIRED,
        )  # fmt: skip
    if location.upstream_id is not UNSET and location.upstream_id not in around.upstreams:
        yield Problem(
            field=f"{field}.upstream_id", message="There is no such upstream in this workspace",
            code=Code.UNKNOWN_REFERENCE,
        )  # fmt: skip
    if location.proxy_pass is not UNSET and not _is_url(location.proxy_pass):
        yield Problem(field=f"{field}.proxy_pass", message="Must be an http or https URL")
    for name in ("root", "index"):
        text = getattr(location, name)
        if text is not UNSET and (directives.text_fault(text) or "$" in text or not text):
            yield Problem(field=f"{field}.{name}", message="Not a path")
    if location.root is not UNSET and not location.root.startswith("/"):
        yield Problem(field=f"{field}.root", message="Must be an absolute path")
    yield from _header_problems(location, field)
    yield from _rewrite_problems(location, field)
    yield from directives.problems(location.custom_directives or {}, field=f"{field}.custom_directives")


def _is_url(text: str) -> bool:
    if directives.text_fault(text) or _BLANK_OR_QUOTE.search(text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _header_problems(location: Location, field: str) -> Iterator[Problem]:
    headers = location.custom_headers or ()
    if len(headers) > HEADERS_LIMIT:
        yield Problem(
            field=f"{field}.custom_headers", message=f"More than {HEADERS_LIMIT} headers", code=Code.TOO_MANY
        )
    for index, header in enumerate(headers):
        where = f"{field}.custom_headers.{index}"
        if not _HEADER.fullmatch(header.name):
            yield Problem(field=f"{where}.name", message="Not the name of a header")
        if fault := directives.text_fault(header.value):
            yield Problem(field=f"{where}.value", message=fault)


def _rewrite_problems(location: Location, field: str) -> Iterator[Problem]:
    rules = location.rewrite_rules or ()
    if len(rules) > REWRITES_LIMIT:
        yield Problem(
            field=f"{field}.rewrite_rules", message=f"More than {REWRITES_LIMIT} rules", code=Code.TOO_MANY
        )
    for index, rule in enumerate(rules):
        for name in ("pattern", "replacement"):
            text = getattr(rule, name)
            if fault := directives.text_fault(text) or ("" if text else "Must not be empty"):
                yield Problem(field=f"{field}.rewrite_rules.{index}.{name}", message=fault)


def _target_problems(target: TargetAgents, around: Surroundings) -> Iterator[Problem]:
    match target:
        case SelectedAgents(label_selector=text):
            try:
                selectors.parse(text)
            except InvalidArgument as error:
                yield Problem(field="target_agents.label_selector", message=error.message)
        case NamedAgents(agent_ids=ids):
            if not 0 < len(ids) <= AGENT_IDS_LIMIT:
                yield Problem(
                    field="target_agents.agent_ids", message=f"Must name 1 to {AGENT_IDS_LIMIT} agents",
                    code=Code.TOO_MANY if ids else Code.REQUIRED,
                )  # fmt: skip
            for index, agent in enumerate(ids):
                if agent not in around.agents:
                    yield Problem(
                        field=f"target_agents.agent_ids.{index}",
                        message="There is no such agent in this workspace",
                        code=Code.UNKNOWN_REFERENCE,
                    )


def accept_host(spec: VirtualHostSpec, around: Surroundings) -> None:
    """Refuse a virtual host that is wrong, then one that clashes."""
    if problems := list(host_problems(spec, around)):
        raise Rejected(*problems)
    if clashes := list(host_clashes(spec, around)):
        raise Held("the virtual host clashes with another", clashes)


def accept_upstream(spec: UpstreamSpec) -> None:
    if problems := list(upstream_problems(spec)):
        raise Rejected(*problems)
