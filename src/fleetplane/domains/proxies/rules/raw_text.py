"""When a change touches raw NGINX text, and so needs an administrator. Pure.

What an administrator set raw is a promise to them: an operator can neither remove it nor take the
requests away from it. Decided inside the transaction that writes, on what is there at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from fleetplane.domains.proxies.kinds.records import (
    CONFIG_PART,
    CONFIG_VERSION,
    SETTINGS,
    SETTINGS_NAME,
    VIRTUAL_HOST,
    ConfigVersionSpec,
    SettingsSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.values import Location, NamedAgents
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules.locations import place
from fleetplane.domains.proxies.typed_options import HOST_GROUPS
from fleetplane.kernel.store import Draft

RawRight = Callable[[Draft, str], None]
"""Refuses whoever may not touch raw text, as the draft knows them; is told why it matters."""


def decide_host(
    draft: Draft, right: RawRight, scope: str, identity: str, wanted: VirtualHostSpec | None
) -> None:
    """Before a host is written, or (None) deleted."""
    current = draft.get(VIRTUAL_HOST, scope, identity)
    if reason := host_reason(current.spec if current is not None else None, wanted):
        right(draft, reason)


def decide_names(draft: Draft, right: RawRight, scope: str, wanted: Mapping[str, VirtualHostSpec]) -> None:
    """Before hosts are written: one with a closer name takes requests from a wildcard with raw text."""
    before = {host.name: host.spec for host in draft.list(VIRTUAL_HOST, scope)}
    if reason := names_reason(before, wanted):
        right(draft, reason)


def decide_settings(draft: Draft, right: RawRight, scope: str, wanted: SettingsSpec) -> None:
    current = draft.get(SETTINGS, scope, SETTINGS_NAME)
    if wanted != (current.spec if current is not None else SettingsSpec()):
        right(draft, "it changes the workspace's raw settings")


def decide_version(draft: Draft, right: RawRight, scope: str, wanted: ConfigVersionSpec) -> None:
    """Before an agent is made to serve another version than the newest."""
    versions = draft.list(CONFIG_VERSION, scope)
    newest = _served(draft, scope, versions[-1].spec) if versions else {}
    before, after = newest, _served(draft, scope, wanted)
    for identity in before.keys() | after.keys():
        if reason := host_reason(before.get(identity), after.get(identity)):
            right(draft, reason)
    if reason := names_reason(before, after):
        right(draft, reason)
    settings = [_settings(draft, scope, one) for one in (versions[-1].spec, wanted)] if versions else []
    if len(set(map(repr, settings))) > 1:
        right(draft, "it changes the workspace's raw settings")


def decide_labels(
    draft: Draft, right: RawRight, scope: str, agent: str, labels: tuple[Mapping[str, str], Mapping[str, str]]
) -> None:
    """Before an agent's labels change: a host with raw text may lose the agent."""
    old, new = labels
    for host in draft.list(VIRTUAL_HOST, scope):
        target = host.spec.target_agents
        lost = clashes.targets(target, agent, old) and not clashes.targets(target, agent, new)
        if lost and host_reason(host.spec, None):
            right(draft, f"the agent would no longer serve {host.spec.name!r}, which has custom_directives")


def _served(draft: Draft, scope: str, version: ConfigVersionSpec) -> dict[str, VirtualHostSpec]:
    found = {}
    for identity, name in version.virtual_hosts.items():
        part = draft.get(CONFIG_PART, scope, name)
        if part is not None and part.spec.virtual_host is not None:
            found[identity] = part.spec.virtual_host
    return found


def _settings(draft: Draft, scope: str, version: ConfigVersionSpec) -> SettingsSpec:
    part = draft.get(CONFIG_PART, scope, version.settings) if version.settings else None
    return (part.spec.settings if part is not None else None) or SettingsSpec()


def host_reason(before: VirtualHostSpec | None, after: VirtualHostSpec | None) -> str:
    """Why a change of a host needs an administrator; empty if it does not."""
    old, new = _locations(before), _locations(after)
    own = before.custom_directives if before is not None else {}
    if own != (after.custom_directives if after is not None else {}):
        return "it changes custom_directives of the virtual host"
    raw = {path for each in (old, new) for path, location in each.items() if location.custom_directives}
    if before is not None and after is not None and (own or raw) and (moved := _moved(before, after)):
        return f"it changes {moved} of a virtual host with custom_directives"
    for path in raw:
        if old.get(path) != new.get(path):
            return f"it changes the location {path}, which has custom_directives"
    for path in raw:
        if taken := next(_takers(path, old, new), ""):
            return f"the location {taken} would take requests from {path}, which has custom_directives"
    return ""


def names_reason(before: Mapping[str, VirtualHostSpec], wanted: Mapping[str, VirtualHostSpec]) -> str:
    """Why hosts that are to be written need an administrator because of their names; empty if they do not.

    The host `_` is left out: it is for what nobody else serves, whatever is said in it.
    """
    raw: dict[tuple[int, str], list[str]] = {}
    for identity, spec in before.items():
        wild = [name[2:] for name in clashes.served_names(spec.server_name) if name.startswith("*.")]
        if wild and host_reason(spec, None):
            for parent, (port, _) in product(wild, clashes.served_ports(spec)):
                raw.setdefault((port, parent), []).append(identity)
    if not raw:
        return ""
    for identity, spec in wanted.items():
        for name, (port, _) in product(_new_names(before.get(identity), spec), clashes.served_ports(spec)):
            parent = name.removeprefix("*.").partition(".")[2]
            while parent:
                for other in raw.get((port, parent), ()):
                    if other != identity and _may_meet(spec, before[other]):
                        return f"{name} would take requests from *.{parent}, which has custom_directives"
                parent = parent.partition(".")[2]
    return ""


def _new_names(before: VirtualHostSpec | None, after: VirtualHostSpec) -> set[str]:
    """Names that a host has not served before, at its port and agents."""
    names = clashes.served_names(after.server_name)
    if before is None or clashes.served_ports(before) != clashes.served_ports(after):
        return names
    if before.target_agents != after.target_agents:
        return names
    return names - clashes.served_names(before.server_name)


def _may_meet(one: VirtualHostSpec, other: VirtualHostSpec) -> bool:
    """Whether an agent may serve both; labels can change, so only lists of agents keep hosts apart."""
    first, second = one.target_agents, other.target_agents
    if isinstance(first, NamedAgents) and isinstance(second, NamedAgents):
        return not set(first.agent_ids).isdisjoint(second.agent_ids)
    return True


def _moved(before: VirtualHostSpec, after: VirtualHostSpec) -> str:
    """The field that leaves names, ports or agents to another host, which would have no raw text, or that
    answers requests before the raw text is asked."""
    if not set(before.server_name.lower().split()) <= set(after.server_name.lower().split()):
        return "server_name"
    if before.listen_port != after.listen_port:
        return "listen_port"
    if before.target_agents != after.target_agents:
        return "target_agents"
    if before.ssl_enabled and not after.ssl_enabled:
        return "ssl_enabled"
    return next((one for one in sorted(HOST_GROUPS) if getattr(before, one) != getattr(after, one)), "")


def _locations(host: VirtualHostSpec | None) -> dict[str, Location]:
    return {" ".join(one.path.split()): one for one in host.locations} if host is not None else {}


def _takers(raw: str, old: Mapping[str, Location], new: Mapping[str, Location]) -> Iterator[str]:
    """Locations that answer, after the change, requests which the raw one would have answered before."""
    modifier, path = place(raw)
    if modifier == "=":
        return
    by_regex = modifier.startswith("~")
    before_it = set(_regexes_before(raw, old)) if by_regex else set()
    for other in new:
        if other in old and not (by_regex and other in set(_regexes_before(raw, new)) - before_it):
            continue
        other_modifier, other_path = place(other)
        if other_modifier.startswith("~"):
            if not raw.startswith("^~"):
                yield other
        elif by_regex:
            if other_modifier == "=" or other.startswith("^~"):
                yield other
        elif other_path.startswith(path):
            yield other


def _regexes_before(raw: str, locations: Mapping[str, Location]) -> Iterator[str]:
    for path in locations:
        if path == raw:
            return
        if path.startswith("~"):
            yield path
