"""What a workspace serves at one version, what one agent gets of it, and what uses a certificate. Pure.

A version is a table of contents: for each object the digest of its content. The contents lie
beside it as parts, each once, however many versions mention it. What one agent gets is worked
out from a version, its parts and the agent's labels, the same by every server at every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetplane.domains.proxies.kinds.records import (
    AccessListSpec,
    Agent,
    CertificatePart,
    CertificateSpec,
    CertificateStatus,
    ConfigVersionSpec,
    PartSpec,
    SettingsSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx.site import STREAMS, TYPED_OPTIONS
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules import reach
from fleetplane.domains.proxies.rules.conflicts import targets
from fleetplane.domains.proxies.rules.features import has_options, upstream_has_options
from fleetplane.domains.proxies.rules.streams import stream_upstreams
from fleetplane.kernel.errors import IntegrityError

PartLookup = Callable[[str], PartSpec | None]
"""From a part's name to the part."""
Section = Literal["virtual_hosts", "upstreams", "certificates", "access_lists", "streams"]
SECTIONS: tuple[Section, ...] = ("virtual_hosts", "upstreams", "certificates", "access_lists", "streams")


def digest(content: object) -> str:
    """SHA-256 of a value in its one canonical form."""
    return hashlib.sha256(msgspec.msgpack.encode(content, order="deterministic")).hexdigest()


def labels_of(agent: Agent) -> dict[str, str]:
    """What an agent reports, and over it what its operators say: shown, and used by lists, runs and rollouts.

    Hosts and streams are placed by operators' labels (`spec.labels`) alone: an agent could report any label,
    to be given private keys.
    """
    reported = agent.status.labels if agent.status is not None else {}
    return {**reported, **agent.spec.labels}


def placed_otherwise(agent: Agent, listening: Iterable[VirtualHostSpec | StreamSpec]) -> list[str]:
    """The names of hosts and streams that the agent's reported labels would place otherwise."""
    said, shown = agent.spec.labels, labels_of(agent)
    if said == shown:
        return []
    return [
        one.name
        for one in listening
        if clashes.targets(one.target_agents, agent.name, said)
        != clashes.targets(one.target_agents, agent.name, shown)
    ]


def certificate_part(identity: str, spec: CertificateSpec, status: CertificateStatus) -> PartSpec | None:
    """None while there is nothing to serve yet."""
    if not status.fingerprint or status.expires_at_ns is None:
        return None
    return PartSpec(
        id=identity,
        certificate=CertificatePart(
            domain=spec.domain,
            fingerprint=status.fingerprint,
            chain_pem=status.chain_pem,
            expires_at_ns=status.expires_at_ns,
        ),
    )


@dataclass(slots=True)
class NextVersion:
    """The next version while it is being put together."""

    virtual_hosts: dict[str, str]
    upstreams: dict[str, str]
    certificates: dict[str, str]
    settings: str
    pins: dict[str, int]
    access_lists: dict[str, str] = field(default_factory=dict)
    held: int | None = None
    streams: dict[str, str] = field(default_factory=dict)
    parts: dict[str, PartSpec] = field(default_factory=dict)
    """Those that this version may be the first to mention, by name."""

    @classmethod
    def after(cls, version: ConfigVersionSpec | None) -> NextVersion:
        if version is None:
            return cls({}, {}, {}, "", {})
        return cls(
            dict(version.virtual_hosts),
            dict(version.upstreams),
            dict(version.certificates),
            version.settings,
            dict(version.pins),
            dict(version.access_lists),
            version.held,
            dict(version.streams),
        )

    def put(self, section: Section, part: PartSpec) -> None:
        getattr(self, section)[part.id] = self._add(part)

    def remove(self, section: Section, identity: str) -> None:
        getattr(self, section).pop(identity, None)

    def put_settings(self, part: PartSpec) -> None:
        self.settings = self._add(part)

    def remove_settings(self) -> None:
        self.settings = ""

    def _add(self, part: PartSpec) -> str:
        name = digest(part)
        self.parts[name] = part
        return name

    def content_digest(self) -> str:
        # What was there before access lists, rollouts and streams keeps its digest.
        lists = (self.access_lists,) if self.access_lists else ()
        held = () if self.held is None else (self.held,)
        streams = (("streams", self.streams),) if self.streams else ()
        old = (self.virtual_hosts, self.upstreams, self.certificates, self.settings, self.pins)
        return digest((*old, *lists, *held, *streams))

    def finish(self, version: int, **about: Any) -> ConfigVersionSpec:
        return ConfigVersionSpec(
            version=version,
            digest=self.content_digest(),
            virtual_hosts=self.virtual_hosts,
            upstreams=self.upstreams,
            certificates=self.certificates,
            settings=self.settings,
            access_lists=self.access_lists,
            streams=self.streams,
            pins=self.pins,
            held=self.held,
            **about,
        )


def mentioned(version: ConfigVersionSpec) -> Iterator[str]:
    """The names of every part of a version."""
    for section in SECTIONS:
        yield from getattr(version, section).values()
    if version.settings:
        yield version.settings


# One agent's share.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What one agent is to serve. Objects by id, in the order of their ids."""

    version: int
    """The number it is sent under: that of the newest version, also for an agent that is rolled back."""
    content_version: int
    """The version whose content it is."""
    config_id: str
    """The beginning of `digest`: the same content has the same id."""
    digest: str
    virtual_hosts: Mapping[str, VirtualHostSpec]
    upstreams: Mapping[str, UpstreamSpec]
    certificates: Mapping[str, CertificatePart]
    """Without private keys; see `vault.Vault.private_key`."""
    settings: SettingsSpec
    withheld: tuple[str, ...] = ()
    """Virtual hosts that wait for their certificate to be issued."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What is not sent because it may not reach NGINX, such as `virtual_host/ID`, and why."""
    authorities: Mapping[str, CertificatePart] = field(default_factory=dict)
    """Certificates that clients are checked against; their keys are not sent."""
    access_lists: Mapping[str, AccessListSpec] = field(default_factory=dict)
    """Those that its hosts refer to."""
    streams: Mapping[str, StreamSpec] = field(default_factory=dict)


def for_agent(
    newest: ConfigVersionSpec,
    agent: str,
    labels: Mapping[str, str],
    *,
    version: Callable[[int], ConfigVersionSpec | None],
    part: PartLookup,
    capabilities: Collection[str] | None = None,
    fault: Callable[[str, PartSpec], str] = lambda _, part: reach.part_fault(part),
) -> AgentConfig:
    """An agent's share of the newest version, or of the one that it is pinned to or held at.

    Only the hosts that target it, only the upstreams and certificates that those mention. An
    agent that nothing targets gets an empty configuration, not none. `fault` tells why a part, given
    with its name, may not reach NGINX; `capabilities` are what the agent said it can do, if it ever did.
    """
    pinned = newest.pins.get(agent, newest.held)
    content = newest if pinned is None else version(pinned) or newest
    hosts: dict[str, VirtualHostSpec] = {}
    withheld: list[str] = []
    refused: dict[str, str] = {}
    for identity, name in sorted(content.virtual_hosts.items()):
        found = _known(part, name)
        host = found.virtual_host
        assert host is not None
        if not clashes.targets(host.target_agents, agent, labels):
            continue
        needed = [content.upstreams[one] for one in sorted(_upstreams_of([host]))]
        named = [content.access_lists[one] for one in sorted(lists_of(host)) if one in content.access_lists]
        faults = (fault(one, _known(part, one)) for one in (name, *needed, *named))
        if words := next(filter(None, faults), ""):
            refused[f"virtual_host/{identity}"] = words
        elif (
            capabilities is not None
            and TYPED_OPTIONS not in capabilities
            and (has_options(host) or any(_typed(_known(part, one)) for one in needed))
        ):
            refused[f"virtual_host/{identity}"] = "the agent's program does not know its options: update it"
        elif (
            not (_certificates_of(host) | _upstream_certificates(needed, part)) <= content.certificates.keys()
        ):
            withheld.append(identity)
        else:
            hosts[identity] = host
    streams, unserved = _streams_for(content, agent, labels, part, capabilities, fault)
    refused |= unserved
    mentioned = _upstreams_of(hosts.values()) | {
        one for stream in streams.values() for one in stream_upstreams(stream)
    }
    upstreams = {
        identity: _known(part, content.upstreams[identity]).upstream for identity in sorted(mentioned)
    }
    groups = [one for one in upstreams.values() if one is not None]
    used = {
        host.ssl_certificate_id for host in hosts.values() if host.ssl_enabled and host.ssl_certificate_id
    } | {one.tls.client_certificate_id for one in groups if one.tls and one.tls.client_certificate_id}
    certificates = {
        identity: _known(part, content.certificates[identity]).certificate for identity in sorted(used)
    }
    trusted = set().union(
        *(authorities_of(host) for host in hosts.values()), *(upstream_authorities(one) for one in groups)
    )
    authorities = {
        identity: known
        for identity in sorted(trusted)
        if (known := _known(part, content.certificates[identity]).certificate) is not None
    }
    lists = {
        identity: listed
        for identity in sorted(set().union(*(lists_of(host) for host in hosts.values())))
        if identity in content.access_lists
        and (listed := _known(part, content.access_lists[identity]).access_list)
    }
    settings = _known(part, content.settings).settings if content.settings else None
    settings, unsent = reach.allowed_settings(settings or SettingsSpec())
    refused |= {f"settings.{one}": words for one, words in unsent.items()}
    referred = [one for one in (authorities, lists, streams) if one]
    whole = digest((hosts, upstreams, certificates, settings, *referred))
    return AgentConfig(
        version=newest.version,
        content_version=content.version,
        config_id=f"config-{whole[:24]}",
        digest=whole,
        virtual_hosts=hosts,
        upstreams={identity: spec for identity, spec in upstreams.items() if spec is not None},
        certificates={identity: spec for identity, spec in certificates.items() if spec is not None},
        settings=settings,
        withheld=tuple(withheld),
        refused=refused,
        authorities=authorities,
        access_lists=lists,
        streams=streams,
    )


def _streams_for(
    content: ConfigVersionSpec,
    agent: str,
    labels: Mapping[str, str],
    part: PartLookup,
    capabilities: Collection[str] | None,
    fault: Callable[[str, PartSpec], str],
) -> tuple[dict[str, StreamSpec], dict[str, str]]:
    """The streams that an agent is sent, and why others that target it are not."""
    sent: dict[str, StreamSpec] = {}
    refused: dict[str, str] = {}
    for identity, name in sorted(content.streams.items()):
        found = _known(part, name)
        assert found.stream
        if not clashes.targets(found.stream.target_agents, agent, labels):
            continue
        needed = [content.upstreams[one] for one in sorted(stream_upstreams(found.stream))]
        faults = (fault(one, _known(part, one)) for one in (name, *needed))
        if words := next(filter(None, faults), ""):
            refused[f"stream/{identity}"] = words
        elif STREAMS not in (capabilities or ()):
            refused[f"stream/{identity}"] = "the agent has not said that it and its NGINX can serve streams"
        else:
            sent[identity] = found.stream
    return sent, refused


def _known(part: PartLookup, name: str) -> PartSpec:
    found = part(name)
    if found is None:
        raise IntegrityError(f"the configuration part {name} is missing")
    return found


def _upstreams_of(hosts: Iterable[VirtualHostSpec]) -> set[str]:
    return {one for host in hosts for location in host.locations for one in upstreams_of(location)}


def upstreams_of(location: Location) -> set[str]:
    """The upstreams that a location passes requests on to."""
    found = {location.upstream_id} if location.upstream_id else set()
    return found | {one.upstream_id for one in (location.canaries.to if location.canaries else ())}


def upstream_authorities(upstream: UpstreamSpec) -> set[str]:
    return {upstream.tls.authority_id} if upstream.tls and upstream.tls.authority_id else set()


def _upstream_certificates(names: Iterable[str], part: PartLookup) -> set[str]:
    found: set[str] = set()
    for name in names:
        upstream = _known(part, name).upstream
        if upstream is not None and upstream.tls:
            found |= upstream_authorities(upstream)
            found |= {upstream.tls.client_certificate_id} if upstream.tls.client_certificate_id else set()
    return found


def _typed(part: PartSpec) -> bool:
    return part.upstream is not None and upstream_has_options(part.upstream)


def _certificates_of(host: VirtualHostSpec) -> set[str | None]:
    """Those that a host cannot be served without."""
    return {*({host.ssl_certificate_id} if host.ssl_enabled else ()), *authorities_of(host)}


def lists_of(host: VirtualHostSpec) -> set[str]:
    """The access lists that a host and its locations refer to."""
    groups = (host.access, *(location.access for location in host.locations))
    return {identity for one in groups if one for identity in one.list_ids or ()}


def authorities_of(host: VirtualHostSpec) -> set[str]:
    """The certificates that a host checks others against."""
    clients = host.ssl_enabled and host.tls and host.tls.client_certificates
    return {clients.authority_id} if clients else set()


# Comparing.


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One object that two versions do not say the same about."""

    section: str
    id: str
    change: Literal["added", "removed", "changed"]
    fields: dict[str, tuple[Any, Any]] = {}
    """For a changed object: each differing field before and after."""


def differences(
    before: ConfigVersionSpec, after: ConfigVersionSpec, part: PartLookup
) -> Iterator[Difference]:
    for section in SECTIONS:
        old, new = getattr(before, section), getattr(after, section)
        for identity in sorted(old.keys() | new.keys()):
            if identity not in new:
                yield Difference(section=section, id=identity, change="removed")
            elif identity not in old:
                yield Difference(section=section, id=identity, change="added")
            elif old[identity] != new[identity]:
                fields = _fields(_known(part, old[identity]), _known(part, new[identity]))
                yield Difference(section=section, id=identity, change="changed", fields=fields)
    if before.settings != after.settings:
        empty = PartSpec(id="", settings=SettingsSpec())
        old_part = _known(part, before.settings) if before.settings else empty
        new_part = _known(part, after.settings) if after.settings else empty
        if fields := _fields(old_part, new_part):  # none set and none said are the same
            yield Difference(section="settings", id="global", change="changed", fields=fields)


def _fields(before: PartSpec, after: PartSpec) -> dict[str, tuple[object, object]]:
    old, new = (_object(part) for part in (before, after))
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _object(part: PartSpec) -> dict[str, object]:
    found = (
        part.virtual_host
        or part.upstream
        or part.certificate
        or part.settings
        or part.access_list
        or part.stream
    )
    made: dict[str, object] = msgspec.to_builtins(found)
    return made


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
