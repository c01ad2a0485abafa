"""What a workspace serves at one version, and what one agent gets of it. Pure.

A version is a table of contents: for each object the digest of its content. The contents lie
beside it as parts, each once, however many versions mention it. What one agent gets is worked
out from a version, its parts and the agent's labels, the same by every server at every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetplane.domains.proxies import clashes
from fleetplane.domains.proxies.kinds import (
    Agent,
    CertificatePart,
    CertificateSpec,
    CertificateStatus,
    ConfigVersionSpec,
    PartSpec,
    SettingsSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.kernel.errors import IntegrityError

PartLookup = Callable[[str], PartSpec | None]
"""From a part's name to the part."""
Section = Literal["virtual_hosts", "upstreams", "certificates"]
SECTIONS: tuple[Section, ...] = ("virtual_hosts", "upstreams", "certificates")


def digest(content: object) -> str:
    """SHA-256 of a value in its one canonical form."""
    return hashlib.sha256(msgspec.msgpack.encode(content, order="deterministic")).hexdigest()


def labels_of(agent: Agent) -> dict[str, str]:
    """What an agent is selected by: what it reports, and over it what its operators say."""
    reported = agent.status.labels if agent.status is not None else {}
    return {**reported, **agent.spec.labels}


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
        )

    def put(self, section: Section, part: PartSpec) -> None:
        getattr(self, section)[part.id] = self._add(part)

    def remove(self, section: Section, identity: str) -> None:
        getattr(self, section).pop(identity, None)

    def put_settings(self, part: PartSpec) -> None:
        self.settings = self._add(part)

    def _add(self, part: PartSpec) -> str:
        name = digest(part)
        self.parts[name] = part
        return name

    def content_digest(self) -> str:
        return digest((self.virtual_hosts, self.upstreams, self.certificates, self.settings, self.pins))

    def finish(self, version: int, **about: Any) -> ConfigVersionSpec:
        return ConfigVersionSpec(
            version=version,
            digest=self.content_digest(),
            virtual_hosts=self.virtual_hosts,
            upstreams=self.upstreams,
            certificates=self.certificates,
            settings=self.settings,
            pins=self.pins,
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


def for_agent(
    newest: ConfigVersionSpec,
    agent: str,
    labels: Mapping[str, str],
    *,
    version: Callable[[int], ConfigVersionSpec | None],
    part: PartLookup,
) -> AgentConfig:
    """An agent's share of the newest version, or of the one that it is pinned to.

    Only the hosts that target it, only the upstreams and certificates that those mention. An
    agent that nothing targets gets an empty configuration, not none.
    """
    pinned = newest.pins.get(agent)
    content = newest if pinned is None else version(pinned) or newest
    hosts: dict[str, VirtualHostSpec] = {}
    withheld: list[str] = []
    for identity, name in sorted(content.virtual_hosts.items()):
        host = _known(part, name).virtual_host
        assert host is not None
        if not clashes.targets(host.target_agents, agent, labels):
            continue
        if host.ssl_enabled and host.ssl_certificate_id not in content.certificates:
            withheld.append(identity)
        else:
            hosts[identity] = host
    upstreams = {
        identity: _known(part, content.upstreams[identity]).upstream
        for identity in sorted(_upstreams_of(hosts.values()))
    }
    used = {
        host.ssl_certificate_id for host in hosts.values() if host.ssl_enabled and host.ssl_certificate_id
    }
    certificates = {
        identity: _known(part, content.certificates[identity]).certificate for identity in sorted(used)
    }
    settings = _known(part, content.settings).settings if content.settings else None
    settings = settings or SettingsSpec()
    whole = digest((hosts, upstreams, certificates, settings))
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
    )


def _known(part: PartLookup, name: str) -> PartSpec:
    found = part(name)
    if found is None:
        raise IntegrityError(f"the configuration part {name} is missing")
    return found


def _upstreams_of(hosts: Iterable[VirtualHostSpec]) -> set[str]:
    return {location.upstream_id for host in hosts for location in host.locations if location.upstream_id}


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
    found = part.virtual_host or part.upstream or part.certificate or part.settings
    made: dict[str, object] = msgspec.to_builtins(found)
    return made
