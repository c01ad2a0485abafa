"""Commit hooks: changes that are durable with the transactions of others, or not at all.

A hook adds what belongs to a transaction without being its purpose: the record that a request was carried
out, a note of the change, a hold for a rollout. It is registered for the kinds that it needs to see
(`Store.add_hook`), called before a transaction that touches one is submitted, and the change that it returns
runs after the transaction's own, on the same draft.
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
    """The part of one hook in one transaction."""

    change: Callable[[Draft, Any], Any]
    """Given the draft and what the transaction's own change returned. Pure, like a change."""
    touches: frozenset[Key] = frozenset()
    kept: Callable[[Any], None] | None = None
    """Called with the result of `change` in the run that was kept, once it is durable."""


CommitHook = Callable[[str, str, Collection[Key]], HookedChange | None]
"""Called with a transaction's actor, action and touches; returns None to add nothing."""


def together(
    change: Callable[[Draft], R], parts: Iterable[HookedChange]
) -> Callable[[Draft], tuple[R, tuple[Any, ...]]]:
    """The change and the changes of its hooks as one change; returns the result of each."""
    parts = tuple(parts)

    def changing(draft: Draft) -> tuple[R, tuple[Any, ...]]:
        value = change(draft)
        return value, tuple(part.change(draft, value) for part in parts)

    return changing
