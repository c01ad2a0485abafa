"""The stored kinds of rollouts, and the protocol of what can be rolled out.

A rollout lies at its scope, named by its id; its targets lie below it, at `SCOPE/rollout/ID`. A change of a
target and the change of its rollout are one transaction. A policy lies at its scope, named by its subject;
the nearest policy counts. Holds lie at the scope too, named by their subject, with the contents of versions
beside them. Specs are stored by field names, so fields may be added. Nothing else is stored: a server that
takes over continues from these records.

`VersionedSubject` is what a domain implements so that something of it can be rolled out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import RolloutStanding, TargetFact, TargetRecord
from fleetplane.kernel.resources import AnyKind, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The time over which something is measured."""

    from_ns: int
    to_ns: int


@runtime_checkable
class HasObjects(Protocol):
    """A subject whose versions are made by writing objects of the resource API."""

    def holder(self, kind: str, scope: str, name: str) -> str | None:
        """The scope whose version an object is part of; None for one that makes no version."""
        ...


@runtime_checkable
class Replaces(Protocol):
    """A subject whose targets are changed by replacing them, so that some may be unavailable meanwhile."""

    replaces: bool


class VersionedSubject(Protocol):
    """Something with versions that agents have: how to name them, and to bring targets to one.

    Every method can be called again: a server that stopped in the middle leaves its successor to say the
    same once more.
    """

    @property
    def name(self) -> str:
        """Such as `proxies.config`: the domain, and what of it is versioned."""
        ...

    @property
    def domain(self) -> str:
        """Whose freezes stop it."""
        ...

    @property
    def summary(self) -> str:
        """What is rolled out and what confirms it, in one line for people."""
        ...

    @property
    def measures(self) -> Mapping[str, str]:
        """What gates can ask for, by the name of the query, each with one line for people."""
        ...

    @property
    def watches(self) -> Sequence[AnyKind]:
        """Kinds whose changes, at or below a scope, can change the facts of its targets."""
        ...

    @property
    def versions(self) -> Sequence[AnyKind]:
        """Kinds whose changes, at or above a scope, can make a new version there."""
        ...

    def scope(self, text: str) -> str:
        """The scope that a person means; `NotFound` if there is none."""
        ...

    def scopes(self, below: str) -> Sequence[str]:
        """Every scope at or below one that has versions of its own."""
        ...

    def version(self, scope: str, text: str) -> str:
        """A version by its one name; the newest for `newest`. `NotFound` if it is not kept."""
        ...

    def newest(self, scope: str) -> str:
        """The newest version, whether or not anybody has it; empty if there is none."""
        ...

    def waiting(self, scope: str) -> str:
        """The newest version if it waits for a rollout; empty if everyone is to have it anyway."""
        ...

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """Who can have it, in the order of their turns, and what each is known to have."""
        ...

    def default(self, scope: str) -> str:
        """The version that whoever comes new is to have; empty if there is none."""
        ...

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        """Want each target at its version, and whoever is not named at what it has.

        A version that is empty means the default, which becomes `default` unless that is empty.
        """
        ...

    async def again(self, scope: str, targets: Collection[str]) -> None:
        """Have targets that could not take a version try once more."""
        ...

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        """Want everyone at a version, whoever comes later included: a rollout to it is done.

        With `held`, versions that are made later wait for a rollout of their own.
        """
        ...

    async def measure(self, scope: str, query: str, targets: Collection[str], period: Period) -> float | None:
        """What a gate asks for, of some targets over some time; None where there is no data."""
        ...


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What was ordered. Never changes."""

    subject: str
    to: str
    """The version that targets are moved to."""
    policy: Policy
    actor: str
    started_at_ns: int
    reason: str = ""
    supersedes: str = ""
    """The id of the rollout that this one ended."""
    automatic: bool = False
    """Whether a policy started it, because of a new version."""
    total: int = 0
    """Targets at the start."""
    default_before: str = ""
    """The version that whoever came new was to have, for going back."""


class RolloutStatus(RolloutStanding, frozen=True, kw_only=True):
    settled: str = ""
    """The phase in which it ended, once its subject knows."""


class RolloutTargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    """Its name for people."""


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Makes every new version at and below a scope a rollout."""

    policy: Policy
    automatic: bool = True
    """Whether a new version starts its rollout by itself; else it waits until somebody starts one."""
    supersedes: bool = False
    """Whether a rollout that it starts ends one that is under way, instead of waiting for its end."""
    once: bool = False
    """Whether it is for the change that it was written with, and goes once its rollout has started."""
    actor: str = ""


class HoldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """At which versions the targets of a scope are held; see `holds`."""

    held: str = ""
    """The version of whoever is not named below; empty while everyone follows the newest."""
    moved: dict[str, tuple[str, ...]] = {}
    """Targets that are to have another version, by that version."""


class KeptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a version, for as long as somebody may go to it."""

    version: str
    content: bytes
    at_ns: int


Rollout = Resource[RolloutSpec, RolloutStatus]
RolloutTarget = Resource[RolloutTargetSpec, TargetRecord]
RolloutPolicy = Resource[PolicySpec, Nothing]

ROLLOUT: Kind[RolloutSpec, RolloutStatus] = Kind("rollout", RolloutSpec, RolloutStatus)
ROLLOUT_TARGET: Kind[RolloutTargetSpec, TargetRecord] = Kind(
    "rollout-target", RolloutTargetSpec, TargetRecord
)
ROLLOUT_POLICY: Kind[PolicySpec, Nothing] = Kind("rollout-policy", PolicySpec, Nothing)
HOLD: Kind[HoldSpec, Nothing] = Kind("rollout-hold", HoldSpec, Nothing)
KEPT: Kind[KeptSpec, Nothing] = Kind("rollout-version", KeptSpec, Nothing, is_secret=True)
KINDS = (ROLLOUT, ROLLOUT_TARGET, ROLLOUT_POLICY, HOLD, KEPT)


def targets_scope(scope: str, rollout: str) -> str:
    """Where the targets of a rollout lie."""
    return f"{scope}/rollout/{rollout}" if scope else f"rollout/{rollout}"


def policy_for(store: Store | Draft, subject: str, scope: str) -> RolloutPolicy | None:
    """The policy that holds at a scope: its own, or that of the nearest scope above."""
    for at in _upward(scope):
        found = store.get(ROLLOUT_POLICY, at, subject)
        if found is not None:
            return found
    return None


def _upward(scope: str) -> Iterator[str]:
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]
    yield ""


def status_of(rollout: Rollout) -> RolloutStatus:
    """Where a rollout stands."""
    assert rollout.status is not None
    return rollout.status


def records_of(store: Store | Draft, rollout: Rollout) -> dict[str, TargetRecord]:
    """The records of a rollout's targets, by name."""
    found = store.list(ROLLOUT_TARGET, targets_scope(rollout.scope, rollout.name))
    return {one.name: one.status for one in found if one.status is not None}
