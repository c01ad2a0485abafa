"""Whether a call may be made on this machine: decided here, by what its owner wrote, before anything runs.

A context is a list of things denied and a list of capabilities. What is denied is denied; otherwise
the first capability that permits all of a call permits it; otherwise it is refused. A list that is
not there limits nothing, an empty one permits nothing.

Pure: paths come in already resolved, so that no link and no `..` leads out of what was allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from fleetplane.domains.edge.agent.tools.contract import Claims
from fleetplane.node import variables


class CapabilityRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    calls: int
    per_seconds: int


class PolicyCapability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tool_pattern: str
    """`*`, `fs.*` or `fs.read`."""
    path_allowlist: tuple[str, ...] | None = None
    command_allowlist: tuple[str, ...] | None = None
    subcommand_allowlist: tuple[str, ...] | None = None
    """The first argument of a permitted program."""
    env_allowlist: tuple[str, ...] | None = None
    """Variables a call may set, `NAME` or `PREFIX_*`. Not there: those of `variables.SAFE` where programs are
    not limited, else none. One that chooses code may never be set."""
    domain_allowlist: tuple[str, ...] | None = None
    max_response_size: int | None = None
    """Bytes of output that are sent on."""
    rate_limit: CapabilityRate | None = None
    max_concurrent: int | None = None


class SecurityContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str = ""
    capabilities: tuple[PolicyCapability, ...] = ()
    deny_list: tuple[str, ...] = ()
    metadata: dict[str, object] | None = None
    """Kept for others; means nothing here."""


OWNER, PUSHED = "owner", "pushed"
"""The origin of a context: the owner's limits what the server pushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    capability: PolicyCapability
    index: int
    """Which of the context's capabilities it is."""
    layer: str = OWNER
    """Whose context it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRefusal:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    tool: str
    claims: Claims
    paths: Mapping[str, Path]
    """The claimed paths, resolved."""


def decide(
    context: SecurityContext,
    request: PolicyRequest,
    *,
    roots: Mapping[str, Path],
    protected: Sequence[Path] = (),
    layer: str = OWNER,
) -> Permit | PolicyRefusal:
    """`roots`: the entries of path lists as they are written, and where each leads."""
    for pattern in context.deny_list:
        if matches(pattern, request.tool):
            return PolicyRefusal(reason=f"{request.tool} is denied by {pattern!r}")
    for path in request.paths.values():
        if any(path.is_relative_to(place) for place in protected):
            return PolicyRefusal(reason=f"{path} belongs to the daemon")
    reasons = []
    for index, capability in enumerate(context.capabilities):
        if not matches(capability.tool_pattern, request.tool):
            continue
        if why := _complaint(capability, request, roots):
            reasons.append(why)
        else:
            return Permit(capability=capability, index=index, layer=layer)
    return PolicyRefusal(
        reason="; ".join(dict.fromkeys(reasons))
        or f"{request.tool} is not among what {context.name!r} allows"
    )


def matches(pattern: str, tool: str) -> bool:
    if pattern == "*":
        return True
    if pattern.endswith(".*"):
        return tool.startswith(pattern[:-1])
    return tool == pattern


def _complaint(capability: PolicyCapability, request: PolicyRequest, roots: Mapping[str, Path]) -> str:
    claims = request.claims
    if (allowed := capability.path_allowlist) is not None:
        for path in request.paths.values():
            if not any(path.is_relative_to(roots.get(entry, PurePath(entry))) for entry in allowed):
                return f"{path} is outside of what may be touched"
    if claims.command is not None:
        return _program_complaint(capability, claims, claims.command)
    if (domains := capability.domain_allowlist) is not None:
        for domain in claims.domains:
            if not any(_within_domain(domain, entry) for entry in domains):
                return f"{domain} is not among the allowed domains"
    return ""


def _program_complaint(capability: PolicyCapability, claims: Claims, command: str) -> str:
    commands, subcommands = capability.command_allowlist, capability.subcommand_allowlist
    if commands is not None and command not in commands:
        return f"{command} is not among the allowed commands"
    if subcommands is not None and claims.subcommand not in subcommands:
        return f"{command} {claims.subcommand} is not among the allowed subcommands".replace("  ", " ")
    limited = commands is not None or subcommands is not None
    permitted = capability.env_allowlist
    if permitted is None:
        permitted = () if limited else variables.SAFE
    for name in claims.variables:
        if not variables.allowed(name, permitted):
            return f"the variable {name} may not be set"
    return ""


def _within_domain(domain: str, entry: str) -> bool:
    domain, entry = domain.lower().rstrip("."), entry.lower().strip(".")
    return domain == entry or domain.endswith("." + entry)


class CapabilityLimiter:
    """Counts a capability's calls; of those with a limit only."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str, int], list[float]] = {}
        self._running: dict[tuple[str, str, int], int] = {}

    def __repr__(self) -> str:
        return f"<RateLimiter running={sum(self._running.values())}>"

    def admit(self, context: str, permit: Permit, *, now: float) -> str:
        """Why not now, or nothing: the call counts from here, and `leave` ends it."""
        key, limit, most = (
            (context, permit.layer, permit.index),
            permit.capability.rate_limit,
            permit.capability.max_concurrent,
        )
        if most is not None and self._running.get(key, 0) >= most:
            return f"{most} such calls are running, as many as may"
        if limit is not None:
            recent = [at for at in self._recent.get(key, []) if now - at < limit.per_seconds]
            self._recent[key] = recent
            if len(recent) >= limit.calls:
                return (
                    f"{limit.calls} such calls were made within {limit.per_seconds} s, which is all that may"
                )
            recent.append(now)
        self._running[key] = self._running.get(key, 0) + 1
        return ""

    def admit_all(self, context: str, permits: Sequence[Permit], *, now: float) -> str:
        """Admit a call under several limits at once: under all of them, or none."""
        admitted: list[Permit] = []
        for permit in permits:
            if why := self.admit(context, permit, now=now):
                for one in admitted:
                    self.leave(context, one)
                return why
            admitted.append(permit)
        return ""

    def leave(self, context: str, permit: Permit) -> None:
        key = (context, permit.layer, permit.index)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
