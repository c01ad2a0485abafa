"""What NGINX keeps: answers in a cache, lines in the access log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx.typed.upkeep import LOG_FIELDS
from fleetplane.domains.proxies.rules.typed.texts import VARIABLES, count_problems, range_problems
from fleetplane.domains.proxies.typed_options import Cache, Logging
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
