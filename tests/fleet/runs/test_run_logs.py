"""What a run's targets printed, as the resource API tells it: each thing once, with the target's name."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from fleetplane.fleet.resources.declaration import LogCall, LogQuery
from fleetplane.fleet.runs.events import TargetEnded, TargetOutput
from fleetplane.fleet.runs.resources import Printed, run_lines
from fleetplane.kernel.commands import CommandState


def target(name: str, state: CommandState, number: int) -> Any:
    status = SimpleNamespace(state=state, deliveries=1)
    return SimpleNamespace(name=name, status=status, updated_at_ns=0, created_revision=number)


ONE, TWO = target("one", CommandState.OK, 1), target("two", CommandState.FAILED, 2)
OPEN = target("three", CommandState.RUNNING, 3)
PRINTED = {
    "one": Printed(stdout="hello\nthere\n", stderr="oh\n"),
    "two": Printed(message="it is away"),
}


class Runs:
    """A run of three targets, of which one goes on."""

    async def follow(self, _run: Any) -> AsyncGenerator[Any]:
        yield TargetOutput(name="one", stream="stdout", output=b"hello\nthere\n")
        yield None  # something is missing
        yield TargetOutput(name="one", stream="stderr", output=b"oh\n")
        yield TargetEnded(target=ONE)
        yield TargetEnded(target=TWO)

    def targets(self, _run: Any) -> list[Any]:
        return [OPEN, TWO, ONE]


async def read(**asked: Any) -> list[tuple[str, str, str]]:
    query = LogQuery(**{"tail": 100, "follow": False, **asked})
    stored: Any = SimpleNamespace()
    call = LogCall(domain=None, stored=stored, query=query, actor="me")
    return [
        (line.source, line.level, line.message)
        async for line in run_lines(Runs(), call, lambda _domain, one: PRINTED[one.name])
    ]


ALL = [("one", "", "hello"), ("one", "", "there"), ("one", "stderr", "oh"), ("two", "err", "it is away")]


async def test_what_ended_is_told_in_the_order_of_turns() -> None:
    assert await read() == ALL
    assert await read(tail=2) == ALL[2:]
    assert await read(tail=0) == []


async def test_what_was_told_as_it_was_printed_is_not_told_again() -> None:
    assert await read(follow=True) == ALL


async def test_lines_are_chosen_by_target_and_text() -> None:
    assert await read(source="two") == ALL[3:]
    assert await read(follow=True, contains="HELL") == ALL[:1]
