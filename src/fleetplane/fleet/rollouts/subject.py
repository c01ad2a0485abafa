"""What a domain brings so that something of it can be rolled out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.rollout.facts import TargetFact


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
