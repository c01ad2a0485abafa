"""Options about what answers look like, as NGINX spells them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fleetplane.domains.proxies.nginx.blocks import Directive, Node, block, directive
from fleetplane.domains.proxies.nginx.typed.naming import INTERNAL, HostParts, tag
from fleetplane.domains.proxies.typed_options import (
    Compression,
    Content,
    Cors,
    ErrorPage,
    HeaderRule,
    Maintenance,
    Redirect,
    Respond,
    Timeouts,
)

CHALLENGE: Final = r"/\.well-known/acme-challenge/"
MAINTENANCE_STATUS: Final = 503
MAINTENANCE_BODY: Final = "<!doctype html><title>Maintenance</title><h1>Under maintenance</h1>"
COMPRESSED: Final = (
    "text/plain",
    "text/css",
    "text/xml",
    "text/javascript",
    "application/javascript",
    "application/json",
    "application/xml",
    "image/svg+xml",
)
"""Besides `text/html`, which NGINX compresses always."""


def merged(host: Content, own: Content) -> Content:
    """What holds in a location: its own, else its host's; headers of both."""
    given = {
        name: value
        for name in own.__struct_fields__
        if (value := getattr(own, name)) is not msgspec.UNSET and name != "headers"
    }
    headers = (*(host.headers or ()), *(own.headers or ()))
    return msgspec.structs.replace(host, **given, headers=headers or msgspec.UNSET)


# Of a location.


def limits(content: Content, *, proxying: bool) -> Iterator[Directive]:
    if content.max_body_bytes is not msgspec.UNSET:
        yield directive("client_max_body_size", str(content.max_body_bytes))
    if content.timeouts:
        yield from _timeouts(content.timeouts, proxying=proxying)
    if proxying and content.buffering is not msgspec.UNSET:
        yield directive("proxy_buffering", "on" if content.buffering else "off")
    if proxying and content.request_buffering is not msgspec.UNSET:
        yield directive("proxy_request_buffering", "on" if content.request_buffering else "off")


def _timeouts(timeouts: Timeouts, *, proxying: bool) -> Iterator[Directive]:
    names = {
        "client_body": "client_body_timeout",
        "client_send": "send_timeout",
        "keepalive": "keepalive_timeout",
    }
    if proxying:
        names |= {
            "connect": "proxy_connect_timeout",
            "read": "proxy_read_timeout",
            "send": "proxy_send_timeout",
        }
    for field, name in names.items():
        if (seconds := getattr(timeouts, field)) is not msgspec.UNSET:
            yield directive(name, f"{seconds}s")


def compressed(compression: Compression, *, brotli: bool) -> Iterator[Directive]:
    """`brotli` is whether this NGINX has it."""
    types = compression.types or COMPRESSED
    for name, on in (("gzip", compression.gzip), ("brotli", compression.brotli and brotli)):
        yield from (directive(name, "off"),) if name == "gzip" and not on else ()
        if not on:
            continue
        yield directive(name, "on")
        yield directive(f"{name}_types", *types)
        if compression.level is not msgspec.UNSET:
            yield directive(f"{name}_comp_level", str(compression.level))
        if compression.min_length is not msgspec.UNSET:
            yield directive(f"{name}_min_length", str(compression.min_length))
        if name == "gzip":
            yield directive("gzip_vary", "on")
            yield directive("gzip_proxied", "any")


def request_headers(rules: Sequence[HeaderRule]) -> dict[str, str]:
    """What is set on requests that are passed on; empty for what is left out of them."""
    return {
        rule.name: "" if rule.action == "remove" else rule.value or ""
        for rule in rules
        if rule.direction == "request"
    }


def response_headers(rules: Sequence[HeaderRule], *, proxying: bool) -> Iterator[Directive]:
    for rule in rules:
        if rule.direction == "request":
            continue
        if proxying and rule.action in ("set", "remove"):
            yield directive("proxy_hide_header", rule.name)
        if rule.action in ("set", "add"):
            yield directive("add_header", rule.name, rule.value or "", "always")


def cors(cors: Cors, parts: HostParts) -> tuple[list[Directive], Node]:
    """What every answer says, and the answer to a browser that asks first."""
    everybody = "*" in cors.origins
    if everybody:
        origin = "*"
    else:
        name = parts.variable("cors", *cors.origins)
        body = [directive("default", ""), *(directive(f'"{one}"', "$http_origin") for one in cors.origins)]
        parts.before.setdefault(name, [block("map", "$http_origin", f"${name}", body=body)])
        origin = f"${name}"
    said = {"Access-Control-Allow-Origin": origin}
    said |= {} if everybody else {"Vary": "Origin"}
    said |= {"Access-Control-Allow-Credentials": "true"} if cors.credentials else {}
    said |= {"Access-Control-Expose-Headers": ", ".join(cors.expose)} if cors.expose else {}
    asked = {
        **said,
        "Access-Control-Allow-Methods": ", ".join(cors.methods),
        "Access-Control-Allow-Headers": ", ".join(cors.headers),
        "Access-Control-Max-Age": str(cors.max_age),
    }
    preflight = block(
        "if",
        "($request_method",
        "=",
        "OPTIONS)",
        body=[*_added(asked), directive("return", "204")],
    )
    return _added(said), preflight


def _added(headers: dict[str, str]) -> list[Directive]:
    return [directive("add_header", name, value, "always") for name, value in headers.items()]


def respond(answer: Respond, parts: HostParts) -> Iterator[Node]:
    if answer.to:
        yield directive("return", str(answer.status), answer.to)
        return
    yield directive("default_type", answer.content_type)
    body = [parts.text(answer.body)] if answer.body else []
    yield directive("return", str(answer.status), *body)


# Of a host.


def redirects(given: Sequence[Redirect]) -> Iterator[Node]:
    """Matched on the request as it came: what is decoded could hold the end of a header's line."""
    for one in given:
        if one.match == "regex":
            pattern, target = one.path, one.to
        else:
            rest = r"((?:/[^?]*)?)" if one.match == "prefix" else ""
            pattern = rf"^{re.escape(one.path.rstrip('/') if rest else one.path)}{rest}(?:\?.*)?$"
            target = f"{one.to.rstrip('/') if rest else one.to}{'$1' if rest else ''}$is_args$args"
        body = [directive("return", str(one.status), target)]
        yield block("if", "($request_uri", "~", f"{pattern})", body=body)


def error_pages(pages: Sequence[ErrorPage], parts: HostParts) -> Iterator[Directive]:
    for page in pages:
        for status in page.statuses:
            name = f"@fleetplane_error_{status}_{tag(parts.host, page.body)}"
            body = [
                directive("default_type", page.content_type),
                directive("return", str(status), parts.text(page.body)),
            ]
            parts.locations[name] = block("location", name, body=body)
            yield directive("error_page", str(status), name)


def maintenance(state: Maintenance, parts: HostParts) -> Iterator[Node]:
    """Challenges are answered all the same: certificates must not run out meanwhile."""
    if not state.enabled:
        return
    closed, shown = parts.variable("closed"), parts.variable("maintenance")
    networks = [directive(network, "0") for network in state.allowed or ()]
    parts.before[closed] = [block("geo", f"${closed}", body=[directive("default", "1"), *networks])]
    asked = [directive("default", "0"), directive(rf'"~^1:(?!{CHALLENGE})"', "1")]
    parts.before[shown] = [block("map", f"${{{closed}}}:$uri", f"${shown}", body=asked)]
    path = f"{INTERNAL}maintenance"
    body = [
        directive("internal"),
        directive("default_type", "text/html"),
        directive("add_header", "Retry-After", str(state.retry_after), "always"),
        directive("return", str(MAINTENANCE_STATUS), parts.text(state.body or MAINTENANCE_BODY)),
    ]
    parts.locations[path] = block("location", "=", path, body=body)
    yield block("if", f"(${shown})", body=[directive("rewrite", "^", path, "last")])
