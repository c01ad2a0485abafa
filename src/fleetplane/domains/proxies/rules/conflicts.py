"""Who is meant by a virtual host, and which of them cannot be served together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import AllAgents, NamedAgents, SelectedAgents, TargetAgents
from fleetplane.domains.proxies.rules.ports import ANY_PORT, PortRanges
from fleetplane.fleet import selectors
from fleetplane.web.rest.problems import Code, Problem

PLAIN_PORT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSurroundings:
    """The workspace as a change finds it, without the object that is changed."""

    virtual_hosts: Mapping[str, VirtualHostSpec]
    upstreams: Collection[str]
    certificates: Collection[str]
    agents: Mapping[str, Mapping[str, str]]
    """From id to labels."""
    access_lists: Collection[str] = ()
    capabilities: Mapping[str, Collection[str]] = field(default_factory=dict)
    """From id to what the agent said it can do; agents that never registered are not here."""
    streams: Mapping[str, StreamSpec] = field(default_factory=dict)
    upstream_specs: Mapping[str, UpstreamSpec] = field(default_factory=dict)
    """Of `upstreams`, where it is known what they are."""
    stream_ports: PortRanges = ANY_PORT
    """Those that streams may listen on."""


def targets(target: TargetAgents, agent: str, labels: Mapping[str, str]) -> bool:
    """Whether a virtual host is for this agent."""
    match target:
        case AllAgents():
            return True
        case SelectedAgents(label_selector=text):
            return selectors.parse(text).matches(labels)
        case NamedAgents(agent_ids=ids):
            return agent in ids


def may_meet(one: TargetAgents, other: TargetAgents, agents: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether one agent could have to serve both, now or after its labels change."""
    match one, other:
        case (AllAgents(), _) | (_, AllAgents()):
            return True
        case SelectedAgents(label_selector=first), SelectedAgents(label_selector=second):
            return selectors.parse(first).may_meet(selectors.parse(second))
        case NamedAgents(agent_ids=first_ids), NamedAgents(agent_ids=second_ids):
            return not set(first_ids).isdisjoint(second_ids)
        case (NamedAgents(agent_ids=ids), SelectedAgents(label_selector=text)) | (
            SelectedAgents(label_selector=text),
            NamedAgents(agent_ids=ids),
        ):
            # Labels of named agents can change; `label_clashes` looks again when they do.
            selector = selectors.parse(text)
            return any(selector.matches(agents[agent]) for agent in ids if agent in agents)
    raise AssertionError(f"no such targets: {one!r}, {other!r}")


def served_names(server_name: str) -> set[str]:
    """Every name that a list of names claims: `.example.com` is two of them to NGINX."""
    names: set[str] = set()
    for name in server_name.lower().split():
        names |= {name[1:], f"*{name}"} if name.startswith(".") else {name}
    return names


def served_ports(spec: VirtualHostSpec) -> tuple[tuple[int, bool], ...]:
    """Every port that a host is served on, and whether with TLS."""
    own = (spec.listen_port, spec.ssl_enabled)
    return (own, (PLAIN_PORT, False)) if spec.tls and spec.tls.force_https else (own,)


def _announced(spec: VirtualHostSpec) -> bool:
    """Whether connections begin with a PROXY protocol header."""
    return bool(spec.listening and spec.listening.proxy_protocol_from)


def _only_newest(spec: VirtualHostSpec) -> bool:
    return bool(spec.tls and spec.tls.profile == "modern")


class HostNeighbours:
    """Hosts by port, name and transport, so that a host is compared only with those it could clash with."""

    def __init__(self, hosts: Mapping[str, VirtualHostSpec]) -> None:
        self._hosts = hosts
        self._by_name: dict[tuple[int, str], list[str]] = {}
        self._by_transport: dict[tuple[int, bool, bool, bool], list[str]] = {}
        for identity, spec in hosts.items():
            for port, secure in served_ports(spec):
                self._by_transport.setdefault((port, *_transport(spec, secure)), []).append(identity)
                for name in served_names(spec.server_name):
                    self._by_name.setdefault((port, name), []).append(identity)

    def of(self, identity: str, spec: VirtualHostSpec) -> dict[str, VirtualHostSpec]:
        """Those on the same port that serve one of its names, or listen in another way than it does."""
        near: dict[str, None] = {}
        for port, secure in served_ports(spec):
            own = (port, *_transport(spec, secure))
            for other in _TRANSPORTS:
                if (port, *other) != own:
                    near.update(dict.fromkeys(self._by_transport.get((port, *other), ())))
            for name in served_names(spec.server_name):
                near.update(dict.fromkeys(self._by_name.get((port, name), ())))
        near.pop(identity, None)
        return {other: self._hosts[other] for other in near}


def _transport(spec: VirtualHostSpec, secure: bool) -> tuple[bool, bool, bool]:
    """How connections to a port begin, which is the same for every host on it."""
    return secure, _announced(spec), secure and _only_newest(spec)


_TRANSPORTS = tuple((one, two, three) for one, two, three in product((False, True), repeat=3))


def host_clashes(spec: VirtualHostSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """NGINX only warns about a name that is served twice, and lets one of the two win."""
    names = served_names(spec.server_name)
    for identity, other in around.virtual_hosts.items():
        taken = dict(served_ports(other))
        ports = [(port, secure) for port, secure in served_ports(spec) if port in taken]
        if not ports:
            continue
        shared = sorted(names & served_names(other.server_name))
        for port, secure in ports:
            mixed = _transport(spec, secure) != _transport(other, taken[port])
            if not (shared or mixed) or not may_meet(spec.target_agents, other.target_agents, around.agents):
                continue
            told = f"virtual host {other.name!r} ({identity})"
            if shared:
                yield Problem(
                    field="server_name",
                    message=f"{shared[0]} on port {port} is served by {told}",
                    code=Code.NOT_UNIQUE,
                )
            else:
                yield _mixed(spec, other, port, secure, taken[port], told)


def _mixed(
    spec: VirtualHostSpec, other: VirtualHostSpec, port: int, secure: bool, taken: bool, told: str
) -> Problem:
    """The option in which two hosts on one port differ although they must not."""
    if secure != taken:
        field = "ssl_enabled" if port == spec.listen_port else "tls.force_https"
        words = f"Port {port} is used {'with' if taken else 'without'} TLS by {told}"
    elif _announced(spec) != _announced(other):
        field = "listening.proxy_protocol_from"
        how = "with" if _announced(other) else "without"
        words = f"Port {port} is used {how} the PROXY protocol by {told}"
    else:
        field = "tls.profile"
        how = "with" if _only_newest(other) else "without"
        words = (
            f"Port {port} is used {how} the profile modern by {told}: "
            "the version of TLS is agreed before the name of the host is known"
        )
    return Problem(field=field, message=words, code=Code.INCOMPATIBLE)


def label_clashes(
    agent: str, labels: Mapping[str, str], hosts: Mapping[str, VirtualHostSpec]
) -> Iterator[Problem]:
    """Hosts that an agent with these labels would serve, and cannot serve together."""
    taken: dict[tuple[str, int], VirtualHostSpec] = {}
    ports: dict[int, tuple[VirtualHostSpec, bool]] = {}
    for spec in hosts.values():
        if not targets(spec.target_agents, agent, labels):
            continue
        for port, secure in served_ports(spec):
            first, first_secure = ports.setdefault(port, (spec, secure))
            if first_secure != secure:
                yield _together(f"port {port} would be with and without TLS for", first, spec)
            elif _transport(first, secure) != _transport(spec, secure):
                yield _together(f"port {port} would be opened in two ways for", first, spec)
            for name in sorted(served_names(spec.server_name)):
                other = taken.setdefault((name, port), spec)
                if other is not spec:
                    yield _together(f"{name} on port {port} would come from", other, spec)


def _together(what: str, one: VirtualHostSpec, other: VirtualHostSpec) -> Problem:
    return Problem(
        field="labels", message=f"{what} {one.name!r} and {other.name!r} at once", code=Code.INCOMPATIBLE
    )
