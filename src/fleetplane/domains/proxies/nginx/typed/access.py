"""Access options as NGINX spells them. Pure.

Everything is said in the location itself, never inherited: one `allow` of a location would cancel all of its
host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx.blocks import Node, Unrenderable, block, directive
from fleetplane.domains.proxies.nginx.typed.naming import INTERNAL, HostParts, tag
from fleetplane.domains.proxies.typed_options import Access, AccessRule, BasicUser, ForwardAuth

ZONE_SIZE: Final = "2m"
"""Room for about 16,000 keys."""
DECIDING: Final = frozenset(
    {
        "allow",
        "deny",
        "satisfy",
        "auth_basic",
        "auth_basic_user_file",
        "auth_request",
        "limit_req",
        "limit_conn",
    }
)
"""Directives by which an administrator keeps somebody out: typed options do not stand beside them."""
_KEYS: Final = {"address": "$binary_remote_addr", "host": "$host", "uri": "$uri"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a well-known service for forward authentication expects."""

    path: str
    headers: tuple[str, ...]


PRESETS: Final = {
    "authelia": Preset(
        path="/api/authz/auth-request",
        headers=("Remote-User", "Remote-Groups", "Remote-Name", "Remote-Email"),
    ),
    "authentik": Preset(
        path="/outpost.goauthentik.io/auth/nginx",
        headers=("X-authentik-username", "X-authentik-groups", "X-authentik-email", "X-authentik-uid"),
    ),
    "oauth2-proxy": Preset(path="/oauth2/auth", headers=("X-Auth-Request-User", "X-Auth-Request-Email")),
    "custom": Preset(path="", headers=()),
}


def key_variable(key: str) -> str:
    """The variable that a limit counts by."""
    kind, _, name = key.partition(":")
    if kind in ("header", "cookie") and name:
        prefix = "http" if kind == "header" else "cookie"
        return f"${prefix}_{name.lower().replace('-', '_') if kind == 'header' else name}"
    if key not in _KEYS:
        raise Unrenderable(f"access: {key[:80]!r} is not a key to count by")
    return _KEYS[key]


def nodes(access: Access, parts: HostParts, folder: str) -> Iterator[Node]:
    """`folder` is where workers find the files of users."""
    if access.list_ids:
        raise Unrenderable("access: an access list is missing")
    yield from banned(access, parts)
    if access.satisfy == "any":
        yield directive("satisfy", "any")
    yield from _rules(access.rules or ())
    if access.users:
        yield directive("auth_basic", parts.text(access.realm or "Restricted"))
        yield directive("auth_basic_user_file", f"{folder}/{_user_file(access.users, parts)}")
    if access.forward_auth:
        yield from _forward_auth(access.forward_auth, parts)
    yield from _limits(access, parts)


def forwarded_headers(access: Access) -> dict[str, str]:
    """What the service that let a request in says of it; always set, so that no visitor can."""
    if not access.forward_auth:
        return {}
    auth = access.forward_auth
    return {name: f"${_caught(auth, name)}" for name in _response_headers(auth)}


def banned(access: Access, parts: HostParts) -> Iterator[Node]:
    """Asked before anything else, so that no password and no redirect comes first."""
    if not access.banned:
        return
    networks = access.banned
    name = parts.variable("banned", *networks)
    body = [directive("default", "0"), *(directive(network, "1") for network in dict.fromkeys(networks))]
    parts.before.setdefault(name, [block("geo", f"${name}", body=body)])
    yield block("if", f"(${name})", body=[directive("return", "403")])


def _rules(rules: Sequence[AccessRule]) -> Iterator[Node]:
    for rule in rules:
        yield directive(rule.action, rule.network)
    if any(rule.action == "allow" for rule in rules) and rules[-1].network != "all":
        yield directive("deny", "all")


def _user_file(users: Sequence[BasicUser], parts: HostParts) -> str:
    lines = []
    for user in users:
        if not user.password_hash or any(one in user.name + user.password_hash for one in ":\n\r\0#"):
            raise Unrenderable("access.users: a user has no usable password")
        lines.append(f"{user.name}:{user.password_hash}\n")
    content = "".join(lines).encode()
    name = f"{parts.host}-{tag(content.decode())}"
    parts.user_files[name] = content
    return name


def _limits(access: Access, parts: HostParts) -> Iterator[Node]:
    for number, limit in enumerate(access.rate_limits or ()):
        key = key_variable(limit.key)
        rate = f"{limit.rate}r/{'s' if limit.per == 'second' else 'm'}"
        # NGINX refuses to reload a zone with another key under the name that it had.
        zone = f"fp_req_{tag(parts.host, str(number), key, rate)}"
        parts.before[zone] = [directive("limit_req_zone", key, f"zone={zone}:{ZONE_SIZE}", f"rate={rate}")]
        burst = [f"burst={limit.burst}"] if limit.burst else []
        yield directive(
            "limit_req", f"zone={zone}", *burst, *(["nodelay"] if burst and not limit.delay else [])
        )
    if access.rate_limits:
        yield directive("limit_req_status", str(access.rate_limits[0].status))
    for connection in access.connection_limits or ():
        key = key_variable(connection.key)
        zone = f"fp_conn_{tag(parts.host, key)}"
        parts.before[zone] = [directive("limit_conn_zone", key, f"zone={zone}:{ZONE_SIZE}")]
        yield directive("limit_conn", zone, str(connection.connections))
    if access.connection_limits:
        yield directive("limit_conn_status", str(access.connection_limits[0].status))


# Forward authentication.


def _response_headers(auth: ForwardAuth) -> tuple[str, ...]:
    return auth.response_headers or PRESETS[auth.preset].headers


def _caught(auth: ForwardAuth, header: str) -> str:
    return f"fleetplane_auth_{tag(auth.url, header.lower())}"


def _forward_auth(auth: ForwardAuth, parts: HostParts) -> Iterator[Node]:
    if fault := checks.url_fault(auth.url, "http", "https"):
        raise Unrenderable(f"access.forward_auth.url: {auth.url[:80]!r} {fault}")
    url = auth.url if urlsplit(auth.url).path else auth.url + PRESETS[auth.preset].path
    path = f"{INTERNAL}auth/{tag(url)}"
    parts.locations[path] = block("location", "=", path, body=_asking(url))
    yield directive("auth_request", path)
    for name in _response_headers(auth):
        upstream = f"$upstream_http_{name.lower().replace('-', '_')}"
        yield directive("auth_request_set", f"${_caught(auth, name)}", upstream)
    if auth.sign_in_url:
        name = f"@fleetplane_sign_in_{tag(auth.sign_in_url)}"
        mark = "&" if "?" in auth.sign_in_url else "?"
        target = f"{parts.text(auth.sign_in_url)}{mark}rd=$scheme://$host$request_uri"
        parts.locations[name] = block("location", name, body=[directive("return", "302", target)])
        yield directive("error_page", "401", "=", name)


def _asking(url: str) -> Iterator[Node]:
    yield directive("internal")
    yield directive("proxy_pass", url)
    yield directive("proxy_http_version", "1.1")
    yield directive("proxy_pass_request_body", "off")
    told = {
        "Host": "$proxy_host",
        "Connection": "",
        "Content-Length": "",
        "X-Original-URL": "$scheme://$host$request_uri",
        "X-Original-Method": "$request_method",
        "X-Forwarded-Method": "$request_method",
        "X-Forwarded-Proto": "$scheme",
        "X-Forwarded-Host": "$host",
        "X-Forwarded-Uri": "$request_uri",
        "X-Forwarded-For": "$remote_addr",
        "X-Real-IP": "$remote_addr",
    }
    for name, value in told.items():
        yield directive("proxy_set_header", name, value)
