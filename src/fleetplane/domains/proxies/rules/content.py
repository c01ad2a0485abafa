"""Rules of options about answers: headers, compression, pages, caches and access logs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx.typed.upkeep import LOG_FIELDS
from fleetplane.domains.proxies.rules import directives
from fleetplane.domains.proxies.rules.texts import (
    VARIABLES,
    body_problems,
    count_problems,
    header_name_fault,
    networks_problems,
    range_problems,
    target_fault,
    template_fault,
)
from fleetplane.domains.proxies.typed_options import (
    Cache,
    Content,
    Cors,
    HeaderRule,
    Logging,
    Maintenance,
    Pages,
    Redirect,
    Respond,
)
from fleetplane.web.rest.problems import Code, Problem

RULES_LIMIT = 16
BYPASS_LIMIT = 16
CACHE_LIMIT_MB = 100_000
"""Of each node's disk: of one host, and of all hosts of a workspace together."""
_BYPASS = re.compile(r"header:[A-Za-z][A-Za-z0-9-]{0,63}|(?:cookie|arg):[A-Za-z][A-Za-z0-9_]{0,63}")
_KEPT = frozenset({"time", "status", "virtual_host_id"})
"""Fields that figures are made of."""


def cache_room_problems(hosts: Iterable[VirtualHostSpec], field: str) -> Iterator[Problem]:
    """Whether the caches of all hosts of a workspace fit."""
    total = sum(one.cache.max_mb for one in hosts if one.cache)
    if total > CACHE_LIMIT_MB:
        message = f"The caches of a workspace have {CACHE_LIMIT_MB} MB together; these are {total}"
        yield Problem(field=field, message=message, code=Code.TOO_MANY)


def kept_problems(spec: VirtualHostSpec) -> Iterator[Problem]:
    if spec.cache:
        yield from range_problems(spec.cache.max_mb, 1, CACHE_LIMIT_MB, "cache.max_mb")
        yield from range_problems(spec.cache.inactive, 1, 31_536_000, "cache.inactive")
        yield from range_problems(spec.cache.generation, 0, 1 << 31, "cache.generation")
    for index, location in enumerate(spec.locations):
        if location.cache:
            yield from _cache_problems(spec, location, location.cache, f"locations.{index}.cache")
    if spec.logging:
        yield from _logging_problems(spec.logging)


def _cache_problems(spec: VirtualHostSpec, location: Location, cache: Cache, field: str) -> Iterator[Problem]:
    if not spec.cache:
        yield Problem(field=field, message="Needs cache of the virtual host", code=Code.INCOMPATIBLE)
    if not (location.upstream_id or location.proxy_pass):
        yield Problem(field=field, message="Only of a location that proxies", code=Code.INCOMPATIBLE)
    if not cache.rules:
        yield Problem(field=f"{field}.rules", message="At least one is required", code=Code.REQUIRED)
    yield from count_problems(cache.rules, RULES_LIMIT, f"{field}.rules")
    for index, rule in enumerate(cache.rules[:RULES_LIMIT]):
        yield from range_problems(rule.seconds, 0, 31_536_000, f"{field}.rules.{index}.seconds")
        yield from count_problems(rule.statuses, 50, f"{field}.rules.{index}.statuses")
        for status in rule.statuses[:50]:
            yield from range_problems(status, 200, 599, f"{field}.rules.{index}.statuses")
    bypass = cache.bypass or ()
    yield from count_problems(bypass, BYPASS_LIMIT, f"{field}.bypass")
    for index, one in enumerate(bypass[:BYPASS_LIMIT]):
        if not _BYPASS.fullmatch(one):
            message = "Must be header:NAME, cookie:NAME or arg:NAME"
            yield Problem(field=f"{field}.bypass.{index}", message=message)
    yield from range_problems(cache.min_uses, 1, 1000, f"{field}.min_uses")


def _logging_problems(logging: Logging) -> Iterator[Problem]:
    for index, name in enumerate((logging.leave_out or ())[:100]):
        if name not in LOG_FIELDS or name in _KEPT:
            known = ", ".join(sorted(LOG_FIELDS.keys() - _KEPT))
            yield Problem(field=f"logging.leave_out.{index}", message=f"Must be one of {known}")
    yield from count_problems(logging.leave_out or (), 100, "logging.leave_out")
    for index, name in enumerate((logging.add or ())[:100]):
        if name not in VARIABLES or name in LOG_FIELDS:
            known = ", ".join(sorted(VARIABLES - LOG_FIELDS.keys()))
            yield Problem(field=f"logging.add.{index}", message=f"Must be one of {known}")
    yield from count_problems(logging.add or (), 100, "logging.add")
    yield from range_problems(logging.sample_percent, 1, 100, "logging.sample_percent")


HEADERS_LIMIT = 64
REDIRECTS_LIMIT = 200
PAGES_LIMIT = 20
ORIGINS_LIMIT = 50
TYPES_LIMIT = 50
SECONDS_LIMIT = 86_400
BODY_LIMIT = 1 << 40
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(?::[0-9]{1,5})?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TYPE = re.compile(r"[a-z]{1,32}/[a-z0-9][a-z0-9.+-]{0,100}")
_PATH = re.compile(r"/[^\s\"'`;{}\\$?#]*")
_FRAMING = frozenset(
    {"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "keep-alive"}
)
"""Headers by which messages are told apart: never a caller's to set."""
_TRUSTED = frozenset({"x-client-verify", "x-client-subject", "x-fleetplane-workspace"})
"""Headers by which the agent says who a client is."""


def content_problems(content: Content, field: str) -> Iterator[Problem]:
    headers = content.headers or ()
    yield from count_problems(headers, HEADERS_LIMIT, f"{field}.headers")
    for index, rule in enumerate(headers[:HEADERS_LIMIT]):
        yield from _header_problems(rule, f"{field}.headers.{index}")
    if content.cors:
        yield from _cors_problems(content.cors, f"{field}.cors")
    yield from range_problems(content.max_body_bytes, 0, BODY_LIMIT, f"{field}.max_body_bytes")
    if content.timeouts:
        for name in content.timeouts.__struct_fields__:
            seconds = getattr(content.timeouts, name)
            low = 0 if name == "keepalive" else 1
            yield from range_problems(seconds, low, SECONDS_LIMIT, f"{field}.timeouts.{name}")
    if compression := content.compression:
        yield from range_problems(compression.level, 1, 9, f"{field}.compression.level")
        yield from range_problems(compression.min_length, 1, 1 << 30, f"{field}.compression.min_length")
        types = compression.types or ()
        yield from count_problems(types, TYPES_LIMIT, f"{field}.compression.types")
        for index, one in enumerate(types[:TYPES_LIMIT]):
            if not _TYPE.fullmatch(one) or one == "text/html":
                message = "Must be a media type such as text/css; text/html is compressed always"
                yield Problem(field=f"{field}.compression.types.{index}", message=message)


def location_problems(location: Location, field: str) -> Iterator[Problem]:
    """What a location says that its host could not."""
    content = location.content
    if content and isinstance(content.fallback, str):
        where = f"{field}.content.fallback"
        if not _is_root(location):
            yield Problem(field=where, message="Only of a location with a root", code=Code.INCOMPATIBLE)
        if not _PATH.fullmatch(content.fallback) or checks.climbs(content.fallback):
            yield Problem(field=where, message="Must be a path that starts with '/', without '..'")
        elif fault := directives.written_fault("try_files", content.fallback):
            yield Problem(field=where, message=fault)
    if location.respond:
        yield from _respond_problems(location.respond, f"{field}.respond")


def _is_root(location: Location) -> bool:
    return isinstance(location.root, str)


def _respond_problems(answer: Respond, field: str) -> Iterator[Problem]:
    if isinstance(answer.to, str):
        if answer.status not in REDIRECT_STATUSES:
            message = f"Must be one of {', '.join(map(str, REDIRECT_STATUSES))} with `to`"
            yield Problem(field=f"{field}.status", message=message, code=Code.INCOMPATIBLE)
        if fault := target_fault(answer.to):
            yield Problem(field=f"{field}.to", message=fault)
    elif answer.status in REDIRECT_STATUSES:
        yield Problem(field=f"{field}.to", message="Required for a redirect", code=Code.REQUIRED)
    else:
        yield from range_problems(answer.status, 200, 599, f"{field}.status")
    if isinstance(answer.body, str):
        yield from body_problems(answer.body, f"{field}.body")


def _header_problems(rule: HeaderRule, field: str) -> Iterator[Problem]:
    if fault := header_name_fault(rule.name):
        yield Problem(field=f"{field}.name", message=fault)
    elif rule.name.lower() in _FRAMING | (_TRUSTED if rule.direction == "request" else frozenset()):
        yield Problem(field=f"{field}.name", message="This header cannot be changed", code=Code.INCOMPATIBLE)
    if rule.direction == "request" and rule.action == "add":
        message = "A request's header is set or removed"
        yield Problem(field=f"{field}.action", message=message, code=Code.INCOMPATIBLE)
    if rule.action == "remove":
        if isinstance(rule.value, str):
            yield Problem(field=f"{field}.value", message="Not with remove", code=Code.INCOMPATIBLE)
    elif not isinstance(rule.value, str):
        yield Problem(field=f"{field}.value", message="Required", code=Code.REQUIRED)
    elif fault := template_fault(rule.value):
        yield Problem(field=f"{field}.value", message=fault)


def _cors_problems(cors: Cors, field: str) -> Iterator[Problem]:
    if not cors.origins:
        yield Problem(field=f"{field}.origins", message="At least one is required", code=Code.REQUIRED)
    yield from count_problems(cors.origins, ORIGINS_LIMIT, f"{field}.origins")
    for index, origin in enumerate(cors.origins[:ORIGINS_LIMIT]):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            message = "Must be an origin such as https://app.example.com, or *"
            yield Problem(field=f"{field}.origins.{index}", message=message)
    if cors.credentials and "*" in cors.origins:
        message = "Browsers send no credentials to *: list the origins"
        yield Problem(field=f"{field}.credentials", message=message, code=Code.INCOMPATIBLE)
    for index, method in enumerate(cors.methods):
        if method not in _METHODS:
            yield Problem(
                field=f"{field}.methods.{index}", message=f"Must be one of {', '.join(sorted(_METHODS))}"
            )
    for name in ("headers", "expose"):
        names = getattr(cors, name) or ()
        yield from count_problems(names, HEADERS_LIMIT, f"{field}.{name}")
        for index, one in enumerate(names[:HEADERS_LIMIT]):
            if fault := header_name_fault(one):
                yield Problem(field=f"{field}.{name}.{index}", message=fault)
    yield from range_problems(cors.max_age, 0, SECONDS_LIMIT, f"{field}.max_age")


def pages_problems(pages: Pages, field: str = "pages") -> Iterator[Problem]:
    redirects = pages.redirects or ()
    yield from count_problems(redirects, REDIRECTS_LIMIT, f"{field}.redirects")
    for index, redirect in enumerate(redirects[:REDIRECTS_LIMIT]):
        yield from _redirect_problems(redirect, f"{field}.redirects.{index}")
    errors = pages.errors or ()
    yield from count_problems(errors, PAGES_LIMIT, f"{field}.errors")
    seen: set[int] = set()
    for index, page in enumerate(errors[:PAGES_LIMIT]):
        where = f"{field}.errors.{index}"
        yield from count_problems(page.statuses, 50, f"{where}.statuses")
        if not page.statuses:
            yield Problem(field=f"{where}.statuses", message="At least one is required", code=Code.REQUIRED)
        for status in page.statuses[:50]:
            yield from range_problems(status, 400, 599, f"{where}.statuses")
            if status in seen or status == 499:
                yield Problem(
                    field=f"{where}.statuses", message=f"{status} cannot have a page, or has one already"
                )
            seen.add(status)
        yield from body_problems(page.body, f"{where}.body")
    if pages.maintenance:
        yield from _maintenance_problems(pages.maintenance, f"{field}.maintenance")


def _redirect_problems(redirect: Redirect, field: str) -> Iterator[Problem]:
    from fleetplane.domains.proxies.rules.locations import regex_fault

    regex = redirect.match == "regex"
    if regex:
        fault = directives.text_fault(redirect.path) or regex_fault(redirect.path)
        if fault or not redirect.path or len(redirect.path) > 1000:
            yield Problem(field=f"{field}.path", message=fault or "Must be 1 to 1000 characters")
    elif not redirect.path.isascii() or not _PATH.fullmatch(redirect.path) or len(redirect.path) > 1000:
        yield Problem(field=f"{field}.path", message="Must be a path that starts with '/', as it is sent")
    if redirect.status not in REDIRECT_STATUSES:
        message = f"Must be one of {', '.join(map(str, REDIRECT_STATUSES))}"
        yield Problem(field=f"{field}.status", message=message)
    if fault := target_fault(redirect.to, captures=regex):
        yield Problem(field=f"{field}.to", message=fault)


def _maintenance_problems(state: Maintenance, field: str) -> Iterator[Problem]:
    if state.allowed:
        yield from networks_problems(state.allowed, f"{field}.allowed")
    if isinstance(state.body, str):
        yield from body_problems(state.body, f"{field}.body")
    yield from range_problems(state.retry_after, 0, SECONDS_LIMIT, f"{field}.retry_after")
