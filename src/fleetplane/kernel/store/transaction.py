"""Two further ways to say what a transaction does.

As values, for callers whose decision does not depend on what is there (`Transaction`); and for changes of
whatever is there (`transact_found`): a list is read, and everything in it is changed. A transaction announces
what it might change before it runs, so the list is read twice: outside, to announce it, and inside, where it
is decided. What came into it between the two makes the transaction begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from fleetplane.kernel.errors import Conflict, FleetplaneError
from fleetplane.kernel.resources import AnyKind, Condition, Key
from fleetplane.kernel.store.draft import Committed, Draft, Expect

if TYPE_CHECKING:
    from fleetplane.kernel.store.store import Store

    Find = Callable[[Store | Draft], Sequence[Key]]

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    kind: AnyKind
    scope: str
    name: str
    spec: Any  # typed by the kind
    status: Any = None
    conditions: Sequence[Condition] = ()
    labels: Mapping[str, str] | None = None
    expect: Expect = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    kind: AnyKind
    scope: str
    name: str
    expect: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Claim a unique value."""

    kind: AnyKind
    scope: str
    field: str
    value: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseClaim:
    kind: AnyKind
    scope: str
    field: str
    value: str
    owner: str


Operation = Put | Delete | Take | ReleaseClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Operations that happen in this order, all or none."""

    actor: str
    action: str
    operations: Sequence[Operation]

    @property
    def touches(self) -> Iterator[Key]:
        for operation in self.operations:
            if isinstance(operation, Put | Delete):
                yield operation.kind.key(operation.scope, operation.name)

    def change(self, draft: Draft) -> None:
        for operation in self.operations:
            match operation:
                case Put(kind=kind, scope=scope, name=name):
                    draft.put(
                        kind,
                        scope,
                        name,
                        spec=operation.spec,
                        status=operation.status,
                        conditions=operation.conditions,
                        labels=operation.labels,
                        expect=operation.expect,
                    )
                case Delete(kind=kind, scope=scope, name=name, expect=expect):
                    draft.delete(kind, scope, name, expect=expect)
                case Take(kind=kind, scope=scope, field=field, value=value, owner=owner):
                    draft.claim(kind, scope, field, value, owner)
                case ReleaseClaim(kind=kind, scope=scope, field=field, value=value, owner=owner):
                    draft.release(kind, scope, field, value, owner)
                case _:
                    assert_never(operation)


# Changes of whatever is there.

ATTEMPTS = 20
"""Each of them has lost to somebody who wrote meanwhile."""


class _Grown(FleetplaneError):
    """The list has more in it than was announced."""


async def transact_found(
    store: Store,
    find: Find,
    change: Callable[[Draft, Sequence[Key]], R],
    *,
    actor: str,
    action: str,
    touches: Collection[Key] = (),
    among: Find | None = None,
) -> Committed[R]:
    """Run `change` on what `find` finds inside the transaction; `touches` is what it changes beside that.

    Where what is found moves on with everybody who does the same, such as the oldest of many, `among` finds
    all from which it is chosen: those are announced, and nobody begins again.
    """
    for _ in range(ATTEMPTS):
        announced = frozenset((among or find)(store))

        def decided(draft: Draft, announced: frozenset[Key] = announced) -> R:
            found = find(draft)
            if not announced.issuperset(found):
                raise _Grown("there is more than was announced")
            return change(draft, found)

        try:
            return await store.transact(decided, actor=actor, action=action, touches=[*touches, *announced])
        except _Grown:
            continue
    raise Conflict("what this changes is being changed all the time", hint="try again")
