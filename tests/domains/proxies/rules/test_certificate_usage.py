"""Which hosts use a certificate, and that its key goes to the agents that serve them and to no others."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetplane.domains.proxies.kinds.records import (
    CertificatePart,
    PartSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.rules import configuration
from fleetplane.domains.proxies.rules.configuration import Named, certificate_use


def host(name: str, **given: Any) -> VirtualHostSpec:
    base = {"name": name, "server_name": f"{name}.test", "listen_port": 443}
    return msgspec.convert({**base, **given}, VirtualHostSpec)


def zone(name: str) -> dict[str, str]:
    return {"type": "selector", "label_selector": f"zone={name}"}


SECURE = {"ssl_enabled": True, "ssl_certificate_id": "c1"}
CLIENTS = {"client_certificates": {"authority_id": "c1"}}
HOSTS = {
    "h1": host("shop", **SECURE, target_agents=zone("a")),
    "h2": host("api", ssl_enabled=True, ssl_certificate_id="c2", tls=CLIENTS, target_agents=zone("b")),
    "h3": host("in", listen_port=80, locations=[{"path": "/", "upstream_id": "u1"}], target_agents=zone("c")),
    "h4": host("off", listen_port=81, ssl_certificate_id="c1", target_agents=zone("d")),
}
UPSTREAMS = {
    "u1": msgspec.convert(
        {
            "name": "inner",
            "algorithm": "round_robin",
            "servers": [{"address": "a:1"}],
            "protocol": "https",
            "tls": {"client_certificate_id": "c1"},
        },
        UpstreamSpec,
    )
}
AGENTS = {name: {"zone": name} for name in ("a", "b", "c", "d")}


def test_users_of_a_certificate_are_named() -> None:
    used = certificate_use("c1", HOSTS, UPSTREAMS, AGENTS)
    assert used.presented_by == (Named(id="h1", name="shop"),)
    assert used.trusted_by == (Named(id="h2", name="api"),)
    assert used.upstreams == (Named(id="u1", name="inner"),)
    assert used.agent_ids == ("a", "c")
    nobody = certificate_use("c9", HOSTS, UPSTREAMS, AGENTS)
    assert (nobody.presented_by, nobody.trusted_by, nobody.upstreams, nobody.agent_ids) == ((), (), (), ())


def test_a_key_goes_to_the_agents_that_are_named_and_to_no_others() -> None:
    draft = configuration.NextVersion.after(None)
    for identity, spec in HOSTS.items():
        draft.put("virtual_hosts", PartSpec(id=identity, virtual_host=spec))
    for identity, group in UPSTREAMS.items():
        draft.put("upstreams", PartSpec(id=identity, upstream=group))
    for identity in ("c1", "c2"):
        part = CertificatePart(domain="x.test", fingerprint="f", chain_pem="", expires_at_ns=1)
        draft.put("certificates", PartSpec(id=identity, certificate=part))
    version = draft.finish(1)
    having = [
        agent
        for agent, labels in AGENTS.items()
        if "c1"
        in configuration.for_agent(
            version, agent, labels, version=lambda _: None, part=draft.parts.get
        ).certificates
    ]
    assert tuple(having) == certificate_use("c1", HOSTS, UPSTREAMS, AGENTS).agent_ids
