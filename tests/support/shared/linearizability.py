"""Whether a history of reads and writes by many clients is one that a single register could have had.

The method of Wing and Gong with the memory of Lowe, as in Porcupine: try to put the operations in one order
that keeps to real time (what ended before another began comes first) and in which every read returns what was
written last; never look twice at the same set of operations with the same value. Registers are independent,
so each is looked at alone. Deciding this is hard in general, and quick for histories with few operations at
once, whatever their length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call: what was asked of which register by whom, and when it began and was answered."""

    register: str
    kind: Literal["read", "write"]
    value: Any
    """What was written, or what a read returned."""
    began: float
    ended: float = math.inf
    """Never, if a write was not answered: it may take effect at any time after it began, or not at all."""
    where: str = ""

    def __str__(self) -> str:
        when = f"({self.began:.6f} to {self.ended:.6f})"
        return f"{self.kind} {self.value!r} of {self.register} at {self.where} {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    linearizable: bool
    register: str = ""
    stuck: Sequence[Operation] = field(default_factory=tuple)
    """Where it is not: operations of which none can come next after the longest order that was found."""

    def __str__(self) -> str:
        if self.linearizable:
            return "linearizable"
        return f"{self.register} is no register: none can be next of\n" + "\n".join(map(str, self.stuck))


def check(history: Iterable[Operation], initial: Any = None) -> Verdict:
    """Look at every register of a history, each of which begins with `initial`."""
    registers: dict[str, list[Operation]] = {}
    for operation in history:
        registers.setdefault(operation.register, []).append(operation)
    for register, operations in sorted(registers.items()):
        stuck = _stuck(_settled(operations, initial), initial)
        if stuck:
            return Verdict(linearizable=False, register=register, stuck=stuck)
    return Verdict(linearizable=True)


def _settled(operations: Sequence[Operation], initial: Any) -> Sequence[Operation]:
    """The same without doubt about writes that were not answered, where no value was written twice.

    One whose value nobody read is of no consequence, and one that was read has been carried out by the end of
    the first such read. Otherwise each would double what there is to try.
    """
    written = [initial, *(one.value for one in operations if one.kind == "write")]
    if len(set(written)) < len(written):
        return operations
    seen: dict[Any, float] = {}
    for one in operations:
        if one.kind == "read":
            seen[one.value] = min(one.ended, seen.get(one.value, math.inf))
    return [
        replace(one, ended=max(one.began, seen[one.value])) if one.ended == math.inf else one
        for one in operations
        if one.ended != math.inf or one.value in seen
    ]


class _Entry:
    """The beginning or the end of an operation, in a list from which operations are taken and put back."""

    __slots__ = ("after", "before", "end", "number", "operation")

    def __init__(self, operation: Operation, number: int) -> None:
        self.operation = operation
        self.number = number
        self.end: _Entry | None = None
        """Of a beginning; None for an end."""
        self.before: _Entry
        self.after: _Entry | None = None

    def take(self) -> None:
        """Take out a beginning and its end."""
        for one in (self, self.end):
            assert one is not None
            one.before.after = one.after
            if one.after is not None:
                one.after.before = one.before

    def put_back(self) -> None:
        for one in (self.end, self):
            assert one is not None
            one.before.after = one
            if one.after is not None:
                one.after.before = one


def _stuck(operations: Sequence[Operation], initial: Any) -> Sequence[Operation]:
    """Nothing if one register could have had this history."""
    head = _listed(operations)
    required = sum(1 << number for number, one in enumerate(operations) if one.ended != math.inf)
    taken: list[tuple[_Entry, Any]] = []
    value, done, deepest = initial, 0, -1
    seen: set[tuple[int, Any]] = set()
    stuck: Sequence[Operation] = ()
    entry = head.after
    while done & required != required:
        if entry is not None and entry.end is not None:
            operation = entry.operation
            possible = operation.kind == "write" or operation.value == value
            state = (done | 1 << entry.number, operation.value)
            if possible and state not in seen:
                seen.add(state)
                taken.append((entry, value))
                done, value = state
                entry.take()
                entry = head.after
            else:
                entry = entry.after
            continue
        # An end comes before anything that is left and possible: what was taken last was taken too early.
        if len(taken) > deepest:
            deepest, stuck = len(taken), _open(head)
        while True:
            if not taken:
                return stuck
            entry, value = taken.pop()
            done &= ~(1 << entry.number)
            entry.put_back()
            if entry.operation.kind == "write":  # a read that is possible hinders nothing: it was right
                break
        entry = entry.after
    return ()


def _listed(operations: Sequence[Operation]) -> _Entry:
    moments: list[tuple[float, int, _Entry]] = []
    for number, operation in enumerate(operations):
        begins, ends = _Entry(operation, number), _Entry(operation, number)
        begins.end = ends
        # At the same moment beginnings come first: such operations are taken for concurrent.
        moments += [(operation.began, 0, begins), (operation.ended, 1, ends)]
    head = last = _Entry(Operation(register="", kind="read", value=None, began=-math.inf), -1)
    for _, _, entry in sorted(moments, key=lambda moment: moment[:2]):
        last.after, entry.before = entry, last
        last = entry
    return head


def _open(head: _Entry) -> Sequence[Operation]:
    """The operations that began before the first end that is left, and that end itself."""
    found = []
    entry = head.after
    while entry is not None and entry.end is not None:
        found.append(entry.operation)
        entry = entry.after
    return tuple(found)
