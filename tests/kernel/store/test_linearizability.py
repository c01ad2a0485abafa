"""The checker of histories finds what no single register could have answered, and nothing else."""

from __future__ import annotations

import math
import random
from itertools import permutations
from typing import Any, Literal

import pytest
from support.shared.linearizability import Operation, check


def wrote(value: Any, began: float, ended: float = math.inf, register: str = "x") -> Operation:
    return Operation(register=register, kind="write", value=value, began=began, ended=ended)


def read(value: Any, began: float, ended: float, register: str = "x") -> Operation:
    return Operation(register=register, kind="read", value=value, began=began, ended=ended)


@pytest.mark.parametrize(
    ("history", "holds"),
    [
        ([], True),
        ([read(None, 0, 1)], True),
        ([read(1, 0, 1)], False),
        ([wrote(1, 0, 1), read(1, 2, 3)], True),
        ([wrote(1, 0, 1), read(None, 2, 3)], False),  # stale
        ([wrote(1, 0, 3), read(None, 1, 2)], True),
        ([wrote(1, 0, 5), read(1, 1, 2), read(None, 3, 4)], False),  # seen, and then not any more
        ([wrote(1, 0, 5), read(None, 1, 2), read(1, 3, 4)], True),
        ([wrote(1, 0, 9), wrote(2, 0, 9), read(1, 1, 2), read(2, 3, 4)], True),
        ([wrote(1, 0, 9), wrote(2, 0, 9), read(1, 1, 2), read(2, 3, 4), read(1, 5, 6)], False),
        ([wrote(1, 0), read(None, 1, 2), read(1, 3, 4)], True),  # never answered, took effect
        ([wrote(1, 0), read(None, 1, 2)], True),  # never answered, did not
        ([wrote(1, 0), read(1, 1, 2), read(None, 3, 4)], False),
        ([wrote(1, 0, 1, "x"), read(None, 2, 3, "y"), read(1, 2, 3, "x")], True),
        ([wrote(1, 0, 1, "x"), read(1, 2, 3, "y")], False),
    ],
)
def test_small_histories(history: list[Operation], holds: bool) -> None:
    assert check(history).linearizable is holds


@pytest.mark.parametrize("stale", [False, True])
def test_many_writes_that_were_never_answered_are_looked_at_in_no_time(stale: bool) -> None:
    history: list[Operation] = []
    for number in range(0, 200, 2):
        history += [wrote(number, number), wrote(-number - 1, number), read(number, number + 0.5, number + 1)]
    if stale:
        history.append(read(20, 300, 301))
    assert check(history).linearizable is not stale


def by_trying_all(history: list[Operation]) -> bool:
    """The definition, for a handful of operations that were all answered."""
    for order in permutations(history):
        value, place = None, {id(one): number for number, one in enumerate(order)}
        if any(a.ended < b.began and place[id(a)] > place[id(b)] for a in history for b in history):
            continue
        for one in order:
            if one.kind == "read" and one.value != value:
                break
            value = one.value
        else:
            return True
    return False


def test_it_decides_as_the_definition_does() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(400):
        chance, history = random.Random(seed), []
        for _ in range(chance.randint(1, 5)):
            began = chance.randint(0, 8)
            kind: Literal["read", "write"] = "read" if chance.random() < 0.6 else "write"
            history.append(
                Operation(
                    register="x",
                    kind=kind,
                    value=chance.choice([1, 2] if kind == "write" else [None, 1, 2]),
                    began=began,
                    ended=began + chance.randint(0, 5) + 0.5,
                )
            )
        verdict = check(history)
        assert verdict.linearizable is by_trying_all(history), (seed, history)
        verdicts[verdict.linearizable] += 1
    assert min(verdicts.values()) > 50


def a_history(chance: random.Random, length: int) -> list[Operation]:
    """What clients of a register see, each operation taking effect at some moment of its own."""
    value, now, found = None, 0.0, []
    for number in range(length):
        now += chance.random()
        began, ended = now - 3 * chance.random(), now + 3 * chance.random()
        if chance.random() < 0.3:
            value = number
            found.append(wrote(value, began, math.inf if chance.random() < 0.02 else ended))
        else:
            found.append(read(value, began, ended))
    return found


def test_long_histories_of_a_register_pass_and_one_stale_read_in_them_is_found() -> None:
    for seed in range(4):
        chance = random.Random(seed)
        history = a_history(chance, 1000)
        assert check(history).linearizable, seed
        written = {one.value: one for one in history if one.kind == "write" and one.ended != math.inf}
        old, new = sorted(written)[10], sorted(written)[-20]
        at = written[new].ended
        later = [one for one in history if one.kind == "read" and one.began > at]
        stale = later[len(later) // 2]
        history[history.index(stale)] = read(old, stale.began, stale.ended)
        verdict = check(history)
        assert not verdict.linearizable, seed
        assert verdict.register == "x"
        assert any(one.value == old and one.kind == "read" for one in verdict.stuck), str(verdict)
