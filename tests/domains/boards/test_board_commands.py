"""Programs run on boards through the server: real agents, real processes, the real ledger."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, boards_rig, until
from support.boards.slow_boards import SlowNode, served

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.commands import courier as commander_module
from fleetplane.domains.boards.commands.courier import BoardOutcome
from fleetplane.domains.boards.commands.encoding import KEPT_BYTES, BoardProgram, stored_answer
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, CommandState
from fleetplane.kernel.errors import InvalidArgument, NotFound

BOSS = CallOrigin(actor="operator/boss", role=OPERATOR)
FIRST_SLEEP, SECOND_SLEEP = f"271.{os.getpid()}", f"281.{os.getpid()}"
"""How long nobody else sleeps."""
TEST_PROFILE = {
    "name": "test",
    "rules": [
        {"program": "/bin/echo", "forms": [[".*", "..."]]},
        {"program": "/bin/sleep", "forms": [["[0-9.]+"]]},
        {"program": "/bin/false"},
        {"program": "/usr/bin/head", "forms": [["-c", "[0-9]+", "/dev/zero"]]},
    ],
}


@pytest.fixture
async def node(rig: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    config = configured(commands={"profiles": [TEST_PROFILE]})
    async with node_rig(tmp_path, rig, config=config) as made:
        await until(lambda: status_of(rig.board(number_of(made))).port == made.ports.agent_port)
        yield made


def number_of(node: NodeRig) -> int:
    assert node.membership is not None
    return node.membership.node_id


async def ran(rig: BoardsRig, board: int, command: str, *args: str, **more: Any) -> BoardOutcome:
    commander = rig.domain.nodes.commander
    issued = await commander.execute(BoardProgram(command=command, args=args, **more), [board], asked=BOSS)
    (outcome,) = await commander.finished(issued)
    return outcome


async def test_a_program_runs_and_what_it_printed_comes_back(rig: BoardsRig, node: NodeRig) -> None:
    outcome = await ran(rig, number_of(node), "/bin/echo", "hello", "board")

    assert outcome.state is CommandState.OK
    assert outcome.answer is not None
    assert outcome.answer.stdout == b"hello board\n"
    assert outcome.answer.exit_code == 0
    assert outcome.answer.duration_seconds >= 0


async def test_there_is_no_shell_between(rig: BoardsRig, node: NodeRig) -> None:
    outcome = await ran(rig, number_of(node), "/bin/echo", "$(id); rm -rf /tmp/x | cat")

    assert outcome.answer is not None
    assert outcome.answer.stdout == b"$(id); rm -rf /tmp/x | cat\n"


async def test_a_program_that_fails_is_told_from_one_that_is_refused(rig: BoardsRig, node: NodeRig) -> None:
    failed = await ran(rig, number_of(node), "/bin/false")
    refused = await ran(rig, number_of(node), "/bin/cat", "/etc/shadow")

    assert failed.state is CommandState.FAILED
    assert failed.answer is not None
    assert failed.answer.exit_code == 1
    assert refused.state is CommandState.FAILED
    assert refused.answer is None, "it never ran"
    assert "cat" in refused.detail


async def test_the_ledger_keeps_the_beginning_and_the_end_of_a_long_output(
    rig: BoardsRig, node: NodeRig
) -> None:
    outcome = await ran(rig, number_of(node), "/usr/bin/head", "-c", "100000", "/dev/zero")

    assert outcome.answer is not None
    assert len(outcome.answer.stdout) == 100_000, "all of it, while it is remembered"
    commander = rig.domain.nodes.commander
    (target,) = rig.store.list(COMMAND_TARGET)
    assert target.status is not None
    kept = stored_answer(target.status.result)
    assert kept is not None
    assert kept.stdout_truncated
    assert len(kept.stdout) <= KEPT_BYTES
    assert commander._answers_bytes <= commander_module.ANSWERS_LIMIT_BYTES


async def test_cancelling_ends_the_program_on_the_board(rig: BoardsRig, node: NodeRig) -> None:
    commander = rig.domain.nodes.commander
    issued = await commander.execute(
        BoardProgram(command="/bin/sleep", args=(FIRST_SLEEP,)), [number_of(node)], asked=BOSS
    )
    await until(lambda: sleeping(FIRST_SLEEP))

    await commander.cancel(issued.name, actor="operator/boss")

    (outcome,) = await commander.finished(issued)
    assert outcome.state is CommandState.CANCELLED
    assert "operator/boss" in outcome.detail
    await until(lambda: not sleeping(FIRST_SLEEP))


def sleeping(seconds: str) -> bool:
    found = False
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        found = found or command[-1:] == [seconds]
    return found


async def test_a_board_lost_in_mid_command_has_failed_and_nothing_waits_for_it(
    rig: BoardsRig, tmp_path: Path
) -> None:
    commander = rig.domain.nodes.commander
    config = configured(commands={"profiles": [TEST_PROFILE]})
    async with node_rig(tmp_path, rig, config=config) as node:
        await until(lambda: status_of(rig.board(number_of(node))).port == node.ports.agent_port)
        issued = await commander.execute(
            BoardProgram(command="/bin/sleep", args=(SECOND_SLEEP,)), [number_of(node)], asked=BOSS
        )
        await until(lambda: sleeping(SECOND_SLEEP))
    (outcome,) = await commander.finished(issued)

    assert outcome.state is CommandState.FAILED
    assert "board" in outcome.detail
    await until(lambda: not sleeping(SECOND_SLEEP))  # an agent that ends takes its programs with it
    await until(lambda: commander.courier.under_way == 0)


async def test_a_board_that_is_away_is_undeliverable_unless_the_command_may_wait(
    rig: BoardsRig, tmp_path: Path
) -> None:
    commander = rig.domain.nodes.commander
    paper = await rig.core.boards.create(BoardFacts(name="paper"), actor="operator/boss")
    away = int(paper.name)
    (outcome,) = await commander.finished(
        await commander.execute(BoardProgram(command="/bin/echo"), [away], asked=BOSS)
    )
    assert outcome.state is CommandState.UNDELIVERABLE

    waiting = await commander.execute(
        BoardProgram(command="/bin/echo", args=("back",)), [away], asked=BOSS, wait_seconds=60
    )
    assert commander.outcomes(waiting)[0].state is CommandState.WAITING
    async with node_rig(
        tmp_path, rig, config=configured(commands={"profiles": [TEST_PROFILE]}, node={"name": "paper"})
    ):
        async with asyncio.timeout(60):
            (outcome,) = await commander.finished(waiting)
    assert outcome.state is CommandState.OK
    assert outcome.answer is not None
    assert outcome.answer.stdout == b"back\n"


async def test_a_board_that_does_not_exist_is_refused_before_anything_is_written(rig: BoardsRig) -> None:
    with pytest.raises(NotFound):
        await rig.domain.nodes.commander.execute(BoardProgram(command="/bin/echo"), [99], asked=BOSS)

    assert not rig.store.list(COMMAND)


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (BoardProgram(command=" "), "command"),
        (BoardProgram(command="a\0b"), "command"),
        (BoardProgram(command="x" * 5000), "command"),
        (BoardProgram(command="x", args=("a",) * 257), "args"),
        (BoardProgram(command="x", args=("a" * 5000,)), "args"),
        (BoardProgram(command="x", timeout_seconds=0), "timeout_seconds"),
        (BoardProgram(command="x", timeout_seconds=301), "timeout_seconds"),
        (BoardProgram(command="x", stdin=b"x" * 65_537), "stdin"),
        (BoardProgram(command="x", max_output_bytes=-1), "max_output_bytes"),
        (BoardProgram(command="x", environment={str(n): "" for n in range(65)}), "environment"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_field(order: BoardProgram, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        order.checked()
    assert error.value.field == field


async def test_who_asked_stands_in_both_audits(rig: BoardsRig, node: NodeRig) -> None:
    await ran(rig, number_of(node), "/bin/echo", "x")

    entries = [entry for entry in node.audited() if str(entry.get("event", "")).startswith("command")]
    assert entries
    assert all("operator/boss" in str(entry) for entry in entries)
    (command,) = rig.store.list(COMMAND)
    assert command.spec.actor == "operator/boss"


# With a double, for what no agent would do.


async def test_a_board_has_two_commands_at_once_and_the_others_follow(rig: BoardsRig) -> None:
    commander, member, slow = rig.domain.nodes.commander, await rig.join("slow"), SlowNode()
    await served(rig, member, slow)
    issued = [
        await commander.execute(BoardProgram(command="x"), [member.number], asked=BOSS) for _ in range(5)
    ]
    await until(lambda: slow.under_way == 2)
    assert [commander.outcomes(one)[0].state for one in issued].count(CommandState.WAITING) == 3

    slow.let_go.set()

    outcomes = [(await commander.finished(one))[0] for one in issued]
    assert {outcome.state for outcome in outcomes} == {CommandState.OK}
    assert slow.most == 2


async def test_no_more_calls_than_allowed_go_out_and_every_board_gets_its_turn(
    rig: BoardsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commander, slow = rig.domain.nodes.commander, SlowNode()
    monkeypatch.setattr(commander.courier, "at_once", 3)
    members = [await rig.join(f"slow-{number}") for number in range(8)]
    for member in members:
        await served(rig, member, slow)
    issued = await commander.execute(
        BoardProgram(command="x"), [member.number for member in members], asked=BOSS
    )
    await until(lambda: slow.under_way == 3)
    slow.let_go.set()

    outcomes = await commander.finished(issued)

    assert [outcome.state for outcome in outcomes] == [CommandState.OK] * 8
    assert slow.most == 3


async def test_the_role_of_who_asked_and_the_commands_id_travel_with_it(rig: BoardsRig) -> None:
    commander, member, slow = rig.domain.nodes.commander, await rig.join("slow"), SlowNode()
    await served(rig, member, slow)
    slow.let_go.set()
    issued = await commander.execute(
        BoardProgram(command="x", profile="diagnostics"),
        [member.number],
        asked=CallOrigin(actor="operator/jürgen\n", role=ADMIN),
    )
    await commander.finished(issued)

    (request, metadata) = slow.seen[0]
    assert request.request_id == issued.name
    assert request.profile == "diagnostics"
    assert metadata["fleetplane-role"] == "boards.admin"
    assert metadata["fleetplane-actor"] == "operator/j\\xfcrgen?"
    assert VIEWER not in metadata.values()


async def test_a_command_that_ran_out_of_time_is_told_from_one_that_failed(rig: BoardsRig) -> None:
    commander, member, slow = rig.domain.nodes.commander, await rig.join("slow"), SlowNode()
    await served(rig, member, slow)
    slow.let_go.set()
    slow.answer = pb.CommandResponse(timed_out=True, signal=15, message="took too long")

    (outcome,) = await commander.finished(
        await commander.execute(BoardProgram(command="x"), [member.number], asked=BOSS)
    )

    assert outcome.state is CommandState.TIMED_OUT
    assert outcome.answer is not None
    assert outcome.answer.signal == 15


async def test_a_command_under_way_when_the_server_dies_has_failed_and_is_not_sent_again(
    tmp_path: Path,
) -> None:
    slow = SlowNode()
    async with boards_rig(tmp_path, options=BoardOptions()) as rig:
        member = await rig.join("slow")
        await served(rig, member, slow)
        commander = rig.domain.nodes.commander
        issued = await commander.execute(BoardProgram(command="x"), [member.number], asked=BOSS)
        await until(lambda: slow.under_way == 1)

    async with boards_rig(tmp_path, options=BoardOptions()) as rig:
        (outcome,) = await rig.domain.nodes.commander.finished(issued)

    assert outcome.state is CommandState.FAILED
    assert len(slow.seen) == 1
