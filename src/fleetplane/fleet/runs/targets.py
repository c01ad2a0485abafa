"""From what an operator asks for to the agents that are meant. Pure.

A domain says who fits (`TargetCandidate`); here it is decided who of them takes part in a run and who is left
out. Edge has a `RunTarget` of its own, because what is stored of its runs keeps its fields; the other domains
share this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.fleet import selectors
from fleetplane.fleet.selectors import Facts
from fleetplane.kernel.errors import InvalidArgument

NAMES_LIMIT = 10_000
"""As many targets as one command of the ledger has."""
NAME_LIMIT = 128


class SkipReason(StrEnum):
    """Why an agent that was meant takes no part. Stored, and shown to clients as it is."""

    DISCONNECTED = "Disconnected"
    DRAINING = "Draining"
    NOT_FOUND = "NotFound"
    """Named, and not there: it never was, belongs to somebody else, or is there no longer."""
    UNSUPPORTED = "Unsupported"
    """Its program does not know the command."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    """The agent's name in the ledger. The field is called as edge stores it."""
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCandidate:
    """An agent that is meant."""

    name: str
    is_draining: bool = False
    """Whether its operators want it to take nothing new."""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    resolved: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()


def resolve(
    candidates: Iterable[TargetCandidate],
    missing: Iterable[Skipped],
    *,
    is_present: Callable[[str], bool],
    wait: bool = False,
) -> Resolution:
    """Who can be sent something now, or later if that is waited for; and who not, and why."""
    resolved: list[str] = []
    skipped = list(missing)
    for one in candidates:
        if one.is_draining:
            skipped.append(Skipped(node_id=one.name, reason=SkipReason.DRAINING))
        elif wait or is_present(one.name):
            resolved.append(one.name)
        else:
            skipped.append(Skipped(node_id=one.name, reason=SkipReason.DISCONNECTED))
    return Resolution(resolved=tuple(resolved), skipped=tuple(skipped))


class RunTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Agents by name, by selector, or both, which must then both fit; or all there are."""

    names: tuple[str, ...] = ()
    selector: str = ""
    """In the language of `fleet.selectors`."""
    everyone: bool = False

    def check(self) -> None:
        """Refuse a target that names nobody, or says two things at once."""
        if len(self.names) > NAMES_LIMIT:
            raise InvalidArgument(
                f"names {len(self.names)} agents; a run has at most {NAMES_LIMIT}", field="target"
            )
        if any(not 0 < len(name) <= NAME_LIMIT for name in self.names):
            raise InvalidArgument(f"a name has 1 to {NAME_LIMIT} characters", field="target")
        if self.everyone == bool(self.names or self.selector):
            raise InvalidArgument(
                "is required: give names or a selector, or `all`, and not both", field="target"
            )
        if self.selector:
            selectors.check(self.selector, field="target.selector")


def shown(target: RunTarget) -> str:
    """As somebody would write it; of many names the first hundred."""
    return "all" if target.everyone else target.selector or ",".join(target.names[:100])


def choose(target: RunTarget, fleet: Mapping[str, Callable[[], Facts]]) -> tuple[list[str], list[Skipped]]:
    """The agents that a target selects, in the fleet's order, and the names in it that are unknown.

    The fleet is the caller's own: who is not in it is not found, whoever else may have such an agent.
    """
    selector = selectors.parse(target.selector, field="target.selector") if target.selector else None
    named = dict.fromkeys(target.names)
    missing = [Skipped(node_id=name, reason=SkipReason.NOT_FOUND) for name in named if name not in fleet]
    chosen = [
        name
        for name, facts in fleet.items()
        if (not named or name in named) and (selector is None or selector.matches(facts()))
    ]
    return chosen, missing
