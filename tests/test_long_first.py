"""Long tests begin first at every worker, and no test is lost by that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import long_first
import pytest


def item(nodeid: str) -> Any:
    return SimpleNamespace(nodeid=nodeid)


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 40])
def test_each_worker_begins_with_a_long_one_and_none_is_lost(workers: int) -> None:
    long = [item(f"{one}::test_it" if one.endswith(".py") else f"{one}[case]") for one in long_first.LONG]
    short = [item(f"tests/test_short.py::test_{number}") for number in range(500)]
    found = long_first.arranged([*short, *long], workers)
    assert sorted(map(id, found)) == sorted(map(id, [*short, *long]))
    begins, at = [], 0
    for worker in range(workers):
        begins.append(found[at])
        at += (len(found) - at) // (workers - worker)
    assert [one in long for one in begins] == [place < len(long) for place in range(workers)]


def test_a_name_that_only_begins_alike_is_another_test() -> None:
    first = long_first.LONG[0]
    alike, meant = item(f"{first}_too"), item(first)
    assert long_first.arranged([alike, meant], 1) == [meant, alike]
