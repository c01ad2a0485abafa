"""Every change of a suite is run three times, once on an empty store, and must say the same each time.

Where several servers write, a change is run again whenever another server was faster, on a state that it has
not seen before. One that leaves anything behind outside its draft would answer by what an earlier run saw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from fleetplane.kernel.resources import AnyResource, Key
from fleetplane.kernel.store.draft import Draft, DraftChanges
from fleetplane.kernel.store.engine import Claim
from fleetplane.kernel.store.group import GroupState, TransactionResult
from fleetplane.kernel.watch import EventType

Outline = tuple[str, tuple[object, ...], object]


class Nothing:
    """The state of a store in which there is nothing."""

    def get(self, key: Key) -> AnyResource | None:
        return None

    def list(self, kind: str, scope: str) -> Sequence[AnyResource]:
        return ()

    def count(self, kind: str, scope: str) -> int:
        return 0

    def owner(self, claim: Claim) -> str | None:
        return None


@contextmanager
def run_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the actions that were run so; at the end, fails for those that differed."""
    run, seen, wrong = GroupState.run, list[str](), list[str]()

    def again(
        self: GroupState,
        change: Callable[[Draft], object],
        *,
        actor: str,
        action: str,
        touches: Collection[Key],
    ) -> TransactionResult:
        first = _outline(self, self, change, touches)
        _outline(self, Nothing(), change, touches)
        second = _outline(self, self, change, touches)
        seen.append(action)
        if first != second:
            wrong.append(f"{action}: {first} and then {second}")
        return run(self, change, actor=actor, action=action, touches=touches)

    with monkeypatch.context() as patched:
        patched.setattr(GroupState, "run", again)
        yield seen
    if wrong:
        raise AssertionError(f"changes differ when they are run again: {wrong}")


def _outline(
    group: GroupState, ground: Any, change: Callable[[Draft], object], touches: Collection[Key]
) -> Outline:
    """What a change comes to on a state: its error, or what it changes, without what is drawn by lot."""
    draft = Draft(ground, revision=group.revision + 1, clock=group._clock)
    try:
        change(draft)
        changes = draft.finish(touches)
    except Exception as error:  # the caller's own, which is told in the run that counts
        return type(error).__name__, (), str(error)
    return "changed", tuple(_of(changes)), None


def _of(changes: DraftChanges) -> Iterator[object]:
    for change in changes.resources:
        resource, type_ = change.event.resource, change.event.type
        name = "" if type_ is EventType.ADDED else resource.name  # which may be drawn by lot
        yield type_, resource.kind, resource.scope, name, resource.revision, resource.generation
    yield sorted((claim.kind, claim.field, owner is None) for claim, owner in changes.claims.items())
    yield sorted(blob is None for blob in changes.secrets.values())
    yield [note.operation for note in changes.notes]
