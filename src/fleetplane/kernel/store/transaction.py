"""Transactions written down as values, for callers whose decision does not depend on what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from fleetplane.kernel.resources import AnyKind, Condition, Key
from fleetplane.kernel.store.draft import Draft, Expect


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
class Release:
    kind: AnyKind
    scope: str
    field: str
    value: str
    owner: str


Operation = Put | Delete | Take | Release


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
                case Release(kind=kind, scope=scope, field=field, value=value, owner=owner):
                    draft.release(kind, scope, field, value, owner)
                case _:
                    assert_never(operation)
