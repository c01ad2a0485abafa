"""Directives and what may be served: tables of what is accepted and what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import (
    AllAgents,
    Header,
    Location,
    NamedAgents,
    SelectedAgents,
    TargetAgents,
)
from fleetplane.domains.proxies.nginx import blocks, judging
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules import directives
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.locations import location_problems, regex_fault
from fleetplane.web.rest.problems import ConflictBlocker, Rejected

# Directives.


@pytest.mark.parametrize(
    "value",
    ["10m", "on", '"a;b"', "'{}'", "a\\;b", "$scheme://x", "60s 10s", "", "a#b", '"#x"', "é", "x'y"],
)
def test_the_arguments_of_one_directive_are_accepted(value: str) -> None:
    assert directives.value_fault(value, name="add_header", contexts={DirectiveContext.LOCATION}) == ""


@pytest.mark.parametrize(
    "value",
    [
        "10m; evil on",
        "a { b",
        "}",
        "#x",
        "a #b",
        "a\\",
        '"open',
        "'open",
        "a\nb",
        "a\tb",
        "\x00",
        "x" * 4097,
        '"a" ; b',
        "'a\\' ; b",
        '"a"b',
        "a\\nb",
    ],
)
def test_a_value_that_could_escape_its_directive_is_refused(value: str) -> None:
    assert directives.value_fault(value, name="add_header", contexts={DirectiveContext.LOCATION}) != ""


@pytest.mark.parametrize(
    "name",
    [
        "include",
        "load_module",
        "content_by_lua_block",
        "Root",
        "a b",
        "",
        "a;b",
        "ssl_certificate_key",
        "listen",
        "access_log",
        "proxy_cache_path",
        "client_body_temp_path",
        "js_var",
        "lua_package_path",
    ],
)
def test_a_directive_that_could_run_code_or_take_over_is_refused(name: str) -> None:
    found = list(
        directives.problems({name: "x"}, field="custom_directives", contexts={DirectiveContext.SERVER})
    )
    assert [problem.field for problem in found] == [f"custom_directives.{name}"]


@given(st.text(max_size=12), st.text(alphabet="ab \"'\\\\;{}#$\n", max_size=12))
def test_what_is_accepted_is_what_agents_write(name: str, value: str) -> None:
    if not list(
        directives.problems({name: value}, field="custom_directives", contexts={DirectiveContext.SERVER})
    ):
        assert blocks.emit(judging.raw({name: value}, {DirectiveContext.SERVER}, ANYWHERE, where="x"))


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "NGINX", "NXMESH_ACME_RESPONDER", "NXMESH_ACME_WORKSPACE", "a-b", ""]
)
def test_a_variable_that_agents_would_not_set_is_refused(name: str) -> None:
    assert [one.field for one in directives.variable_problems({name: "x"}, field="env_vars")] == [
        f"env_vars.{name}"
    ]
    assert list(directives.variable_problems({"TZ": "UTC"}, field="env_vars")) == []


def test_a_text_that_outgrows_an_argument_once_it_is_quoted_is_refused() -> None:
    assert directives.text_fault("x" * 4000) == ""
    assert directives.text_fault('"' * 2001) == "Longer than 4000 bytes"


# Regular expressions.


@pytest.mark.parametrize(
    "pattern",
    [
        "^/a$",
        r"\.(?:jpe?g|png)$",
        r"^/(?<year>\d{4})/",
        "[(]",
        "[]a(]",
        "[^]a)]",
        "[[:alpha:])]",
        r"[\](]",
        r"\(",
        r"\Q(\E",
        "(?#()x",
        "a|b",
        "(*UTF8)a",
        "(?x)a#(",
        "a++",
        "a{2,3}",
        "",
    ],
)
def test_a_regular_expression_is_left_to_nginx(pattern: str) -> None:
    assert regex_fault(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "'('"),
        ("a)", "')'"),
        ("a)(", "')'"),
        ("[a", "'['"),
        ("[]", "'['"),
        ("*a", "repeat"),
        ("a|+", "repeat"),
        ("a\\", "backslash"),
        (r"\((", "'('"),
    ],
)
def test_what_is_no_regular_expression_anywhere_is_refused(pattern: str, word: str) -> None:
    assert word in regex_fault(pattern)


# Upstreams.

SERVER = {"address": "10.0.1.30:8080"}


def upstream(**given: Any) -> list[tuple[str, str]]:
    body = {"name": "web", "algorithm": "round_robin", "servers": [SERVER], **given}
    spec = msgspec.convert(body, UpstreamSpec)
    return [(problem.field, problem.code) for problem in rules.upstream_problems(spec)]


@pytest.mark.parametrize("address", ["10.0.0.1:80", "[::1]:80", "backend.internal:65535", "a_b:1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert upstream(servers=[{"address": address}]) == []


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "host:0", "host:65536", "unix:/x.sock", "[::1]", "[x]:80", "a b:80", "h:80;", ":80"],
)
def test_anything_else_is_no_address(address: str) -> None:
    assert upstream(servers=[{"address": address}]) == [("servers.0.address", "INVALID_FORMAT")]


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"servers": []}, [("servers", "REQUIRED")]),
        ({"servers": [{**SERVER, "backup": True}]}, [("servers", "INCOMPATIBLE")]),
        (
            {"algorithm": "ip_hash", "servers": [SERVER, {**SERVER, "backup": True}]},
            [("servers.1.backup", "INCOMPATIBLE")],
        ),
        ({"servers": [SERVER] * 201}, [("servers", "TOO_MANY")]),
        ({"servers": [{**SERVER, "weight": 0}]}, [("servers.0.weight", "OUT_OF_RANGE")]),
        ({"name": "Web"}, [("name", "INVALID_FORMAT")]),
        (
            {"health_check": {"enabled": True, "interval": 5, "timeout": 5}},
            [("health_check.timeout", "INCOMPATIBLE")],
        ),
        ({"health_check": {"enabled": True, "path": "x"}}, [("health_check.path", "INVALID_FORMAT")]),
        (
            {"health_check": {"enabled": True, "healthy_threshold": 0}},
            [("health_check.healthy_threshold", "OUT_OF_RANGE")],
        ),
        ({"keepalive_connections": -1}, [("keepalive_connections", "OUT_OF_RANGE")]),
    ],
)
def test_an_upstream_that_nginx_would_refuse_is_refused_first(
    given: dict[str, Any], problems: list[tuple[str, str]]
) -> None:
    assert upstream(**given) == problems


# Virtual hosts.


def around(**hosts: VirtualHostSpec) -> WorkspaceSurroundings:
    return WorkspaceSurroundings(
        virtual_hosts=hosts, upstreams={"u1"}, certificates={"c1"}, agents={"a1": {"env": "x"}, "a2": {}}
    )


def host(**given: Any) -> VirtualHostSpec:
    return msgspec.convert(
        {"name": "Site", "server_name": "example.com", "listen_port": 80, **given}, VirtualHostSpec
    )


def faults(**given: Any) -> list[tuple[str, str]]:
    return [(problem.field, problem.code) for problem in rules.host_problems(host(**given), around())]


@pytest.mark.parametrize(
    "name", ["example.com", "*.example.com", ".example.com", "_", "a.b c.d", "localhost", "x_y.example.com"]
)
def test_a_server_name_is_one_or_more_names(name: str) -> None:
    assert faults(server_name=name) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"server_name": ""}, ("server_name", "REQUIRED")),
        ({"server_name": "a;b"}, ("server_name", "INVALID_FORMAT")),
        ({"server_name": "~^x"}, ("server_name", "INVALID_FORMAT")),
        ({"server_name": "a.b A.b"}, ("server_name", "NOT_UNIQUE")),
        ({"server_name": "a.b .a.b"}, ("server_name", "NOT_UNIQUE")),
        ({"server_name": ".a.b *.a.b"}, ("server_name", "NOT_UNIQUE")),
        ({"server_name": " ".join(f"a{n}.b" for n in range(51))}, ("server_name", "TOO_MANY")),
        ({"listen_port": 0}, ("listen_port", "OUT_OF_RANGE")),
        ({"listen_port": 65536}, ("listen_port", "OUT_OF_RANGE")),
        ({"ssl_enabled": True}, ("ssl_certificate_id", "REQUIRED")),
        ({"ssl_certificate_id": "nope"}, ("ssl_certificate_id", "UNKNOWN_REFERENCE")),
        ({"name": ""}, ("name", "REQUIRED")),
        ({"name": "x" * 101}, ("name", "TOO_LONG")),
        ({"locations": [{"path": "/"}]}, ("locations.0", "REQUIRED")),
        ({"locations": [{"path": "/", "root": "/a", "upstream_id": "u1"}]}, ("locations.0", "INCOMPATIBLE")),
        ({"locations": [{"path": "x", "root": "/a"}]}, ("locations.0.path", "INVALID_FORMAT")),
        ({"locations": [{"path": "/ x", "root": "/a"}]}, ("locations.0.path", "INVALID_FORMAT")),
        (
            {"locations": [{"path": "/", "upstream_id": "u2"}]},
            ("locations.0.upstream_id", "UNKNOWN_REFERENCE"),
        ),
        (
            {"locations": [{"path": "/", "proxy_pass": "ftp://x"}]},
            ("locations.0.proxy_pass", "INVALID_FORMAT"),
        ),
        (
            {"locations": [{"path": "/", "proxy_pass": "http://x;"}]},
            ("locations.0.proxy_pass", "INVALID_FORMAT"),
        ),
        ({"locations": [{"path": "/", "root": "rel"}]}, ("locations.0.root", "INVALID_FORMAT")),
        (
            {"locations": [{"path": "/", "root": "/a"}, {"path": "/", "root": "/b"}]},
            ("locations.1.path", "NOT_UNIQUE"),
        ),
        (
            {"locations": [{"path": "/a", "root": "/a"}, {"path": "^~ /a", "root": "/b"}]},
            ("locations.1.path", "NOT_UNIQUE"),
        ),
        ({"locations": [{"path": "~ (a", "root": "/a"}]}, ("locations.0.path", "INVALID_FORMAT")),
        (
            {"locations": [{"path": "~ .php$", "proxy_pass": "http://127.0.0.1/x"}]},
            ("locations.0.proxy_pass", "INCOMPATIBLE"),
        ),
        (
            {"locations": [{"path": "/", "proxy_pass": "http://user:word@127.0.0.1/"}]},
            ("locations.0.proxy_pass", "INVALID_FORMAT"),
        ),
        ({"locations": [{"path": "/", "root": "/a", "index": " "}]}, ("locations.0.index", "INVALID_FORMAT")),
        (
            {"locations": [{"path": "/", "root": "/a", "custom_directives": {"root": "/b"}}]},
            ("locations.0.custom_directives.root", "INCOMPATIBLE"),
        ),
        (
            {
                "locations": [
                    {"path": "/", "root": "/a", "rewrite_rules": [{"pattern": "^/(a", "replacement": "/b"}]}
                ]
            },
            ("locations.0.rewrite_rules.0.pattern", "INVALID_FORMAT"),
        ),
        ({"locations": [{"path": f"/{n}", "root": "/a"} for n in range(101)]}, ("locations", "TOO_MANY")),
        (
            {"locations": [{"path": "/", "root": "/a", "custom_directives": {"include": "x"}}]},
            ("locations.0.custom_directives.include", "INCOMPATIBLE"),
        ),
        (
            {
                "locations": [
                    {"path": "/", "root": "/a", "rewrite_rules": [{"pattern": "", "replacement": "x"}]}
                ]
            },
            ("locations.0.rewrite_rules.0.pattern", "INVALID_FORMAT"),
        ),
        ({"custom_directives": {"root": "/x; evil"}}, ("custom_directives.root", "INVALID_FORMAT")),
        (
            {"target_agents": {"type": "selector", "label_selector": ""}},
            ("target_agents.label_selector", "INVALID_FORMAT"),
        ),
        ({"target_agents": {"type": "agents", "agent_ids": []}}, ("target_agents.agent_ids", "REQUIRED")),
        (
            {"target_agents": {"type": "agents", "agent_ids": ["a9"]}},
            ("target_agents.agent_ids.0", "UNKNOWN_REFERENCE"),
        ),
    ],
)
def test_a_host_that_no_agent_could_serve_is_refused_at_its_field(
    given: dict[str, Any], problem: tuple[str, str]
) -> None:
    assert faults(**given) == [problem]


@pytest.mark.parametrize("value", ["#x", "a\\", '"; } server {', "$scheme"])
def test_a_header_may_hold_anything_that_can_be_quoted(value: str) -> None:
    location = Location(path="/", root="/a", custom_headers=(Header(name="X-A", value=value),))
    assert list(rules.host_problems(host_with(location), around())) == []


@pytest.mark.parametrize("header", [("X A", "x"), ("X-A", "a\nb"), ("", "x"), ("X-A", "\x7f")])
def test_a_header_that_breaks_its_line_is_refused(header: tuple[str, str]) -> None:
    location = Location(path="/", root="/a", custom_headers=(Header(name=header[0], value=header[1]),))
    assert len(list(rules.host_problems(host_with(location), around()))) == 1


def host_with(location: Location) -> VirtualHostSpec:
    return msgspec.structs.replace(host(), locations=(location,))


# Clashes.

ALL: TargetAgents = AllAgents()


def select(text: str) -> TargetAgents:
    return SelectedAgents(label_selector=text)


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        (ALL, ALL, True),
        (ALL, select("env=x"), True),
        (select("env=x"), select("env=y"), False),
        (select("env=x"), select("tier=web"), True),
        (NamedAgents(agent_ids=("a1",)), NamedAgents(agent_ids=("a2",)), False),
        (NamedAgents(agent_ids=("a1", "a2")), NamedAgents(agent_ids=("a2",)), True),
        (NamedAgents(agent_ids=("a1",)), select("env=x"), True),
        (NamedAgents(agent_ids=("a2",)), select("env=x"), False),
    ],
)
def test_the_same_name_and_port_clash_where_one_agent_could_serve_both(
    one: TargetAgents, other: TargetAgents, clash: bool
) -> None:
    first = msgspec.structs.replace(host(), target_agents=one)
    second = msgspec.structs.replace(host(), target_agents=other, server_name="www.b.c EXAMPLE.com")
    for new, old in ((first, second), (second, first)):
        found = list(clashes.host_clashes(new, around(h1=old)))
        assert bool(found) is clash
        if clash:
            assert "h1" in found[0].message
            assert found[0].field == "server_name"


def test_other_ports_and_other_names_do_not_clash() -> None:
    old = around(h1=host(listen_port=81), h2=host(server_name="other.example.com"))
    rules.accept_host(host(), old)


def test_one_port_is_either_tls_or_not() -> None:
    tls = host(server_name="b.example.com", ssl_enabled=True, ssl_certificate_id="c1")
    with pytest.raises(ConflictBlocker) as refused:
        rules.accept_host(tls, around(h1=host()))
    assert refused.value.problems[0].field == "ssl_enabled"


def test_labels_that_would_bring_two_hosts_of_one_name_together_clash() -> None:
    hosts = {
        "h1": msgspec.structs.replace(host(), target_agents=NamedAgents(agent_ids=("a2",))),
        "h2": msgspec.structs.replace(host(), target_agents=select("env=x")),
    }
    assert list(clashes.label_clashes("a2", {}, hosts)) == []
    assert len(list(clashes.label_clashes("a2", {"env": "x"}, hosts))) == 1


def test_labels_that_would_bring_tls_and_plain_text_onto_one_port_clash() -> None:
    tls = host(server_name="b.example.com", ssl_enabled=True, ssl_certificate_id="c1")
    hosts = {
        "h1": msgspec.structs.replace(host(), target_agents=NamedAgents(agent_ids=("a2",))),
        "h2": msgspec.structs.replace(tls, target_agents=select("env=x")),
    }
    assert list(clashes.label_clashes("a2", {}, hosts)) == []
    assert [one.field for one in clashes.label_clashes("a2", {"env": "x"}, hosts)] == ["labels"]


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [(".b.c", "b.c", True), (".b.c", "*.b.c", True), ("*.b.c", "b.c", False), (".b.c", "a.b.c", False)],
)
def test_a_name_with_a_leading_dot_is_two_names(one: str, other: str, clash: bool) -> None:
    for new, old in ((one, other), (other, one)):
        found = list(clashes.host_clashes(host(server_name=new), around(h1=host(server_name=old))))
        assert bool(found) is clash


def test_wrong_before_clashing() -> None:
    with pytest.raises(Rejected):
        rules.accept_host(host(listen_port=0), around(h1=host(listen_port=0)))


def test_only_a_location_that_proxies_can_stream() -> None:
    files = Location(path="/", root="/srv", streaming=True)
    assert [(one.field, one.code) for one in location_problems(files, "locations.0", ())] == [
        ("locations.0.streaming", "INCOMPATIBLE")
    ]
    proxied = Location(path="/", proxy_pass="http://127.0.0.1:9", streaming=True)
    assert list(location_problems(proxied, "locations.0", ())) == []
