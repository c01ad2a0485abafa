"""What is written together with the transactions of others, all or nothing.

Some things belong to a transaction without being its purpose: the record that a request was
carried out, the note of what it changed. Whoever has such a thing accompanies the store; it is
asked about each transaction before it is submitted, and what it offers runs after the change,
on the same draft. Decides nothing about what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fleetplane.kernel.resources import Key
from fleetplane.kernel.store.draft import Draft

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedChange:
    """One companion's part in one transaction."""

    change: Callable[[Draft, Any], Any]
    """Given the draft and what the transaction's own change returned. Pure, like a change."""
    touches: frozenset[Key] = frozenset()
    kept: Callable[[Any], None] | None = None
    """Told what `change` returned in the run that was kept, once that is durable."""


CommitHook = Callable[[str, str, Collection[Key]], HookedChange | None]
"""Asked with a transaction's actor, action and touches; None to have no part in it."""


def together(
    change: Callable[[Draft], R], parts: Iterable[HookedChange]
) -> Callable[[Draft], tuple[R, tuple[Any, ...]]]:
    """The change and its companions' parts, as one change; returns what each of them does."""
    parts = tuple(parts)

    def changing(draft: Draft) -> tuple[R, tuple[Any, ...]]:
        value = change(draft)
        return value, tuple(part.change(draft, value) for part in parts)

    return changing
