"""What NGINX keeps: answers in a cache, lines in the access log. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fleetplane.domains.proxies.nginx.blocks import Directive, Unrenderable, block, directive
from fleetplane.domains.proxies.nginx.typed.naming import HostParts, tag
from fleetplane.domains.proxies.typed_options import Cache, CacheZone, Logging

KEYS_SIZE: Final = "4m"
"""Room for the keys of about 32,000 answers."""
LOG_FIELDS: Final = {
    "time": "$msec",
    "remote_addr": "$remote_addr",
    "method": "$request_method",
    "uri": "$request_uri",
    "protocol": "$server_protocol",
    "host": "$host",
    "status": "$status",
    "body_bytes_sent": "$body_bytes_sent",
    "bytes_sent": "$bytes_sent",
    "request_length": "$request_length",
    "request_time": "$request_time",
    "upstream_response_time": "$upstream_response_time",
    "user_agent": "$http_user_agent",
    "referer": "$http_referer",
    "request_id": "$request_id",
    "virtual_host_id": "$fleetplane_host",
    "cache_status": "$upstream_cache_status",
    "upstream_statuses": "$upstream_status",
    "location": "$fleetplane_location",
    "upstream_id": "$fleetplane_upstream",
}
"""All of them strings: a number may be `-` or missing."""


PLACES: Final = {
    "host": "$fleetplane_host",
    "location": "$fleetplane_location",
    "upstream": "$fleetplane_upstream",
}
"""Variables that say where a request went."""
LOCATION_LIMIT: Final = 100
"""Characters of a location's path that are logged."""


def place(host: str) -> Iterator[Directive]:
    """For a server: its host, and that no location was chosen yet."""
    for name, variable in PLACES.items():
        yield directive("set", variable, host if name == "host" else "")


def chosen(path: str, to: str, parts: HostParts) -> Iterator[Directive]:
    """For a location, before anything that may end the request; `to` is its group of servers, if any."""
    yield directive("set", PLACES["location"], parts.text(path[:LOCATION_LIMIT]))
    yield directive("set", PLACES["upstream"], to)


def log_format(name: str, fields: Mapping[str, str]) -> Directive:
    pairs = ",".join(f'"{field}":"{value}"' for field, value in fields.items())
    return directive("log_format", name, "escape=json", f"{{{pairs}}}")


def zone_name(parts: HostParts) -> str:
    return f"fp_cache_{tag(parts.host)}"


def zone(cache: CacheZone, parts: HostParts, folder: str) -> None:
    name = zone_name(parts)
    parts.before[name] = [
        directive(
            "proxy_cache_path",
            f"{folder}/{name}",
            "levels=1:2",
            f"keys_zone={name}:{KEYS_SIZE}",
            f"max_size={cache.max_mb}m",
            f"inactive={cache.inactive}s",
            "use_temp_path=off",
        )
    ]


def cached(cache: Cache, host: CacheZone | object, parts: HostParts) -> Iterator[Directive]:
    if not isinstance(host, CacheZone):
        raise Unrenderable("cache: the virtual host has none")
    yield directive("proxy_cache", zone_name(parts))
    yield directive("proxy_cache_key", f"$scheme$host$request_uri#{host.generation}")
    for rule in cache.rules:
        statuses = [str(status) for status in rule.statuses] or ["any"]
        yield directive("proxy_cache_valid", *statuses, f"{rule.seconds}s")
    if cache.bypass:
        variables = [_bypass(one) for one in cache.bypass]
        yield directive("proxy_cache_bypass", *variables)
        yield directive("proxy_no_cache", *variables)
    if cache.min_uses:
        yield directive("proxy_cache_min_uses", str(cache.min_uses))
    if cache.lock:
        yield directive("proxy_cache_lock", "on")
    if cache.stale:
        stale = ("error", "timeout", "updating", "http_500", "http_502", "http_503", "http_504")
        yield directive("proxy_cache_use_stale", *stale)
        yield directive("proxy_cache_background_update", "on")


def _bypass(text: str) -> str:
    kind, _, name = text.partition(":")
    prefixes = {"header": "http", "cookie": "cookie", "arg": "arg"}
    if kind not in prefixes or not name:
        raise Unrenderable(f"cache.bypass: {text[:80]!r} is not what a request can have")
    return f"${prefixes[kind]}_{name.lower().replace('-', '_') if kind == 'header' else name}"


def logged(logging: Logging, parts: HostParts, path: str) -> Iterator[Directive]:
    if not logging.enabled:
        yield directive("access_log", "off")
        return
    left_out = set(logging.leave_out or ())
    fields = {name: value for name, value in LOG_FIELDS.items() if name not in left_out}
    fields |= {name: f"${name}" for name in logging.add or ()}
    name = f"fp_log_{tag(parts.host, *fields)}"
    parts.before[name] = [log_format(name, fields)]
    sampled = []
    if isinstance(percent := logging.sample_percent, int):
        chance, decided = parts.variable("chance"), parts.variable("logged")
        body = (
            [directive(f"{percent}%", "1"), directive("*", "0")] if percent < 100 else [directive("*", "1")]
        )
        parts.before[chance] = [
            block("split_clients", "$request_id", f"${chance}", body=body),
            block(
                "map",
                "$status",
                f"${decided}",
                body=[directive("default", f"${chance}"), directive('"~^[45]"', "1")],
            ),
        ]
        sampled = [f"if=${decided}"]
    yield directive("access_log", path, name, *sampled)
