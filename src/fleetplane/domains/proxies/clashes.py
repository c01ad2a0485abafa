"""Who is meant by a virtual host, and which of them cannot be served together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fleetplane.domains.proxies import selectors
from fleetplane.domains.proxies.kinds import VirtualHostSpec
from fleetplane.domains.proxies.values import AllAgents, NamedAgents, SelectedAgents, TargetAgents
from fleetplane.web.problems import Code, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The workspace as a change finds it, without the object that is changed."""

    virtual_hosts: Mapping[str, VirtualHostSpec]
    upstreams: Collection[str]
    certificates: Collection[str]
    agents: Mapping[str, Mapping[str, str]]
    """From id to labels."""


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
    """Whether one agent could be told to serve both: now, or after its labels change."""
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


def host_clashes(spec: VirtualHostSpec, around: Surroundings) -> Iterator[Problem]:
    """NGINX only warns about a name that is served twice, and lets one of the two win."""
    names = served_names(spec.server_name)
    for identity, other in around.virtual_hosts.items():
        if other.listen_port != spec.listen_port:
            continue
        shared = sorted(names & served_names(other.server_name))
        mixed = other.ssl_enabled != spec.ssl_enabled
        if not (shared or mixed) or not may_meet(spec.target_agents, other.target_agents, around.agents):
            continue
        if shared:
            yield Problem(
                field="server_name",
                message=f"{shared[0]} on port {spec.listen_port} is served by virtual host "
                f"{other.name!r} ({identity})",
                code=Code.NOT_UNIQUE,
            )
        else:
            yield Problem(
                field="ssl_enabled",
                message=f"Port {spec.listen_port} is used {'with' if other.ssl_enabled else 'without'} TLS "
                f"by virtual host {other.name!r} ({identity})",
                code=Code.INCOMPATIBLE,
            )


def label_clashes(
    agent: str, labels: Mapping[str, str], hosts: Mapping[str, VirtualHostSpec]
) -> Iterator[Problem]:
    """Hosts that an agent with these labels would serve, and cannot serve together."""
    taken: dict[tuple[str, int], VirtualHostSpec] = {}
    ports: dict[int, VirtualHostSpec] = {}
    for spec in hosts.values():
        if not targets(spec.target_agents, agent, labels):
            continue
        first = ports.setdefault(spec.listen_port, spec)
        if first.ssl_enabled != spec.ssl_enabled:
            yield _together(f"port {spec.listen_port} would be with and without TLS for", first, spec)
        for name in sorted(served_names(spec.server_name)):
            other = taken.setdefault((name, spec.listen_port), spec)
            if other is not spec:
                yield _together(f"{name} on port {spec.listen_port} would come from", other, spec)


def _together(what: str, one: VirtualHostSpec, other: VirtualHostSpec) -> Problem:
    return Problem(
        field="labels", message=f"{what} {one.name!r} and {other.name!r} at once", code=Code.INCOMPATIBLE
    )
