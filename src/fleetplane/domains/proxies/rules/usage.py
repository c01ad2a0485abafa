"""Which hosts, upstreams and agents have what of a certificate. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.rules.configuration import authorities_of, upstreams_of
from fleetplane.domains.proxies.rules.conflicts import targets


class Named(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str


class CertificateUse(msgspec.Struct, frozen=True, kw_only=True):
    presented_by: tuple[Named, ...]
    """Virtual hosts that show it to clients."""
    trusted_by: tuple[Named, ...]
    """Virtual hosts that check clients against it."""
    upstreams: tuple[Named, ...]
    """Upstreams whose servers are checked against it, or shown it."""
    agent_ids: tuple[str, ...]
    """Agents that get its private key: those that serve one of its hosts, and no others."""


def certificate_use(
    identity: str,
    hosts: Mapping[str, VirtualHostSpec],
    upstreams: Mapping[str, UpstreamSpec],
    agents: Mapping[str, Mapping[str, str]],
) -> CertificateUse:
    """`agents` are the labels of each, by id."""
    presenting = {
        name: host for name, host in hosts.items() if host.ssl_enabled and host.ssl_certificate_id == identity
    }
    showing = {
        name: one
        for name, one in upstreams.items()
        if one.tls and identity in (one.tls.authority_id, one.tls.client_certificate_id)
    }
    keyed = {name for name, one in showing.items() if one.tls and one.tls.client_certificate_id == identity}
    serving = [
        *presenting.values(),
        *(
            host
            for host in hosts.values()
            if any(keyed & upstreams_of(location) for location in host.locations)
        ),
    ]
    return CertificateUse(
        presented_by=_named(presenting),
        trusted_by=_named({name: one for name, one in hosts.items() if identity in authorities_of(one)}),
        upstreams=_named(showing),
        agent_ids=tuple(
            sorted(
                agent
                for agent, labels in agents.items()
                if any(targets(host.target_agents, agent, labels) for host in serving)
            )
        ),
    )


def _named(many: Mapping[str, VirtualHostSpec] | Mapping[str, UpstreamSpec]) -> tuple[Named, ...]:
    return tuple(Named(id=identity, name=many[identity].name) for identity in sorted(many))
