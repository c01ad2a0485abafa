"""One switch that stops automation: everywhere, for a tenant, or for anything below a scope.

A freeze is a resource at the scope it holds for and names the domains it holds for, so that setting
and lifting it are transactions, audited with their actor. Whether something is frozen is a pure question that
controllers ask before they act on their own; what people ask for in so many words is not
automation, and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import msgspec

from fleetplane.kernel.access import EVERYWHERE, covers
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Kind, Nothing, Resource, check_text
from fleetplane.kernel.store import Draft, Store

REASON_LIMIT_BYTES = 1024
NAME = "freeze"
"""Of the freeze of a scope that names no domains, as it was stored before freezes named any; see `_name`."""
EVERY_DOMAIN = "*"
BEFORE = ("instances",)
"""What a freeze holds for that names no domains: the one that had freezes before they could."""


class FreezeSpec(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    actor: str
    frozen_at_ns: int
    expires_at_ns: int | None = None
    """When it ends by itself; None if only by being lifted."""
    domains: tuple[str, ...] = BEFORE
    """Whose controllers it stops; `("*",)` for all, also those of domains that come later."""


FREEZE: Kind[FreezeSpec, Nothing] = Kind("freeze", FreezeSpec, Nothing)
Freeze = Resource[FreezeSpec, Nothing]


def is_over(freeze: Freeze, now_ns: int) -> bool:
    """Whether it has ended by itself."""
    return freeze.spec.expires_at_ns is not None and freeze.spec.expires_at_ns <= now_ns


def names(freeze: Freeze, domain: str) -> bool:
    """Whether it stops the controllers of a domain."""
    return domain in freeze.spec.domains or EVERY_DOMAIN in freeze.spec.domains


def frozen(freezes: Iterable[Freeze], scope: str, now_ns: int, *, domain: str = BEFORE[0]) -> Freeze | None:
    """The widest freeze of a domain that holds for a scope now, or None; of several, the one that lasts."""
    holding = (
        freeze
        for freeze in freezes
        if names(freeze, domain) and covers(freeze.scope, scope) and not is_over(freeze, now_ns)
    )
    return min(holding, key=_width, default=None)


def _width(freeze: Freeze) -> tuple[int, float]:
    ends = freeze.spec.expires_at_ns
    return len(freeze.scope), -math.inf if ends is None else -ends


async def freeze(
    store: Store,
    scope: str = EVERYWHERE,
    *,
    reason: str,
    actor: str,
    expires_at_ns: int | None = None,
    domains: Collection[str] = BEFORE,
) -> tuple[Freeze, ...]:
    """Stop automation of some domains at and below a scope: a freeze for each, replacing the one before."""
    check_text("reason", reason, REASON_LIMIT_BYTES)
    wanted = _domains(domains)

    def change(draft: Draft) -> tuple[Freeze, ...]:
        return tuple(
            put_freeze(draft, scope, domain, reason=reason, actor=actor, expires_at_ns=expires_at_ns)
            for domain in wanted
        )

    touches = [FREEZE.key(scope, _name(domain)) for domain in wanted]
    done = await store.transact(change, actor=actor, action="freeze.set", touches=touches)
    return done.value


def put_freeze(
    draft: Draft, scope: str, domain: str, *, reason: str, actor: str, expires_at_ns: int | None
) -> Freeze:
    """The change that stops the automation of one domain, or of every one."""
    check_text("reason", reason, REASON_LIMIT_BYTES)
    if expires_at_ns is not None and expires_at_ns <= draft.now_ns:
        raise InvalidArgument("a freeze cannot end before it begins", field="expires_at")
    spec = FreezeSpec(
        reason=reason,
        actor=actor,
        frozen_at_ns=draft.now_ns,
        expires_at_ns=expires_at_ns,
        domains=(domain,),
    )
    return draft.put(FREEZE, scope, _name(domain), spec=spec)


async def lift(
    store: Store, scope: str = EVERYWHERE, *, actor: str, domains: Collection[str] = BEFORE
) -> bool:
    """Let automation of some domains go on, unless a wider freeze holds, or one of every domain.

    Says whether there was one at this very scope for any of them.
    """
    wanted = _domains(domains)

    def change(draft: Draft) -> None:
        there = [name for name in map(_name, wanted) if draft.get(FREEZE, scope, name) is not None]
        if not there:
            raise NotFound("there is no such freeze")
        for name in there:
            draft.delete(FREEZE, scope, name)

    touches = [FREEZE.key(scope, _name(domain)) for domain in wanted]
    try:
        await store.transact(change, actor=actor, action="freeze.lift", touches=touches)
    except NotFound:
        return False
    return True


def _domains(given: Collection[str]) -> tuple[str, ...]:
    if not given:
        raise InvalidArgument("name at least one domain, or * for all", field="domains")
    return (EVERY_DOMAIN,) if EVERY_DOMAIN in given else tuple(sorted(set(given)))


def _name(domain: str) -> str:
    """There is one freeze for a scope and a domain, and one for a scope and every domain."""
    return NAME if (domain,) == BEFORE else f"{NAME}:{domain}"


async def sweep(store: Store, now_ns: int, *, actor: str = "system/freeze") -> int:
    """Remove freezes that have ended by themselves, so that lists show only what holds; how many."""
    keys = [found.key for found in store.list(FREEZE) if is_over(found, now_ns)]
    if not keys:
        return 0

    def change(draft: Draft) -> int:
        # Looked at again: one may have been prolonged in the meantime.
        looked = [draft.get(FREEZE, key.scope, key.name) for key in keys]
        doomed = [found for found in looked if found is not None and is_over(found, now_ns)]
        for found in doomed:
            draft.delete(FREEZE, found.scope, found.name)
        return len(doomed)

    done = await store.transact(change, actor=actor, action="freeze.expire", touches=keys)
    return done.value
