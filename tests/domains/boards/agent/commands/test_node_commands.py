"""Commands on a node over mTLS: what is run, what is refused, what is killed, what is written down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, until
from support.boards.node_calls import (
    CODE,
    COMMANDS,
    command,
    failing,
)
from support.shared.processes_seen import gone, with_mark

from fleetplane.gen.boards import boards_pb2 as pb


async def test_nothing_is_run_unless_the_owner_allows_it(tmp_path: Path, server: BoardsRig) -> None:
    async with node_rig(tmp_path, server) as rig:
        for stub in (await rig.node(), await rig.node_of("boards.admin")):
            failure = await failing(stub.ExecuteCommand(pb.CommandRequest(command="/usr/bin/id")))
            assert (failure.code, failure.cause) == (CODE.PERMISSION_DENIED, "off")
        events = [(entry["event"], entry["user"], entry["command"]) for entry in rig.audited()]
        assert events == [
            ("command_refused", "board-controller/main", "/usr/bin/id"),
            ("command_refused", "operator/boss", "/usr/bin/id"),
        ]


async def test_a_program_that_fails_is_an_answer_and_one_that_is_refused_an_error(rig: NodeRig) -> None:
    node = await rig.node()
    failed = await node.ExecuteCommand(command("echo out; echo err >&2; exit 4"))
    assert (failed.success, failed.exit_code, failed.reason) == (False, 4, "EXIT_CODE")
    assert (failed.stdout, failed.stderr) == (b"out\n", b"err\n")
    assert failed.duration.ToMilliseconds() > 0
    late = await node.ExecuteCommand(command("sleep 60", timeout_seconds=1))
    assert (late.success, late.timed_out, late.reason) == (False, True, "TIMED_OUT")
    refused = await failing(node.ExecuteCommand(pb.CommandRequest(command="reboot")))
    assert (refused.code, refused.cause) == (CODE.PERMISSION_DENIED, "program")
    odd = await failing(node.ExecuteCommand(pb.CommandRequest(command="echo", args=["$(id)"])))
    assert (odd.code, odd.cause) == (CODE.PERMISSION_DENIED, "arguments")


@pytest.mark.parametrize(
    "said",
    [
        {"command": "sh", "args": ["-c", "x"], "timeout_seconds": -1},
        {"command": "sh", "args": ["-c", "x"], "timeout_seconds": 1000},
        {"command": "sh", "args": ["-c", "x"], "max_output_bytes": -1},
        {"command": "sh", "args": ["-c", "x"], "max_output_bytes": 1 << 40},
        {"command": ""},
        {"command": "sh", "args": ["-c", "a\0b"]},
        {"command": "sh", "args": ["x"] * 100},
    ],
)
async def test_requests_that_cannot_be_are_invalid(rig: NodeRig, said: dict[str, Any]) -> None:
    failure = await failing((await rig.node()).ExecuteCommand(pb.CommandRequest(**said)))
    assert failure.code is CODE.INVALID_ARGUMENT


async def test_the_environment_cannot_be_used_to_get_in(rig: NodeRig) -> None:
    node = await rig.node()
    for name in ("LD_PRELOAD", "PATH", "BASH_ENV", "ENV"):
        failure = await failing(node.ExecuteCommand(command("env", environment={name: "/tmp/x"})))
        assert (failure.code, failure.cause) == (CODE.PERMISSION_DENIED, "environment")


async def test_cancelling_the_call_kills_all_of_it(rig: NodeRig, mark: str) -> None:
    node = await rig.node()
    call = node.ExecuteCommand(command(f"trap '' TERM; setsid sleep {mark} & sleep {mark}; sleep {mark}"))
    await until(lambda: len(list(with_mark(f"sleep\0{mark}"))) >= 2)
    call.cancel()
    await until(lambda: gone(mark))
    await until(lambda: [one for one in rig.audited() if one["event"] == "command_failed"])


async def test_a_deadline_kills_too(rig: NodeRig, mark: str) -> None:
    failure = await failing((await rig.node()).ExecuteCommand(command(f"sleep {mark}"), timeout=0.5))
    assert failure.code is CODE.DEADLINE_EXCEEDED
    await until(lambda: gone(mark))


async def test_the_third_at_once_is_told_to_wait(rig: NodeRig, mark: str) -> None:
    node = await rig.node()
    running = [node.ExecuteCommand(command(f"sleep {mark}")) for _ in range(2)]
    await until(lambda: len(list(with_mark(f"sleep\0{mark}"))) == 2)
    failure = await failing(node.ExecuteCommand(command("true")))
    assert (failure.code, failure.cause) == (CODE.RESOURCE_EXHAUSTED, "concurrency")
    for call in running:
        call.cancel()
    await until(lambda: gone(mark))
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await node.ExecuteCommand(command("true"))).success
                return
            except grpc.aio.AioRpcError as error:
                assert error.code() is CODE.RESOURCE_EXHAUSTED
                await asyncio.sleep(0.02)


async def test_the_same_request_runs_once_and_a_lost_one_never_twice(
    rig: NodeRig, tmp_path: Path, mark: str
) -> None:
    node = await rig.node()
    once = command("date +%N", request_id="c1")
    first, second = await asyncio.gather(node.ExecuteCommand(once), node.ExecuteCommand(once))
    assert first == second
    assert (await node.ExecuteCommand(once)).stdout == first.stdout

    lost = command(f"sleep {mark}", request_id="c2")
    call = node.ExecuteCommand(lost)
    await until(lambda: not gone(mark))
    call.cancel()
    await until(lambda: gone(mark))
    await until(lambda: [one for one in rig.audited() if one["event"] == "command_failed"])
    again = await failing(node.ExecuteCommand(lost))
    assert (again.code, again.cause) == (CODE.ABORTED, "cut-short")


async def test_who_asked_is_written_down_and_secrets_are_not(tmp_path: Path, server: BoardsRig) -> None:
    config = configured(commands=COMMANDS, logs={"redact": ["token=[a-z0-9]+"]})
    async with node_rig(tmp_path, server, config=config) as rig:
        node = await rig.node()
        await node.ExecuteCommand(
            command("true token=abc123", request_id="r9"), metadata=[("fleetplane-actor", "operator/ada")]
        )
        begun, ended = rig.audited()
        assert (begun["event"], ended["event"], ended["exit_code"]) == ("command_begun", "command_ended", 0)
        for entry in (begun, ended):
            assert entry["user"] == "board-controller/main"
            assert entry["on_behalf_of"] == "operator/ada"
            assert entry["request_id"] == "r9"
            assert entry["args"] == ["-c", "true [redacted]"]
            assert entry["peer"].startswith("ipv4:127.0.0.1:")
        assert rig.folder.audit.stat().st_mode & 0o777 == 0o600


async def test_without_an_audit_log_nothing_is_run(rig: NodeRig) -> None:
    rig.folder.audit.unlink(missing_ok=True)
    rig.folder.audit.mkdir()
    failure = await failing((await rig.node()).ExecuteCommand(command("true")))
    assert (failure.code, failure.cause) == (CODE.UNAVAILABLE, "audit")
    health = await (await rig.node()).HealthCheck(pb.Empty())
    assert health.status == "FAILED"


async def test_free_commands_are_for_admins_where_the_owner_says_so(
    tmp_path: Path, server: BoardsRig
) -> None:
    free = pb.CommandRequest(command="/bin/echo", args=["free"])
    as_admin = [("fleetplane-actor", "operator/ada"), ("fleetplane-role", "boards.admin")]
    as_operator = [("fleetplane-actor", "operator/bob"), ("fleetplane-role", "boards.operator")]
    async with node_rig(tmp_path, server, config=configured(commands={"free": "admins"})) as rig:
        assert (await (await rig.node_of("boards.admin")).ExecuteCommand(free)).stdout == b"free\n"
        assert (await failing((await rig.node_of("boards.operator")).ExecuteCommand(free))).cause == "program"
        assert (await failing((await rig.node()).ExecuteCommand(free, metadata=as_admin))).cause == "program"
    async with node_rig(tmp_path, server, config=configured(commands={"free": "controllers"})) as rig:
        node = await rig.node()
        assert (await node.ExecuteCommand(free, metadata=as_admin)).success
        assert (await failing(node.ExecuteCommand(free, metadata=as_operator))).cause == "program"
        assert (await failing(node.ExecuteCommand(free))).cause == "program"


async def test_the_largest_answer_fits_a_message(rig: NodeRig) -> None:
    script = "head -c 5000000 /dev/urandom; head -c 5000000 /dev/urandom >&2"
    answer = await (await rig.node()).ExecuteCommand(command(script, max_output_bytes=1 << 20))
    assert answer.stdout_truncated
    assert answer.stderr_truncated
    assert len(answer.stdout) <= (1 << 20) + 64
