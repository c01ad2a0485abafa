"""Typed options are refused with their field's name where no agent could serve them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import HostNeighbours, WorkspaceSurroundings, host_clashes

HOSTILE = (
    *("a\nb", "a\rb", "a\x00b", 'a"b', "a'b", "a;b", "a{b", "a}b", "$host", "${host}", "../x", "a\\b"),
    *("é", "\ud800", "unix:/x", " ", "x" * 5000),
)
"""What must never reach a configuration where a plain word is meant."""
SECURE = {"ssl_enabled": True, "ssl_certificate_id": "c1", "listen_port": 443}


def around(
    capabilities: dict[str, tuple[str, ...]] | None = None, **hosts: VirtualHostSpec
) -> WorkspaceSurroundings:
    return WorkspaceSurroundings(
        virtual_hosts=hosts,
        upstreams={"u1"},
        certificates={"c1"},
        agents={"a1": {}, "a2": {}},
        capabilities=capabilities or {},
    )


def host(**given: Any) -> VirtualHostSpec:
    return msgspec.convert(
        {"name": "Site", "server_name": "example.com", "listen_port": 80, **given}, VirtualHostSpec
    )


def faults(**given: Any) -> list[tuple[str, str]]:
    return [(one.field, one.code) for one in rules.host_problems(host(**given), around())]


def clashes(one: VirtualHostSpec, other: VirtualHostSpec) -> list[str]:
    neighbours = HostNeighbours({"x": other, "y": one}).of("y", one)
    assert ("x" in neighbours) is bool(list(host_clashes(one, around(x=other)))), "found among its neighbours"
    return [problem.field for problem in host_clashes(one, around(x=other))]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls": {"force_https": True}}, ("tls", "INCOMPATIBLE")),
        ({**SECURE, "listen_port": 80, "tls": {"force_https": True}}, ("tls.force_https", "INCOMPATIBLE")),
        ({**SECURE, "tls": {"hsts": {"max_age": -1}}}, ("tls.hsts.max_age", "OUT_OF_RANGE")),
        ({**SECURE, "tls": {"hsts": {"max_age": 10**12}}}, ("tls.hsts.max_age", "OUT_OF_RANGE")),
        ({**SECURE, "tls": {"hsts": {"preload": True}}}, ("tls.hsts.preload", "INCOMPATIBLE")),
        (
            {**SECURE, "tls": {"client_certificates": {"authority_id": "another workspace's"}}},
            ("tls.client_certificates.authority_id", "UNKNOWN_REFERENCE"),
        ),
        (
            {**SECURE, "tls": {"client_certificates": {"authority_id": "c1", "depth": 0}}},
            ("tls.client_certificates.depth", "OUT_OF_RANGE"),
        ),
        ({"listening": {"proxy_protocol_from": []}}, ("listening.proxy_protocol_from", "REQUIRED")),
        (
            {"listening": {"proxy_protocol_from": ["10.0.0.0/8"] * 257}},
            ("listening.proxy_protocol_from", "TOO_MANY"),
        ),
    ],
)
def test_tls_and_listening_options_that_cannot_be_served_are_refused(
    given: dict[str, Any], problem: tuple[str, str]
) -> None:
    assert problem in faults(**given)


@pytest.mark.parametrize("text", [*HOSTILE, "all", "10.0.0.1/8", "fe80::1%eth0", "10.0.0.0/33", "٣.0.0.1"])
def test_a_network_is_an_address_or_a_network_and_nothing_else(text: str) -> None:
    assert [field for field, _ in faults(listening={"proxy_protocol_from": [text]})] == [
        "listening.proxy_protocol_from.0"
    ]


def test_good_options_are_accepted() -> None:
    clients = {"authority_id": "c1", "mode": "optional"}
    hsts = {"max_age": 63072000, "include_subdomains": True, "preload": True}
    tls = {"force_https": True, "hsts": hsts, "profile": "modern", "client_certificates": clients}
    listening = {"ipv6": False, "proxy_protocol_from": ["::1", "10.0.0.0/8"]}
    assert faults(**SECURE, tls=tls, listening=listening) == []


def test_hosts_that_share_a_port_agree_on_how_connections_begin() -> None:
    forced = host(**SECURE, tls={"force_https": True})
    assert clashes(forced, host()) == ["server_name"], "port 80 of the same name is taken"
    assert clashes(host(), forced) == ["server_name"]
    assert clashes(forced, host(server_name="other.test")) == []
    onto_tls = host(server_name="o.test", **{**SECURE, "listen_port": 80})
    assert clashes(forced, onto_tls) == ["tls.force_https"]
    announced = host(server_name="o.test", listening={"proxy_protocol_from": ["10.0.0.1"]})
    assert clashes(announced, host()) == ["listening.proxy_protocol_from"]
    modern = host(server_name="o.test", **SECURE, tls={"profile": "modern"})
    assert clashes(modern, host(**SECURE)) == ["tls.profile"]


def test_what_an_agent_lacks_is_told_before_anything_is_saved() -> None:
    spec = host(listening={"proxy_protocol_from": ["10.0.0.1"]})

    def told(**capabilities: tuple[str, ...]) -> list[tuple[str, str]]:
        return [(one.field, one.message) for one in rules.host_problems(spec, around(capabilities))]

    assert told(a1=("typed-options",)) == []
    assert told(a1=("typed-options",), a2=("http2",)) == [
        ("listening", "Agent a2 does not know these options: update its program")
    ]
    assert told(a1=("typed-options", "lacks-realip")) == [
        ("listening.proxy_protocol_from", "Agent a1 has an NGINX without realip")
    ]
    plain = host()
    assert list(rules.host_problems(plain, around({"a1": ("http2", "lacks-realip")}))) == []


# Access and content.


def at(group: str, *path: str | int, value: Any, around: dict[str, Any]) -> list[str]:
    """The fields at fault when one value of a group is what it is."""
    body: Any = msgspec.json.decode(msgspec.json.encode(around))
    place = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    where = {"locations": [{"path": "/", "proxy_pass": "http://x:1"}], group: body}
    return [field for field, _ in faults(**where)]


ACCESS = {
    "rules": [{"action": "allow", "network": "10.0.0.1"}],
    "banned": ["10.0.0.1"],
    "users": [{"name": "ann", "password": "x"}],
    "realm": "r",
    "forward_auth": {"url": "http://x/y", "sign_in_url": "https://x", "response_headers": ["X-A"]},
    "rate_limits": [{"rate": 1, "key": "header:X"}],
    "connection_limits": [{"connections": 1, "key": "cookie:x"}],
}
CONTENT = {
    "headers": [{"action": "set", "name": "X-A", "value": "$host"}],
    "cors": {"origins": ["https://a.test"], "methods": ["GET"], "headers": ["X-A"], "expose": ["X-B"]},
    "max_body_bytes": 1,
    "timeouts": {"read": 1},
    "compression": {"level": 1, "min_length": 1, "types": ["text/css"]},
}
PAGES = {
    "redirects": [{"path": "/a", "to": "/b"}],
    "errors": [{"statuses": [404], "body": "<p>"}],
    "maintenance": {"allowed": ["10.0.0.1"], "body": "x"},
}
PLACES = [
    ("access", ACCESS, ("rules", 0, "network")),
    ("access", ACCESS, ("banned", 0)),
    ("access", ACCESS, ("users", 0, "name")),
    ("access", ACCESS, ("users", 0, "password_hash")),
    ("access", ACCESS, ("forward_auth", "url")),
    ("access", ACCESS, ("forward_auth", "sign_in_url")),
    ("access", ACCESS, ("forward_auth", "response_headers", 0)),
    ("access", ACCESS, ("rate_limits", 0, "key")),
    ("access", ACCESS, ("connection_limits", 0, "key")),
    ("access", ACCESS, ("list_ids",)),
    ("content", CONTENT, ("headers", 0, "name")),
    ("content", CONTENT, ("cors", "origins", 0)),
    ("content", CONTENT, ("cors", "methods", 0)),
    ("content", CONTENT, ("cors", "headers", 0)),
    ("content", CONTENT, ("cors", "expose", 0)),
    ("content", CONTENT, ("compression", "types", 0)),
    ("pages", PAGES, ("redirects", 0, "path")),
    ("pages", PAGES, ("redirects", 0, "to")),
    ("pages", PAGES, ("maintenance", "allowed", 0)),
]


def test_the_groups_are_good_as_they_are() -> None:
    location = {"locations": [{"path": "/", "proxy_pass": "http://x:1"}]}
    assert faults(**location, access=ACCESS, content=CONTENT, pages=PAGES) == []


@pytest.mark.parametrize(("group", "body", "path"), PLACES)
def test_hostile_text_is_refused_at_its_field(
    group: str, body: dict[str, Any], path: tuple[str | int, ...]
) -> None:
    for text in HOSTILE:
        if path[-1] == "password_hash":
            good = {**body, "users": [{"name": "ann"}]}
            found = at(group, *path, value=text, around=good)
        else:
            found = at(group, *path, value=[text] if path[-1] == "list_ids" else text, around=body)
        place = ".".join(map(str, (group, *path)))
        assert any(one.startswith(place) for one in found), (text, found)


@pytest.mark.parametrize(
    ("group", "body", "path"),
    [
        ("access", ACCESS, ("realm",)),
        ("content", CONTENT, ("headers", 0, "value")),
        ("pages", PAGES, ("errors", 0, "body")),
        ("pages", PAGES, ("maintenance", "body")),
    ],
)
def test_free_text_cannot_hold_control_characters_or_unknown_variables(
    group: str, body: dict[str, Any], path: tuple[str | int, ...]
) -> None:
    for text in ("a\rb", "a\x00b", "\ud800", "x" * 5000):
        assert at(group, *path, value=text, around=body), text
    if path[-1] == "value":
        for text in ("$http_cookie", "${uri}", "$uri", "costs $5", "a\nb", "$"):
            assert at(group, *path, value=text, around=body) == ["content.headers.0.value"], text


@pytest.mark.parametrize(
    ("group", "body", "path", "many"),
    [
        ("access", ACCESS, ("rules",), {"action": "deny", "network": "10.0.0.1"}),
        ("access", ACCESS, ("banned",), "10.0.0.1"),
        ("access", ACCESS, ("users",), {"name": "a", "password": "x"}),
        ("access", ACCESS, ("rate_limits",), {"rate": 1}),
        ("content", CONTENT, ("headers",), {"action": "remove", "name": "X-A"}),
        ("content", CONTENT, ("cors", "origins"), "https://a.test"),
        ("content", CONTENT, ("compression", "types"), "text/css"),
        ("pages", PAGES, ("redirects",), {"path": "/a", "to": "/b"}),
        ("pages", PAGES, ("errors", 0, "statuses"), 404),
        ("pages", PAGES, ("maintenance", "allowed"), "10.0.0.1"),
    ],
)
def test_nothing_may_be_endless(
    group: str, body: dict[str, Any], path: tuple[str | int, ...], many: Any
) -> None:
    assert ".".join(map(str, (group, *path))) in at(group, *path, value=[many] * 20_000, around=body)


def test_what_makes_no_sense_together_is_refused() -> None:
    def field(**given: Any) -> list[str]:
        return [one for one, _ in faults(**given)]

    to = {"path": "/", "proxy_pass": "http://x:1"}
    assert field(content={"cors": {"origins": ["*"], "credentials": True}}) == ["content.cors.credentials"]
    assert field(locations=[{**to, "content": {"fallback": "/x"}}]) == ["locations.0.content.fallback"]
    root = {"path": "/", "root": "/var/www"}
    assert field(locations=[{**root, "content": {"fallback": "/../x"}}]) == ["locations.0.content.fallback"]
    assert field(locations=[{**to, "respond": {}}]) == ["locations.0"]
    assert field(locations=[{"path": "/", "respond": {"status": 302}}]) == ["locations.0.respond.to"]
    set_host = {"action": "set", "name": "Transfer-Encoding", "value": "x"}
    assert field(content={"headers": [set_host]}) == ["content.headers.0.name"]
    forged = {"action": "set", "name": "x-client-verify", "value": "SUCCESS", "direction": "request"}
    assert field(content={"headers": [forged]}) == ["content.headers.0.name"]
    raw = {"locations": [to], "custom_directives": {"deny": "all"}}
    assert field(**raw, access={"banned": ["10.0.0.1"]}) == ["access"]


# Upstreams, caches and logs.


def upstream(**given: Any) -> list[str]:
    body = {"name": "g", "algorithm": "round_robin", "servers": [{"address": "a:1"}], **given}
    return [one.field for one in rules.upstream_problems(msgspec.convert(body, UpstreamSpec), {"c1"})]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls": {}}, "tls"),
        ({"protocol": "https", "tls": {"authority_id": "another workspace's"}}, "tls.authority_id"),
        ({"protocol": "https", "tls": {"client_certificate_id": "x"}}, "tls.client_certificate_id"),
        ({"balancing": {"method": "random"}, "algorithm": "ip_hash"}, "balancing"),
        ({"keepalive": {"timeout": 5}}, "keepalive"),
        ({"keepalive_connections": 1, "keepalive": {"timeout": 0}}, "keepalive.timeout"),
        ({"retries": {"on": ["error", "error"]}}, "retries.on"),
        ({"retries": {"on": [], "tries": 0}}, "retries.tries"),
        ({"servers": [{"address": "a:1", "draining": True}]}, "servers"),
        ({"servers": [{"address": "a:1", "max_connections": 0}]}, "servers.0.max_connections"),
        ({"servers": [{"address": "a:1", "slow_start": -1}]}, "servers.0.slow_start"),
    ],
)
def test_options_of_upstreams_that_cannot_be_served_are_refused(given: dict[str, Any], field: str) -> None:
    assert field in upstream(**given)


def test_hostile_text_in_upstreams_caches_and_logs_is_refused_at_its_field() -> None:
    to = {"path": "/", "upstream_id": "u1"}
    for text in HOSTILE:
        assert upstream(protocol="https", tls={"name": text}) == ["tls.name"], text
        assert upstream(balancing={"method": "hash", "key": text}) == ["balancing.key"], text
        assert upstream(balancing={"method": "sticky_cookie", "cookie": text}) == ["balancing.cookie"], text
        split = {"to": [{"upstream_id": "u1", "percent": 1}], "key": text}
        assert faults(locations=[{**to, "canaries": split}])[0][0] == "locations.0.canaries.key", text
        resolver = {"addresses": [text]}
        found = faults(locations=[{"path": "/", "proxy_pass": "http://x:1", "resolver": resolver}])
        assert found[0][0] == "locations.0.resolver.addresses.0", text
        cache = {"rules": [{"seconds": 1}], "bypass": [text]}
        assert faults(cache={}, locations=[{**to, "cache": cache}])[0][0] == "locations.0.cache.bypass.0", (
            text
        )
        assert faults(logging={"leave_out": [text]})[0][0] == "logging.leave_out.0", text
        assert faults(logging={"add": [text]})[0][0] == "logging.add.0", text


def test_a_proxy_pass_that_is_no_url_is_refused_beside_a_resolver() -> None:
    location = {"path": "/", "proxy_pass": "http://[::1", "resolver": {"addresses": ["10.0.0.1"]}}
    assert [field for field, _ in faults(locations=[location])] == ["locations.0.proxy_pass"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"canaries": {"to": []}}, "locations.0.canaries.to"),
        (
            {"canaries": {"to": [{"upstream_id": "no", "percent": 1}]}},
            "locations.0.canaries.to.0.upstream_id",
        ),
        ({"canaries": {"to": [{"upstream_id": "u1", "percent": 60}] * 2}}, "locations.0.canaries.to"),
        ({"canaries": {"to": [{"upstream_id": "u1", "percent": 1}] * 9000}}, "locations.0.canaries.to"),
        ({"resolver": {"addresses": ["10.0.0.1"]}}, "locations.0.resolver"),
        ({"cache": {"rules": [{"seconds": 1}]}}, "locations.0.cache"),
        ({"cache": {"rules": []}}, "locations.0.cache.rules"),
        ({"cache": {"rules": [{"seconds": 1}] * 9000}}, "locations.0.cache.rules"),
    ],
)
def test_options_of_locations_that_cannot_be_served_are_refused(given: dict[str, Any], field: str) -> None:
    assert field in [one for one, _ in faults(locations=[{"path": "/", "upstream_id": "u1", **given}])]


def test_fields_that_figures_are_made_of_stay_in_the_log() -> None:
    assert faults(logging={"leave_out": ["user_agent"], "sample_percent": 5}) == []
    assert faults(logging={"leave_out": ["status"]})[0][0] == "logging.leave_out.0"
    assert faults(logging={"sample_percent": 0})[0][0] == "logging.sample_percent"
    assert faults(cache={"max_mb": 0})[0][0] == "cache.max_mb"
