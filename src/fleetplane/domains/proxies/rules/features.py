"""Which agents cannot do what a typed option asks for. Pure.

An agent says what its NGINX lacks when it registers. An option that one of a host's agents cannot serve is
refused before it is saved; an agent that comes later does without what it can go without, and is not sent
a host whose options it does not know at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fleetplane.domains.proxies.kinds.records import UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.nginx.site import LACKS, TYPED_OPTIONS
from fleetplane.domains.proxies.rules import proxying
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings, targets
from fleetplane.domains.proxies.typed_options import HOST_GROUPS, LOCATION_GROUPS, UPSTREAM_GROUPS
from fleetplane.web.rest.problems import Code, Problem

AGENTS_NAMED = 5
"""Agents that one problem names."""


def has_options(spec: VirtualHostSpec) -> bool:
    """Whether a host says something that programs from before these options do not know."""
    return bool(_first_field(spec))


def needed(spec: VirtualHostSpec) -> Iterator[tuple[str, str]]:
    """Features that agents need for a host, each with the field that asks for it."""
    yield from proxying.host_needs(spec)
    places = [("", spec.access, spec.content)]
    places += [(f"locations.{at}.", one.access, one.content) for at, one in enumerate(spec.locations)]
    for place, access, content in places:
        if access and access.forward_auth:
            yield "auth-request", f"{place}access.forward_auth"
        if content and content.compression and content.compression.brotli:
            yield "brotli", f"{place}content.compression.brotli"


def feature_problems(spec: VirtualHostSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    if not has_options(spec):
        return
    serving = {
        agent: around.capabilities[agent]
        for agent, labels in around.agents.items()
        if agent in around.capabilities and targets(spec.target_agents, agent, labels)
    }
    if unable := [agent for agent, known in serving.items() if TYPED_OPTIONS not in known]:
        yield unable_problem(_first_field(spec), "does not know these options: update its program", unable)
    for feature, field in needed(spec):
        if unable := [agent for agent, known in serving.items() if f"{LACKS}{feature}" in known]:
            yield unable_problem(field, f"has an NGINX without {feature}", unable)


def upstream_feature_problems(spec: UpstreamSpec, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """An upstream has no agents of its own: what none of the workspace's can do is told at once."""
    if not upstream_has_options(spec):
        return
    old = [agent for agent, known in around.capabilities.items() if TYPED_OPTIONS not in known]
    if old:
        yield unable_problem(_first_of(spec), "does not know these options: update its program", old)
    for index, server in enumerate(spec.servers):
        lacking = [agent for agent, known in around.capabilities.items() if f"{LACKS}slow-start" in known]
        if server.slow_start and lacking:
            yield unable_problem(f"servers.{index}.slow_start", "has an NGINX without slow-start", lacking)


def upstream_has_options(spec: UpstreamSpec) -> bool:
    return bool(_first_of(spec))


def _first_of(spec: UpstreamSpec) -> str:
    for name in sorted(UPSTREAM_GROUPS):
        if getattr(spec, name):
            return name
    for index, server in enumerate(spec.servers):
        for name in ("draining", "slow_start", "max_connections"):
            if getattr(server, name):
                return f"servers.{index}.{name}"
    return ""


def _first_field(spec: VirtualHostSpec) -> str:
    """The first option that a host has; empty if it has none."""
    for name in sorted(HOST_GROUPS):
        if getattr(spec, name):
            return name
    for index, location in enumerate(spec.locations):
        for name in sorted(LOCATION_GROUPS):
            if getattr(location, name):
                return f"locations.{index}.{name}"
    return ""


def unable_problem(field: str, words: str, agents: Collection[str]) -> Problem:
    """What some agents cannot do, with their names."""
    named = sorted(agents)
    more = f" and {len(named) - AGENTS_NAMED} more" if len(named) > AGENTS_NAMED else ""
    return Problem(
        field=field,
        message=f"Agent {', '.join(named[:AGENTS_NAMED])}{more} {words}",
        code=Code.INCOMPATIBLE,
    )
