"""One switch that stops automation: everywhere, for a tenant, or for anything below a scope.

A freeze is a resource at the scope it holds for, so that setting and lifting it are
transactions, audited with their actor. Whether something is frozen is a pure question that
controllers ask before they act on their own; what people ask for in so many words is not
automation, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fleetplane.kernel.access import EVERYWHERE, covers
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Kind, Resource, check_text
from fleetplane.kernel.store import Draft, Store

REASON_LIMIT_BYTES = 1024
NAME = "freeze"
"""There is one per scope."""


class FreezeSpec(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    actor: str
    frozen_at_ns: int
    expires_at_ns: int | None = None
    """When it ends by itself; None if only by being lifted."""


class Nothing(msgspec.Struct, frozen=True):
    """A freeze has no status: it holds as soon as it is written."""


FREEZE: Kind[FreezeSpec, Nothing] = Kind("freeze", FreezeSpec, Nothing)
Freeze = Resource[FreezeSpec, Nothing]


def frozen(freezes: Iterable[Freeze], scope: str, now_ns: int) -> Freeze | None:
    """The widest freeze that holds for a scope now, or None."""
    holding = (
        freeze
        for freeze in freezes
        if covers(freeze.scope, scope)
        and (freeze.spec.expires_at_ns is None or freeze.spec.expires_at_ns > now_ns)
    )
    return min(holding, key=lambda freeze: len(freeze.scope), default=None)


async def freeze(
    store: Store, scope: str = EVERYWHERE, *, reason: str, actor: str, expires_at_ns: int | None = None
) -> Freeze:
    """Stop automation at and below a scope; replaces the freeze that is there."""
    check_text("reason", reason, REASON_LIMIT_BYTES)

    def change(draft: Draft) -> Freeze:
        if expires_at_ns is not None and expires_at_ns <= draft.now_ns:
            raise InvalidArgument("a freeze cannot end before it begins", field="expires_at")
        spec = FreezeSpec(reason=reason, actor=actor, frozen_at_ns=draft.now_ns, expires_at_ns=expires_at_ns)
        return draft.put(FREEZE, scope, NAME, spec=spec)

    done = await store.transact(change, actor=actor, action="freeze.set", touches=[FREEZE.key(scope, NAME)])
    return done.value


async def lift(store: Store, scope: str = EVERYWHERE, *, actor: str) -> bool:
    """Let automation go on, unless a wider freeze holds; whether there was one at this very scope."""
    try:
        await store.transact(
            lambda draft: draft.delete(FREEZE, scope, NAME),
            actor=actor,
            action="freeze.lift",
            touches=[FREEZE.key(scope, NAME)],
        )
    except NotFound:
        return False
    return True


async def sweep(store: Store, now_ns: int, *, actor: str = "system/freeze") -> int:
    """Remove freezes that have ended by themselves, so that lists show only what holds; how many."""

    def ended(freeze: Freeze) -> bool:
        return freeze.spec.expires_at_ns is not None and freeze.spec.expires_at_ns <= now_ns

    scopes = [found.scope for found in store.list(FREEZE) if ended(found)]
    if not scopes:
        return 0

    def change(draft: Draft) -> int:
        # Looked at again: one may have been prolonged in the meantime.
        doomed = [found for scope in scopes if (found := draft.get(FREEZE, scope, NAME)) and ended(found)]
        for found in doomed:
            draft.delete(FREEZE, found.scope, NAME)
        return len(doomed)

    done = await store.transact(
        change, actor=actor, action="freeze.expire", touches=[FREEZE.key(scope, NAME) for scope in scopes]
    )
    return done.value
