"""Real programs under the guard: limits, outputs, users, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.boards.boards_rig import until
from support.shared.processes_seen import gone, with_mark

from fleetplane.domains.boards.agent.commands import commands as command_runs
from fleetplane.domains.boards.agent.commands.commands import ProgramEnd
from fleetplane.domains.boards.agent.commands.rules import ProgramJob
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied, SettingsError, Unavailable
from fleetplane.node.programs import run as program_run
from fleetplane.node.programs.containment import Containment
from fleetplane.node.programs.run import Ends, KeptOutput

SH = "/bin/sh"
AS_ROOT = os.geteuid() == 0


def job(program: str, *arguments: str, **more: Any) -> ProgramJob:
    facts: dict[str, Any] = {
        "program": program,
        "arguments": arguments,
        "profile": "",
        "timeout_seconds": 60,
        "output_bytes": 4096,
        "working_dir": "/",
        "environment": {},
        "stdin": b"",
        "run_as": "nobody",
    }
    return ProgramJob(**{**facts, **more})


async def run(made: ProgramJob, *, processes: int = 16, memory_bytes: int = 256 << 20) -> ProgramEnd:
    return await command_runs.run(made, processes=processes, memory_bytes=memory_bytes)


async def test_outputs_and_code_come_back() -> None:
    ended = await run(job(SH, "-c", "echo out; echo err >&2; exit 3"))
    assert (ended.exit_code, ended.signal, ended.timed_out) == (3, 0, False)
    assert (ended.stdout, ended.stderr) == (b"out\n", b"err\n")
    assert not ended.stdout_truncated


async def test_bytes_stay_bytes() -> None:
    ended = await run(job("/usr/bin/printf", r"\377\000\n"))
    assert ended.stdout == b"\xff\x00\n"


async def test_a_signal_is_told_from_a_code() -> None:
    ended = await run(job(SH, "-c", "kill -SEGV $$"))
    assert (ended.exit_code, ended.signal) == (-1, signal.SIGSEGV)


async def test_the_environment_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "x")
    ended = await run(job("/usr/bin/env", environment={"TERM": "dumb"}))
    names = {line.partition(b"=")[0] for line in ended.stdout.splitlines()}
    assert names == {b"PATH", b"LANG", b"HOME", b"TERM"}


async def test_arguments_are_not_a_shells() -> None:
    ended = await run(job("/bin/echo", "$(id)", "; id", "`id`", "\n", "*", "&& id"))
    assert ended.stdout == b"$(id) ; id `id` \n * && id\n"


async def test_no_descriptor_of_ours_is_left_open_in_the_program() -> None:
    ended = await run(job("/bin/ls", "/proc/self/fd"))
    assert ended.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the folder it lists


async def test_input_is_fed_and_ends() -> None:
    assert (await run(job("/bin/cat", stdin=b"abc" * 10_000, output_bytes=100_000))).stdout == b"abc" * 10_000
    assert (await run(job("/bin/cat"))).stdout == b""


async def test_a_program_need_not_read_its_input() -> None:
    assert (await run(job("/bin/true", stdin=b"x" * 65_536))).exit_code == 0


@pytest.mark.skipif(not AS_ROOT, reason="only root can become someone else")
async def test_root_is_given_up_with_all_groups_and_for_good() -> None:
    ended = await run(job(SH, "-c", "id -u; id -G; grep -E 'NoNewPrivs|CapEff' /proc/self/status"))
    uid, groups, no_new, capabilities = ended.stdout.decode().splitlines()
    assert uid == "65534"
    assert groups == "65534"
    assert sorted((no_new.split()[1], capabilities.split()[1])) == ["0000000000000000", "1"]


@pytest.mark.skipif(not AS_ROOT, reason="only root can become someone else")
async def test_a_user_that_does_not_exist_stops_the_run() -> None:
    with pytest.raises(SettingsError, match="no user"):
        await run(job("/bin/true", run_as="nobody-of-that-name"))


async def test_of_a_flood_the_beginning_and_the_end_are_kept() -> None:
    script = "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"
    ended = await run(job(SH, "-c", script, output_bytes=1000))
    assert ended.stdout.startswith(b"begin\nxxx")
    assert ended.stdout.endswith(b"xxx\nend\n")
    assert b"bytes left out" in ended.stdout
    assert len(ended.stdout) < 1100
    assert ended.stdout_truncated
    assert not ended.stderr_truncated
    assert ended.output_bytes == 3_000_011


def time_runs_out(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], object]) -> None:
    """Then, and not by the clock: a program may take its time to get there."""

    async def timed_out(*_: object) -> bool:
        await until(condition)
        return True

    monkeypatch.setattr(program_run, "_timed_out", timed_out)


async def test_time_runs_out_politely(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_runs, "Containment", partial(Containment, term_seconds=60.0))
    time_runs_out(monkeypatch, lambda: list(with_mark(f"sleep\0{mark}")))
    ended = await run(job(SH, "-c", f"trap 'echo asked; exit 0' TERM; while :; do sleep {mark}; done"))
    assert ended.timed_out
    assert ended.stdout == b"asked\n"


async def test_who_does_not_listen_is_killed(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_runs_out(monkeypatch, lambda: list(with_mark(f"sleep\0{mark}")))
    ended = await run(job(SH, "-c", f"trap '' TERM; while :; do sleep {mark}; done"))
    assert ended.timed_out
    assert ended.signal == signal.SIGKILL
    assert gone(mark)


async def test_what_a_program_leaves_behind_ends_with_it(mark: str) -> None:
    ended = await run(
        job(SH, "-c", f"sleep {mark} & setsid sleep {mark} & (setsid sleep {mark} &) ; echo done")
    )
    assert ended.stdout == b"done\n"
    assert ended.exit_code == 0
    assert gone(mark)


async def test_cancelling_ends_everything_even_what_got_away(mark: str) -> None:
    script = f"(setsid setsid sleep {mark} &); trap '' TERM; while :; do sleep {mark}; done"
    running = asyncio.create_task(run(job(SH, "-c", script)))
    await until(lambda: len(list(with_mark(f"sleep\0{mark}"))) >= 2)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert gone(mark)


async def test_a_fork_bomb_meets_its_limit_and_is_swept_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bomb"
    script.write_text("#!/bin/bash\nbomb() { bomb | bomb & }; bomb; sleep 30\n")
    script.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):  # the unprivileged user must get there
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    most, kept = 0, list[KeptOutput]()

    def keeping(limit_bytes: int) -> KeptOutput:
        kept.append(KeptOutput(limit_bytes))
        return kept[0]

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(list(with_mark(str(script)))))
            await asyncio.sleep(0.02)

    monkeypatch.setattr(command_runs, "KeptOutput", keeping)
    time_runs_out(monkeypatch, lambda: most > 0 and b"Resource temporarily" in bytes(kept[0].stderr))
    watching = asyncio.create_task(watch())
    # Limits are of all that a user runs, and programs of other tests run as nobody.
    ended = await run(job(str(script), run_as="games"), processes=16)
    watching.cancel()

    assert ended.timed_out or ended.exit_code
    assert b"Resource temporarily unavailable" in ended.stderr
    assert 1 <= most <= 20
    assert gone(str(script))


async def test_memory_is_bounded() -> None:
    ended = await run(job("/usr/bin/python3", "-c", "x = bytearray(200 << 20)"), memory_bytes=64 << 20)
    assert ended.exit_code != 0
    assert b"MemoryError" in ended.stderr


async def test_files_are_bounded(tmp_path: Path) -> None:
    target = tmp_path / "big"
    target.touch()
    target.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    await run(job(SH, "-c", f"head -c 5000000 /dev/zero > {target}"))
    assert target.stat().st_size <= command_runs.FILE_LIMIT_BYTES


async def test_a_program_that_is_not_there_or_none_is_told() -> None:
    with pytest.raises(FailedPrecondition, match="No such file"):
        await run(job("/usr/bin/no-such-program"))
    with pytest.raises(FailedPrecondition, match="is no file"):
        await run(job("/usr/bin"))


async def test_a_program_that_others_can_rewrite_is_not_run(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o777)
    with pytest.raises(PermissionDenied, match="replaced"):
        await run(job(str(program)))


async def test_a_program_that_cannot_be_executed_is_told(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("nothing executable")
    program.chmod(0o600)
    with pytest.raises(Unavailable, match="could not be started"):
        await run(job(str(program)))


async def test_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(Unavailable, match="could not be started"):
        await run(job("/bin/true", working_dir="/no/such/folder"))


def test_the_ends_of_an_output_are_exact() -> None:
    ends = Ends(5)
    for byte in b"abcdefghij":
        ends.add(bytes([byte]))
    assert bytes(ends).startswith(b"abc")
    assert bytes(ends).endswith(b"ij")
    assert ends.truncated

    whole = Ends(10)
    whole.add(b"abcdefghij")
    assert bytes(whole) == b"abcdefghij"
    assert not whole.truncated
