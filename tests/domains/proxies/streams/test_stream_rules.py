"""What a stream may be: every refusal names its field, and clashes name what is in the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies.kinds.records import PartSpec, StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.nginx.site import Binary
from fleetplane.domains.proxies.rules import configuration, validation
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.ports import DEFAULT_STREAM_PORTS, PortRanges
from fleetplane.domains.proxies.rules.reach import part_fault
from fleetplane.domains.proxies.rules.streams import labelled_clashes, stream_clashes, stream_problems
from fleetplane.domains.proxies.settings import ProxySettings
from fleetplane.kernel.errors import SettingsError
from fleetplane.web.rest.problems import ConflictBlocker, Rejected

PORTS = PortRanges.parse(DEFAULT_STREAM_PORTS, field="proxies.stream_ports")
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sealed": {"protocol": "https", "tls": {}},
    "sticky": {"balancing": {"method": "sticky_cookie"}},
    "by-uri": {"balancing": {"method": "hash", "key": "uri"}},
}


def upstream(name: str, **given: Any) -> UpstreamSpec:
    base = {"name": name, "algorithm": "round_robin", "servers": [{"address": "a:1"}]}
    return msgspec.convert({**base, **given}, UpstreamSpec)


def stream(**given: Any) -> StreamSpec:
    base = {"name": "s", "listen_port": 5432, "upstream_id": "plain"}
    return msgspec.convert({**base, **given}, StreamSpec)


def host(**given: Any) -> VirtualHostSpec:
    base = {"name": "web", "server_name": "a.test", "listen_port": 8080}
    return msgspec.convert({**base, **given}, VirtualHostSpec)


def around(**given: Any) -> WorkspaceSurroundings:
    specs = {name: upstream(name, **options) for name, options in GROUPS.items()}
    made: dict[str, Any] = {
        "virtual_hosts": {},
        "upstreams": specs.keys(),
        "upstream_specs": specs,
        "certificates": (),
        "agents": {},
        "stream_ports": PORTS,
    }
    return WorkspaceSurroundings(**{**made, **given})


def test_a_stream_with_everything_is_taken() -> None:
    full = stream(
        listen_port=443,
        routes=[{"names": ["a.test", ".b.test"], "upstream_id": "plain"}],
        send_proxy_protocol=True,
        rules=[{"action": "allow", "network": "10.0.0.0/8"}, {"action": "deny", "network": "all"}],
        limits={"connections": 5, "download_bytes_per_second": 1, "upload_bytes_per_second": 1},
        timeouts={"connect": 1, "idle": 60},
        log=False,
    )
    assert list(stream_problems(full, around())) == []
    assert list(stream_problems(stream(protocol="udp", responses=0), around())) == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": "No Name"}, "name"),
        ({"listen_port": 0}, "listen_port"),
        ({"listen_port": 25}, "listen_port"),
        ({"upstream_id": msgspec.UNSET}, "upstream_id"),
        ({"upstream_id": "gone"}, "upstream_id"),
        ({"upstream_id": "sealed"}, "upstream_id"),
        ({"upstream_id": "sticky"}, "upstream_id"),
        ({"upstream_id": "by-uri"}, "upstream_id"),
        ({"routes": [{"names": [], "upstream_id": "plain"}]}, "routes.0.names"),
        ({"routes": [{"names": ["a.test"], "upstream_id": "gone"}]}, "routes.0.upstream_id"),
        ({"routes": [{"names": ["a.test", "~^x"], "upstream_id": "plain"}]}, "routes.0.names.1"),
        ({"routes": [{"names": ["a b"], "upstream_id": "plain"}]}, "routes.0.names.0"),
        ({"routes": [{"names": ["default"], "upstream_id": "plain"}]}, "routes.0.names.0"),
        ({"routes": [{"names": [".a.test", "A.test"], "upstream_id": "plain"}]}, "routes.0.names.1"),
        ({"protocol": "udp", "send_proxy_protocol": True}, "send_proxy_protocol"),
        (
            {"protocol": "udp", "routes": [{"names": ["a.test"], "upstream_id": "plain"}]},
            "routes",
        ),
        ({"responses": 1}, "responses"),
        ({"protocol": "udp", "responses": -1}, "responses"),
        ({"rules": [{"action": "deny", "network": "10.0.0.1/8"}]}, "rules.0.network"),
        ({"limits": {"connections": 0}}, "limits.connections"),
        ({"limits": {"download_bytes_per_second": 0}}, "limits.download_bytes_per_second"),
        ({"timeouts": {"idle": 0}}, "timeouts.idle"),
        ({"timeouts": {"connect": 86_401}}, "timeouts.connect"),
        ({"target_agents": {"type": "agents", "agent_ids": ["nobody"]}}, "target_agents.agent_ids.0"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(given: dict[str, Any], field: str) -> None:
    made = stream(**{name: value for name, value in given.items() if value is not msgspec.UNSET})
    made = msgspec.structs.replace(
        made, **{name: value for name, value in given.items() if value is msgspec.UNSET}
    )
    assert [problem.field for problem in stream_problems(made, around())] == [field]


def test_what_no_nginx_may_get_is_not_sent_whatever_was_stored() -> None:
    assert part_fault(PartSpec(id="s", stream=stream())) == ""
    bad = stream(routes=[{"names": ["a.test;"], "upstream_id": "plain"}])
    assert part_fault(PartSpec(id="s", stream=bad)).startswith("routes.0.names.0: ")


def test_ports_are_those_that_the_settings_list() -> None:
    told = next(stream_problems(stream(listen_port=53), around()))
    assert told.message.startswith("Port 53 is not one that streams may have here: 443, 1024-65535.")
    assert ProxySettings(stream_ports=("53", "9000-9100")).stream_ports == ("53", "9000-9100")
    for bad in ("x", "0", "5-4", "1-70000", "-5"):
        with pytest.raises(SettingsError, match=r"proxies\.stream_ports"):
            ProxySettings(stream_ports=(bad,))


def test_a_port_is_served_by_one_stream_or_host_and_the_refusal_names_it() -> None:
    there = around(
        streams={"s1": stream(name="db")},
        virtual_hosts={
            "h1": host(),
            "h2": host(name="secure", listen_port=8443, ssl_enabled=True, http3_enabled=True),
        },
    )
    clashes = [(one.field, one.message) for one in stream_clashes(stream(name="other"), there)]
    assert clashes == [("listen_port", "TCP port 5432 is served by stream 'db' (s1)")]
    clashes = [(one.field, one.message) for one in stream_clashes(stream(listen_port=8080), there)]
    assert clashes == [("listen_port", "TCP port 8080 is served by virtual host 'web' (h1)")]
    datagrams = [one.message for one in stream_clashes(stream(protocol="udp", listen_port=8443), there)]
    assert datagrams == ["UDP port 8443 is served by virtual host 'secure' (h2)"]
    assert list(stream_clashes(stream(protocol="udp", listen_port=8080), there)) == []
    elsewhere = stream(target_agents={"type": "selector", "label_selector": "zone=b"})
    there = around(
        streams={"s1": stream(target_agents={"type": "selector", "label_selector": "zone=a"})},
    )
    assert list(stream_clashes(elsewhere, there)) == []


def test_a_host_is_refused_on_the_port_of_a_stream() -> None:
    there = around(streams={"s1": stream(name="db", listen_port=8080)})
    with pytest.raises(ConflictBlocker) as refused:
        validation.accept_host(host(), there)
    assert refused.value.problems[0].message == "TCP port 8080 is served by stream 'db' (s1)"
    secure = host(listen_port=443, ssl_enabled=True, ssl_certificate_id="c", tls={"force_https": True})
    with pytest.raises(ConflictBlocker) as refused:
        validation.accept_host(secure, around(streams={"s1": stream(listen_port=80)}, certificates=("c",)))
    assert refused.value.problems[0].field == "tls.force_https"


def test_an_upstream_of_a_stream_stays_one_that_streams_can_have() -> None:
    there = around(streams={"s1": stream(name="db")})
    validation.accept_upstream(upstream("plain"), there, identity="plain")
    validation.accept_upstream(upstream("x", **GROUPS["sticky"]), there, identity="other")
    with pytest.raises(Rejected) as refused:
        validation.accept_upstream(upstream("plain", **GROUPS["sticky"]), there, identity="plain")
    assert refused.value.problems[0].field == "balancing"
    assert "'db'" in refused.value.problems[0].message


def test_labels_that_bring_two_listeners_to_one_port_are_refused() -> None:
    selected = {"type": "selector", "label_selector": "zone=a"}
    streams = {"s1": stream(name="one"), "s2": stream(name="two", target_agents=selected)}
    assert list(labelled_clashes("a1", {"zone": "b"}, {}, streams)) == []
    told = [one.message for one in labelled_clashes("a1", {"zone": "a"}, {}, streams)]
    assert told == ["tcp port 5432 would be served by 'one' and 'two' at once"]
    told = [one.message for one in labelled_clashes("a1", {}, {"h": host(listen_port=5432)}, streams)]
    assert told == ["tcp port 5432 would be served by 'web' and 'one' at once"]


def test_agents_say_what_their_nginx_cannot_do_and_validation_says_it_first() -> None:
    able = ("typed-options", "streams")
    routed = stream(routes=[{"names": ["a.test"], "upstream_id": "plain"}])

    def told(spec: StreamSpec, *capabilities: str) -> list[tuple[str, str]]:
        there = around(agents={"a1": {}}, capabilities={"a1": capabilities})
        return [(one.field, one.message) for one in stream_problems(spec, there)]

    assert told(stream(), *able) == []
    assert told(stream(), *able, "lacks-stream-sni") == []
    assert [field for field, _ in told(routed, *able, "lacks-stream-sni")] == ["routes"]
    ((field, words),) = told(routed, "typed-options", "lacks-stream", "lacks-stream-sni")
    assert (field, "Agent a1 has an NGINX without the stream module" in words) == ("protocol", True)
    ((field, words),) = told(stream(), "typed-options")
    assert (field, "update its program" in words) == ("protocol", True)


def test_the_module_is_there_where_its_file_is(tmp_path: Any) -> None:
    said = (
        "nginx version: nginx/1.22.1\nconfigure arguments: "
        f"--modules-path={tmp_path} --with-stream_ssl_preread_module --with-stream=dynamic"
    )
    without = Binary.parse(tmp_path / "nginx", said)
    assert (without.stream, without.stream_module) == (False, None)
    assert {"lacks-stream", "lacks-stream-sni"} <= set(without.capabilities())
    (tmp_path / "ngx_stream_module.so").touch()
    there = Binary.parse(tmp_path / "nginx", said)
    assert (there.stream, there.stream_sni, there.stream_module) == (
        True,
        True,
        tmp_path / "ngx_stream_module.so",
    )
    assert "streams" in there.capabilities()
    built_in = Binary.parse(tmp_path / "nginx", said.replace("=dynamic", ""))
    assert (built_in.stream, built_in.stream_module) == (True, None)


def test_an_agent_gets_the_streams_that_target_it_if_it_can_serve_them() -> None:
    draft = configuration.NextVersion.after(None)
    empty = draft.content_digest()
    draft.put("upstreams", PartSpec(id="plain", upstream=upstream("plain")))
    draft.put("streams", PartSpec(id="s1", stream=stream(name="db")))
    draft.put(
        "streams",
        PartSpec(id="s2", stream=stream(name="b", target_agents={"type": "agents", "agent_ids": ["other"]})),
    )
    version = draft.finish(1)
    assert version.digest != empty

    def share(*capabilities: str) -> configuration.AgentConfig:
        return configuration.for_agent(
            version, "a1", {}, version=lambda _: None, part=draft.parts.get, capabilities=capabilities
        )

    able, unable = share("streams"), share("typed-options")
    assert (list(able.streams), list(able.upstreams), able.refused) == (["s1"], ["plain"], {})
    assert (unable.streams, unable.upstreams, list(unable.refused)) == ({}, {}, ["stream/s1"])
    differences = list(
        configuration.differences(configuration.NextVersion.after(None).finish(0), version, draft.parts.get)
    )
    assert {(one.section, one.id, one.change) for one in differences} >= {("streams", "s1", "added")}
