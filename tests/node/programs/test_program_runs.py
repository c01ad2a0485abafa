"""Programs that are really run: what they say, how they are stopped, and that nobody is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, Program
from fleetplane.node.programs.run import TAIL_BYTES, KeptOutput, ProgramExit, ProgramStream, Streamed

PATIENT = Containment(term_seconds=60.0)
"""Whoever listens to TERM has the time to do so, however busy the machine is."""


class Listener:
    def __init__(self, limit_bytes: int) -> None:
        self.heard: list[tuple[ProgramStream, bytes]] = []
        self.output = Streamed(self.emit, limit_bytes=limit_bytes)

    async def emit(self, channel: ProgramStream, data: bytes) -> None:
        self.heard.append((channel, data))

    @property
    def stdout(self) -> bytes:
        return bytes(self.output.stdout)

    def of(self, channel: ProgramStream) -> bytes:
        return b"".join(data for where, data in self.heard if where is channel)


def shell(text: str, folder: Path | None = None) -> Program:
    return Program(
        path="/bin/sh",
        arguments=["-c", text],
        folder=str(folder or "/"),
        environment={"PATH": os.environ["PATH"]},
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def run(
    program: Program, *, limit: int = 1 << 20, containment: Containment | None = None
) -> tuple[ProgramExit, Listener]:
    listener = Listener(limit)
    async with asyncio.timeout(60):
        ended = await programs.run(program, containment or Containment(), listener.output)
    return ended, listener


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_both_outputs_come_whole_and_any_byte_may_be_in_them() -> None:
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000); sys.stderr.write('\\xff oops')"
    ended, listener = await run(
        Program(path=sys.executable, arguments=["-c", script], folder="/", environment={})
    )
    assert ended.exit_code == 0
    assert listener.of(ProgramStream.STDOUT) == bytes(range(256)) * 1000
    assert listener.of(ProgramStream.STDERR) == "\xff oops".encode()
    assert listener.stdout == (bytes(range(256)) * 1000)[-TAIL_BYTES:]


async def test_what_is_beyond_the_limit_is_read_and_thrown_away() -> None:
    ended, listener = await run(shell("head -c 5000000 /dev/zero; echo end >&2"), limit=100_000)
    assert ended.exit_code == 0
    assert len(listener.of(ProgramStream.STDOUT)) + len(listener.of(ProgramStream.STDERR)) == 100_000
    assert listener.output.dropped_bytes == 5_000_004 - 100_000
    assert bytes(listener.output.stderr) == b"end\n"
    assert len(listener.stdout) == TAIL_BYTES


async def test_a_signal_is_told_apart_from_an_exit_code() -> None:
    ended, _ = await run(shell("kill -9 $$"))
    assert (ended.exit_code, ended.signal) == (-1, 9)
    ended, _ = await run(shell("exit 3"))
    assert (ended.exit_code, ended.signal) == (3, 0)


async def test_its_input_is_empty_and_its_session_its_own() -> None:
    _, listener = await run(shell("cat; ps -o sid= -p $$ || cat /proc/$$/stat"))
    assert str(os.getsid(0)) not in listener.stdout.decode().split()


async def test_cancelled_it_ends_the_whole_group_and_says_so_only_then(tmp_path: Path) -> None:
    program = shell(f"sleep 300 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/leader; wait")
    running = asyncio.ensure_future(run(program))
    await until(lambda: (tmp_path / "leader").exists() and (tmp_path / "leader").read_text().strip())
    pids = [int((tmp_path / name).read_text()) for name in ("child", "leader")]
    assert all(alive(pid) for pid in pids)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(alive(pid) for pid in pids)


async def test_whoever_does_not_listen_to_term_is_killed(tmp_path: Path) -> None:
    program = shell(f"trap '' TERM; echo $$ > {tmp_path}/leader; while true; do sleep 0.1; done")
    running = asyncio.ensure_future(run(program, containment=Containment(term_seconds=0.3)))
    await until(lambda: (tmp_path / "leader").exists() and (tmp_path / "leader").read_text().strip())
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began > 0.25
    assert not alive(int((tmp_path / "leader").read_text()))


async def test_whoever_listens_to_term_may_tidy_up(tmp_path: Path) -> None:
    trap = f"trap 'echo tidy > {tmp_path}/tidied; exit 0' TERM"
    program = shell(f"{trap}; echo > {tmp_path}/up; while true; do sleep 0.1; done")
    running = asyncio.ensure_future(run(program, containment=PATIENT))
    await until((tmp_path / "up").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "tidied").read_text() == "tidy\n"


async def test_what_is_left_in_the_group_ends_with_the_program(tmp_path: Path) -> None:
    _, listener = await run(shell(f"sleep 300 & echo $! > {tmp_path}/left; echo done"))
    assert listener.stdout == b"done\n"
    assert not alive(int((tmp_path / "left").read_text()))


async def test_slow_listeners_hold_the_program_up_and_lose_nothing() -> None:
    heard = bytearray()

    async def slowly(channel: ProgramStream, data: bytes) -> None:
        await asyncio.sleep(0.05)
        heard.extend(data)

    output = Streamed(slowly, limit_bytes=1 << 30)
    ended = await programs.run(shell("head -c 1000000 /dev/zero"), Containment(), output)
    assert (ended.exit_code, len(heard)) == (0, 1_000_000)


async def test_a_program_that_cannot_be_started_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await run(Program(path=str(tmp_path / "nothing"), arguments=[], folder="/", environment={}))


DETACH = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    for descriptor in range(3):
        os.close(descriptor)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(300)
if os.fork() == 0:
    for descriptor in range(3):
        os.close(descriptor)
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(300)
while not all(os.path.exists(path) and open(path).read() for path in sys.argv[1:3]):
    time.sleep(0.01)
time.sleep(float(sys.argv[3]))
"""
"""One process in a session of its own, one that stays in the program's."""


def detaching(folder: Path, seconds: str) -> Program:
    words = ["-c", DETACH, str(folder / "left"), str(folder / "stayed"), seconds]
    return Program(path=sys.executable, arguments=words, environment={})


def pids(folder: Path) -> tuple[int, int]:
    return int((folder / "left").read_text()), int((folder / "stayed").read_text())


async def test_what_leaves_the_session_ends_with_the_program_unless_it_may_detach(tmp_path: Path) -> None:
    ended, _ = await run(detaching(tmp_path, "0"))
    assert ended.exit_code == 0
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_a_program_that_may_detach_leaves_only_what_left_its_session(tmp_path: Path) -> None:
    ended, _ = await run(detaching(tmp_path, "0"), containment=Containment(may_detach=True))
    left, stayed = pids(tmp_path)
    try:
        assert (ended.exit_code, alive(left), alive(stayed)) == (0, True, False)
    finally:
        os.kill(left, signal.SIGKILL)


async def test_cancelling_a_program_that_may_detach_ends_the_program_and_its_session(tmp_path: Path) -> None:
    running = asyncio.ensure_future(run(detaching(tmp_path, "300"), containment=Containment(may_detach=True)))
    await until(lambda: all((tmp_path / name).exists() for name in ("left", "stayed")))
    await until(lambda: all((tmp_path / name).read_text() for name in ("left", "stayed")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    left, stayed = pids(tmp_path)
    try:
        assert (alive(left), alive(stayed)) == (True, False)
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(("contained", "flag"), [(True, b"1"), (False, b"0")])
async def test_new_privileges_are_the_containments_choice(contained: bool, flag: bytes) -> None:
    wanted = Containment(no_new_privileges=contained)
    _, listener = await run(shell("grep NoNewPrivs /proc/self/status"), containment=wanted)
    assert listener.stdout.split()[1] == flag


async def test_the_last_words_of_a_program_whose_time_ran_out_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, timed_out = KeptOutput(4096), programs._timed_out

    async def once_it_is_up(guarded: asyncio.subprocess.Process, seconds: float | None) -> bool:
        """However long its start takes, its time does not run out before it listens."""
        await until(lambda: bytes(kept.stdout) == b"up\n")
        return await timed_out(guarded, seconds)

    monkeypatch.setattr(programs, "_timed_out", once_it_is_up)
    script = "trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    ended = await programs.run(shell(script), PATIENT, kept, timeout_seconds=0.1)
    assert (ended.timed_out, ended.exit_code, bytes(kept.stdout)) == (True, 0, b"up\nasked\n")


async def test_input_is_fed_to_the_program_while_its_output_is_read() -> None:
    kept = KeptOutput(1 << 20)
    program = Program(path="/bin/cat", arguments=[], environment={}, stdin=b"x" * 500_000)
    ended = await programs.run(program, Containment(), kept)
    assert (ended.exit_code, kept.stdout.total) == (0, 500_000)


async def test_a_guard_that_was_killed_takes_its_program_along(tmp_path: Path) -> None:
    program = shell(f"echo $PPID > {tmp_path}/guard; echo $$ > {tmp_path}/leader; sleep 300")
    running = asyncio.ensure_future(run(program))
    await until(lambda: (tmp_path / "leader").exists() and (tmp_path / "leader").read_text().strip())
    os.kill(int((tmp_path / "guard").read_text()), signal.SIGKILL)
    ended, _ = await running
    assert (ended.is_known, ended.signal) == (False, signal.SIGKILL)
    await until(lambda: not alive(int((tmp_path / "leader").read_text())))


@pytest.mark.parametrize("steps", range(1, 5))
async def test_a_guard_that_ends_as_its_time_does_is_no_error(steps: int) -> None:
    """The loop is held up so that it sees both at once, some steps after the guard's end was noticed."""
    guarded = await asyncio.create_subprocess_exec("/bin/sleep", "300")
    waiting = asyncio.create_task(programs._wait(guarded, 0.3))
    await asyncio.sleep(0)
    os.kill(guarded.pid, signal.SIGKILL)
    time.sleep(0.2)  # noqa: ASYNC251  # the loop does nothing meanwhile
    for _ in range(steps):
        await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251
    await waiting
    assert guarded.returncode is not None  # how it ended only who looks first is told, which may be the kill
