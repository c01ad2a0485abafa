"""Freezes, for every domain: what holds where, and who may set which.

A controller asks `Freezes.holding` at its acting step, with the scope of the thing that it is about to
change. Observing is never frozen: reports are taken, states are written, and only what the controller
would do to an agent or a machine waits. Each domain declares with `Freezable` what a freeze stops in it
and at which scopes, so that a freeze that could stop nothing is refused instead of believed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel import freeze as kernel_freeze
from fleetplane.kernel.access import covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.kernel.freeze import EVERY_DOMAIN, FREEZE, Freeze
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.resources import SCOPE_LIMIT_BYTES, AnyKind, check_text
from fleetplane.kernel.store import Store, follow
from fleetplane.kernel.values.times import NS

FROZEN = "FROZEN"
"""The code of the reason that a frozen thing has in explanations."""
FREEZES_LIMIT = 1000
"""Within one tenant, organisation or the like. Controllers look at all freezes before each thing they do."""
LIFE_LIMIT_NS = 10 * 365 * 86_400 * 10**9
"""How far ahead a freeze may end: ten years; one for longer is one without an end."""
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
"""Ids, numbers and names of tenants and groups; no slashes and no blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freezable:
    """What a freeze means in one domain."""

    stops: str
    """What its controllers do not do while frozen, for people."""
    scopes: tuple[str, ...]
    """Scopes at which its things lie, such as `tenant/{tenant}`, beside everywhere."""

    def has(self, scope: str) -> bool:
        """Whether things of the domain can lie at or below a scope."""
        return not scope or any(_pattern(template).fullmatch(scope) for template in self.scopes)


def _pattern(template: str) -> re.Pattern[str]:
    parts = (_SEGMENT if part.startswith("{") else re.escape(part) for part in template.split("/"))
    return re.compile("/".join(parts))


class Freezes:
    """What is frozen now, as one store knows it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Freezes {len(self._store.list(FREEZE))}>"

    def holding(self, domain: str, scope: str) -> Freeze | None:
        """The widest freeze that stops a domain's controllers at a scope now, or None."""
        return kernel_freeze.frozen(self._store.list(FREEZE), scope, self._clock.now_ns(), domain=domain)

    def listed(self, within: str = "") -> Sequence[Freeze]:
        """Those that hold now, at or below a scope and above it: all that concern it."""
        now_ns = self._clock.now_ns()
        return [
            found
            for found in self._store.list(FREEZE)
            if not kernel_freeze.is_over(found, now_ns)
            and (covers(within, found.scope) or covers(found.scope, within))
        ]

    def seconds_left(self, freeze: Freeze, *, at_most: float) -> float:
        """When to look again at something that a freeze holds back."""
        ends = freeze.spec.expires_at_ns
        if ends is None:
            return at_most
        return min(at_most, max(0.0, (ends - self._clock.now_ns()) / NS))

    async def follow(self, changed: Callable[[str], Awaitable[None] | None]) -> None:
        """Tell the scope of each freeze that is set or lifted, until cancelled; ends by time are not told."""
        async for batch in follow(self._store, FREEZE, again=lambda _watch: changed("")):
            for scope in {event.resource.scope for event in batch.events}:
                waiting = changed(scope)
                if waiting is not None:
                    await waiting


def message(freeze: Freeze) -> str:
    """Who stopped this and why, in one line."""
    where = f" at {freeze.scope}" if freeze.scope else ""
    return f"frozen{where} by {freeze.spec.actor}: {freeze.spec.reason}"


def reason(freeze: Freeze, *, subject: str = "") -> Reason:
    """What a controller gives as the reason for not acting."""
    return Reason(code=FROZEN, message=message(freeze), subject=subject)


class Counted(Protocol):
    """The store, or a draft of it."""

    def count(self, kind: AnyKind, scope: str = "") -> int: ...


class FreezeSwitch:
    """Sets and lifts freezes for permitted callers, after checking that a freeze would stop something."""

    def __init__(self, store: Store, clock: Clock, freezable: Mapping[str, Freezable]) -> None:
        """`freezable` are the domains that run here and have controllers which act."""
        self._store = store
        self._clock = clock
        self.freezable = dict(freezable)
        self.freezes = Freezes(store, clock)

    async def freeze(
        self, scope: str, *, domains: Collection[str], reason: str, actor: str, expires_at_ns: int | None
    ) -> tuple[Freeze, ...]:
        self.check(scope, domains=domains, expires_at_ns=expires_at_ns, at=self._store)
        return await kernel_freeze.freeze(
            self._store, scope, reason=reason, actor=actor, expires_at_ns=expires_at_ns, domains=domains
        )

    async def lift(self, scope: str, *, domains: Collection[str], actor: str) -> bool:
        """Whether there was a freeze at this very scope for any of these domains."""
        check_text("scope", scope, SCOPE_LIMIT_BYTES, may_be_empty=True)
        if not all(domain == EVERY_DOMAIN or _is_name(domain) for domain in domains):
            raise InvalidArgument("a domain is a word such as edge, or *", field="domains")
        return await kernel_freeze.lift(self._store, scope, actor=actor, domains=domains)

    def check(self, scope: str, *, domains: Collection[str], expires_at_ns: int | None, at: Counted) -> None:
        """Refuse a freeze that would stop nothing, lasts too long, or is one too many."""
        self._check(scope, domains)
        if expires_at_ns is not None and expires_at_ns - self._clock.now_ns() > LIFE_LIMIT_NS:
            raise InvalidArgument(
                "a freeze ends within ten years", field="expires_at", hint="leave it out to lift it by hand"
            )
        self._check_room(scope, at)

    def _check_room(self, scope: str, at: Counted) -> None:
        """Refuse what would let one tenant slow the controllers of all.

        A whole tenant can always be frozen, and what is frozen can be frozen for longer.
        """
        tenant = "/".join(scope.split("/")[:2])
        if scope == tenant or at.count(FREEZE, scope):
            return
        if at.count(FREEZE, tenant) >= FREEZES_LIMIT:
            raise ResourceExhausted(
                f"{FREEZES_LIMIT} freezes are set within {tenant}, the most there may be",
                hint="lift some, or freeze at a wider scope",
            )

    def _check(self, scope: str, domains: Collection[str]) -> None:
        check_text("scope", scope, SCOPE_LIMIT_BYTES, may_be_empty=True)
        if not domains:
            raise InvalidArgument("name at least one domain, or * for all", field="domains")
        for domain in domains:
            if domain != EVERY_DOMAIN and domain not in self.freezable:
                known = ", ".join(sorted(self.freezable)) or "none"
                raise InvalidArgument(
                    f"nothing that acts by itself runs here for {domain[:64]!r}",
                    field="domains",
                    hint=f"there are: {known}, and * for all",
                )
        named = self.freezable if EVERY_DOMAIN in domains else domains
        fitting = [domain for domain in named if self.freezable[domain].has(scope)]
        if len(fitting) < (1 if EVERY_DOMAIN in domains else len(set(domains))):
            shapes = {shape for domain in named for shape in self.freezable[domain].scopes}
            raise InvalidArgument(
                f"nothing of {', '.join(sorted(named)) or 'this server'} lies at {scope[:200]!r}",
                field="scope",
                hint=f"write {', '.join(sorted(shapes))}, or nothing for everywhere",
            )


def _is_name(text: str) -> bool:
    return re.fullmatch(_SEGMENT, text) is not None
