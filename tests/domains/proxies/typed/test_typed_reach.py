"""Typed options are judged again where they are sent and where they are rendered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds.records import (
    AccessListSpec,
    CertificatePart,
    ConfigVersionSpec,
    PartSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.nginx.blocks import Unrenderable
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import Binary, Paths, Site
from fleetplane.domains.proxies.rules import configuration, reach
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.validation import host_problems
from fleetplane.domains.proxies.typed_options import Access, AccessRule
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

HOSTILE = "10.0.0.1 1; } } evil {"
SITE = Site(
    paths=Paths(state=Path("/s")),
    binary=Binary(path=Path("/n"), version=(1, 22, 1), modules=frozenset({"http_ssl", "http_auth_request"})),
)


def host(**given: Any) -> VirtualHostSpec:
    location = {"path": "/", "proxy_pass": "http://127.0.0.1:1", **given.pop("location", {})}
    body = {"name": "n", "server_name": "a.test", "listen_port": 80, "locations": [location], **given}
    return msgspec.convert(body, VirtualHostSpec)


@pytest.mark.parametrize(
    "given",
    [
        {"access": {"banned": [HOSTILE]}},
        {"access": {"rules": [{"action": "deny", "network": HOSTILE}]}},
        {"pages": {"maintenance": {"allowed": [HOSTILE]}}},
        {"content": {"cors": {"origins": [f'https://a"; {HOSTILE}']}}},
        {"listening": {"proxy_protocol_from": [HOSTILE]}},
        {"access": {"forward_auth": {"url": "http://unix:/run/docker.sock"}}},
        {"content": {"fallback": "/../../etc/passwd"}, "location": {"root": "/var/www"}},
        {"access": {"users": [{"name": "a:b", "password_hash": "x"}]}},
        {"access": {"users": [{"name": "a", "password": "never hashed"}]}},
        {"access": {"rate_limits": [{"rate": 1, "key": "$evil"}]}},
        {"access": {"list_ids": ["one that was not sent"]}},
    ],
)
def test_an_agent_writes_no_configuration_from_what_a_bad_server_sends(given: dict[str, Any]) -> None:
    if "root" in given.get("location", {}):
        given["location"] = {**given["location"], "content": given.pop("content")}
        spec = host(**given)
        spec = msgspec.structs.replace(
            spec, locations=(msgspec.structs.replace(spec.locations[0], proxy_pass=msgspec.UNSET),)
        )
    else:
        spec = host(**given)
    update = pb.ConfigUpdate.FromString(wire.candidate({"h1": spec}, {}, {}))
    with pytest.raises(Unrenderable):
        render(update, SITE, release="1-1")


def _served(**given: Any) -> dict[str, Any]:
    return {"proxy_pass": "http://127.0.0.1:1", **given}


@pytest.mark.parametrize(
    ("field", "location"),
    [
        ("root", lambda text: {"root": text}),
        ("index", lambda text: {"root": "/var/www", "index": text}),
        ("content.fallback", lambda text: {"root": "/var/www", "content": {"fallback": text}}),
        ("proxy_pass", lambda text: _served(proxy_pass=text)),
        ("access.forward_auth.url", lambda text: _served(access={"forward_auth": {"url": text}})),
        (
            "rewrite_rules.0.pattern",
            lambda text: _served(rewrite_rules=[{"pattern": text, "replacement": "/", "flag": "last"}]),
        ),
        (
            "rewrite_rules.0.replacement",
            lambda text: _served(rewrite_rules=[{"pattern": "^", "replacement": text, "flag": "last"}]),
        ),
        ("custom_headers.0.value", lambda text: _served(custom_headers=[{"name": "X", "value": text}])),
        ("respond.to", lambda text: {"respond": {"status": 302, "to": text}}),
    ],
)
def test_what_is_accepted_of_a_location_is_what_an_agent_writes(
    field: str, location: Callable[[str], dict[str, Any]]
) -> None:
    around = WorkspaceSurroundings(virtual_hosts={}, upstreams=(), certificates=(), agents={})
    accepted = 0
    for text in (
        "unix:/x",
        "/var/www/UNIX:x",
        "http://h/unix:/x",
        "^/unix:/(.*)$",
        "/var/www/a",
        "http://h/a",
    ):
        body = {"name": "n", "server_name": "a.test", "listen_port": 80}
        spec = msgspec.convert({**body, "locations": [{"path": "/", **location(text)}]}, VirtualHostSpec)
        if found := [one.field for one in host_problems(spec, around)]:
            assert found[0] == f"locations.0.{field}", text
        else:
            render(pb.ConfigUpdate.FromString(wire.candidate({"h1": spec}, {}, {})), SITE, release="1-1")
            accepted += 1
    assert accepted


def test_an_option_that_an_agent_does_not_know_keeps_the_host_out_of_service() -> None:
    update = pb.ConfigUpdate.FromString(wire.candidate({"h1": host()}, {}, {}))
    for text in ('{"new_lock": true}', '{"access": {"new_lock": true}}', "[]", "{"):
        update.virtual_hosts[0].options = text
        with pytest.raises(Unrenderable, match="does not know an option"):
            render(update, SITE, release="1-1")


def test_what_is_stored_is_judged_again_before_it_is_sent() -> None:
    good, bad = host(access={"banned": ["10.0.0.1"]}), host(access={"banned": [HOSTILE]})
    assert reach.part_fault(PartSpec(id="h", virtual_host=good)) == ""
    assert "access.banned.0" in reach.part_fault(PartSpec(id="h", virtual_host=bad))
    rule = AccessRule(action="deny", network=HOSTILE)
    listed = PartSpec(id="l", access_list=AccessListSpec(name="l", rules=(rule,)))
    assert "rules.0.network" in reach.part_fault(listed)


def test_an_authority_is_sent_without_its_key_and_only_to_who_serves_its_hosts() -> None:
    tls = {"client_certificates": {"authority_id": "ca"}}
    secure = host(ssl_enabled=True, ssl_certificate_id="leaf", listen_port=443, tls=tls)
    known = {
        "h": PartSpec(id="h", virtual_host=secure),
        "p": PartSpec(id="p", virtual_host=host()),
        "leaf": PartSpec(id="leaf", certificate=_certificate("leaf")),
        "ca": PartSpec(id="ca", certificate=_certificate("ca")),
    }

    def share(*hosts: str, capabilities: tuple[str, ...] = ("typed-options",)) -> configuration.AgentConfig:
        version = ConfigVersionSpec(
            version=1,
            digest="",
            virtual_hosts={one: one for one in hosts},
            certificates={"leaf": "leaf", "ca": "ca"},
        )
        return configuration.for_agent(
            version, "a1", {}, version=lambda _: None, part=known.get, capabilities=capabilities
        )

    config = share("h", "p")
    assert (set(config.certificates), set(config.authorities)) == ({"leaf"}, {"ca"})
    sent = wire.config_update(config, {"leaf": b"the key"})
    assert set(sent.certificates) == {"leaf"}
    assert "PEM of ca" in sent.virtual_hosts[0].options
    assert not share("p").authorities
    old = share("h", "p", capabilities=("http2",))
    assert set(old.virtual_hosts) == {"p"}, "a program that does not know the options is not sent the host"
    assert "update" in old.refused["virtual_host/h"]


def _certificate(name: str) -> CertificatePart:
    return CertificatePart(domain=name, fingerprint="", chain_pem=f"PEM of {name}", expires_at_ns=0)


def test_lists_come_before_what_the_host_says_itself() -> None:
    def rule(network: str) -> AccessRule:
        return AccessRule(action="allow", network=network)

    access = Access(list_ids=("l2", "l1"), rules=(rule("10.0.0.3"),))
    spec = msgspec.structs.replace(host(), access=access)
    lists = {f"l{one}": AccessListSpec(name="l", rules=(rule(f"10.0.0.{one}"),)) for one in (1, 2)}
    update = pb.ConfigUpdate.FromString(wire.candidate({"h1": spec}, {}, {}, {}, lists))
    text = render(update, SITE, release="1-1").files["conf.d/host-h1.conf"].content.decode()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("allow", "deny"))]
    assert lines == ["allow 10.0.0.2;", "allow 10.0.0.1;", "allow 10.0.0.3;", "deny all;"]
