"""What may be written: one level for everybody who uses a database.

A server decodes what is stored to its own types, and writes it back without the fields that it does not know.
So a release that brings fields or kinds writes them only from a *level* on, which the store keeps like any
other resource, and which rises once every server that runs supports it. A transaction asks its draft:
`draft.level >= 2`. Because the level is in the log, it holds without regard to who was heard of when: nobody
writes after a group that he has not applied, and nobody applies a level that his program does not support.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyResource, Key, Kind, Nothing

FIRST = 1
"""Of a store in which no level was ever written."""


class Levels(NamedTuple):
    """The levels that a program can read and write."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return str(self.highest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


SEALED = 2
"""From which on kinds that may hold secrets are stored sealed."""
SUPPORTED = Levels(lowest=FIRST, highest=SEALED)
"""By this release. One that writes something new raises the highest; one that no longer reads what an old
release wrote raises the lowest."""


class LevelSpec(msgspec.Struct, frozen=True):
    number: int
    sealed_since: int = 0
    """The revision from which on secret kinds are stored sealed; 0 while they are not."""


LEVEL: Kind[LevelSpec, Nothing] = Kind("store-level", LevelSpec, Nothing)
NAME = "store"
KEY: Key = LEVEL.key("", NAME)


def of(resource: AnyResource | None) -> int:
    """The level that is stored, or the first."""
    return FIRST if resource is None else int(resource.spec.number)


def sealed_since(resource: AnyResource | None) -> int:
    """The revision from which on secret kinds are stored sealed; 0 while they are not."""
    return 0 if resource is None else int(resource.spec.sealed_since)


def common(supported: Iterable[Levels]) -> int | None:
    """The highest level that all of them support; None if there is none, or nobody."""
    known = list(supported)
    highest = min((one.highest for one in known), default=0)
    return highest if known and highest >= max(one.lowest for one in known) else None


def check(level: int, supported: Levels) -> None:
    """Refuse to go on with a level that this program does not support."""
    if level > supported.highest:
        raise IntegrityError(
            f"the store is at level {level}, and this program supports {supported}: it would lose what newer"
            " servers have written",
            hint="start the release that the other servers run, or restore a backup from before the upgrade",
        )
    if level < supported.lowest:
        raise IntegrityError(
            f"the store is at level {level}, and this program supports {supported}",
            hint="upgrade by way of an older release that supports both; it raises the level once all servers"
            " run it",
        )
