"""Places of the scope tree that are no more: what was given there ends with them.

A token has the scope that it was made for by name (`tenant/acme`). Another organisation that takes the name
later must not be open to it. When a place goes, or is called otherwise, the time of its life is written down
under its path, in the transaction in which it goes; a token that was made in that time is refused from then
on. One that was made before is left: it was made for the name, and whoever takes a name for a while must not
be able to take from others what they hold there.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, TypeVar

import msgspec

from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft

SCOPE = "ended-places"
LIVES_LIMIT = 64
"""Of one path; the two that are nearest to each other become one then: whoever takes and leaves a name many
times ends next to nothing that was given between."""

SpecT = TypeVar("SpecT")
StatusT = TypeVar("StatusT")


class EndedPlaceSpec(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    lives: tuple[tuple[int, int], ...]
    """From when to when each thing of that path was there, in nanoseconds, oldest first."""


EndedPlace = Resource[EndedPlaceSpec, Nothing]
ENDED_PLACE: Kind[EndedPlaceSpec, Nothing] = Kind("ended-place", EndedPlaceSpec, Nothing)


class PlaceReader(Protocol):
    """What a store and a draft have in common."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...


def ended_key(path: str) -> Key:
    """What a transaction announces in which the place of this path goes."""
    return ENDED_PLACE.key(SCOPE, _name(path))


def end_life(draft: Draft, path: str, *, since_ns: int) -> None:
    """Write down that what had this path since then has it no longer."""
    current = draft.get(ENDED_PLACE, SCOPE, _name(path))
    lives = [*(current.spec.lives if current is not None else ()), (since_ns, draft.now_ns)]
    if len(lives) > LIVES_LIMIT:
        first = min(range(len(lives) - 1), key=lambda at: lives[at + 1][0] - lives[at][1])
        lives[first : first + 2] = [(lives[first][0], lives[first + 1][1])]
    draft.put(ENDED_PLACE, SCOPE, _name(path), spec=EndedPlaceSpec(path=path, lives=tuple(lives)))


def has_ended(reader: PlaceReader, scope: str, made_at_ns: int) -> bool:
    """Whether something that was made then, for this stored scope, was made for a place that is no more."""
    for path in _paths(scope):
        found = reader.get(ENDED_PLACE, SCOPE, _name(path))
        if found is not None and any(since <= made_at_ns <= until for since, until in found.spec.lives):
            return True
    return False


def _paths(scope: str) -> list[str]:
    """The paths of a stored scope that has names, and of what it lies in; scopes that have ids need none."""
    parts = scope.split("/")
    if parts[0] != "tenant" or len(parts) < 2:
        return []
    above = f"/tenants/{parts[1]}"
    return [above, f"{above}/{parts[2]}s/{parts[3]}"] if len(parts) >= 4 else [above]


def _name(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()[:32]
