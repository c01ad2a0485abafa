"""Programs that are really run: what they say, how they are stopped, and that nobody is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from edge_server_double import until

from fleetplane.domains.edge.agent import processes
from fleetplane.domains.edge.agent.processes import Ended, Program
from fleetplane.domains.edge.agent.tools.contract import Channel


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[Channel, bytes]] = []

    async def emit(self, channel: Channel, data: bytes) -> None:
        self.heard.append((channel, data))

    def of(self, channel: Channel) -> bytes:
        return b"".join(data for where, data in self.heard if where is channel)


def shell(text: str, folder: Path | None = None) -> Program:
    return Program(
        path="/bin/sh",
        arguments=["-c", text],
        folder=str(folder or "/"),
        environment={"PATH": os.environ["PATH"]},
    )


async def run(program: Program, *, limit: int = 1 << 20, term_seconds: float = 5.0) -> tuple[Ended, Listener]:
    listener = Listener()
    async with asyncio.timeout(30):
        ended = await processes.run(
            program, listener.emit, output_limit_bytes=limit, term_seconds=term_seconds
        )
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
    assert listener.of(Channel.STDOUT) == bytes(range(256)) * 1000
    assert listener.of(Channel.STDERR) == "\xff oops".encode()
    assert ended.stdout == (bytes(range(256)) * 1000)[-processes.TAIL_BYTES :]


async def test_what_is_beyond_the_limit_is_read_and_thrown_away() -> None:
    ended, listener = await run(shell("head -c 5000000 /dev/zero; echo end >&2"), limit=100_000)
    assert ended.exit_code == 0
    assert len(listener.of(Channel.STDOUT)) + len(listener.of(Channel.STDERR)) == 100_000
    assert ended.dropped_bytes == 5_000_004 - 100_000
    assert ended.stderr == b"end\n"
    assert len(ended.stdout) == processes.TAIL_BYTES


async def test_a_signal_is_told_apart_from_an_exit_code() -> None:
    ended, _ = await run(shell("kill -9 $$"))
    assert (ended.exit_code, ended.signal) == (-1, 9)
    ended, _ = await run(shell("exit 3"))
    assert (ended.exit_code, ended.signal) == (3, 0)


async def test_its_input_is_empty_and_its_session_its_own() -> None:
    ended, _ = await run(shell("cat; ps -o sid= -p $$ || cat /proc/$$/stat"))
    assert str(os.getsid(0)) not in ended.stdout.decode().split()


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
    running = asyncio.ensure_future(run(program, term_seconds=0.3))
    await until(lambda: (tmp_path / "leader").exists() and (tmp_path / "leader").read_text().strip())
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert 0.25 < time.monotonic() - began < 5
    assert not alive(int((tmp_path / "leader").read_text()))


async def test_whoever_listens_to_term_may_tidy_up(tmp_path: Path) -> None:
    trap = f"trap 'echo tidy > {tmp_path}/tidied; exit 0' TERM"
    program = shell(f"{trap}; echo > {tmp_path}/up; while true; do sleep 0.1; done")
    running = asyncio.ensure_future(run(program))
    await until((tmp_path / "up").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "tidied").read_text() == "tidy\n"


async def test_what_is_left_in_the_group_ends_with_the_program(tmp_path: Path) -> None:
    ended, _ = await run(shell(f"sleep 300 & echo $! > {tmp_path}/left; echo done"))
    assert ended.stdout == b"done\n"
    assert not alive(int((tmp_path / "left").read_text()))


async def test_slow_listeners_hold_the_program_up_and_lose_nothing() -> None:
    heard = bytearray()

    async def slowly(channel: Channel, data: bytes) -> None:
        await asyncio.sleep(0.05)
        heard.extend(data)

    ended = await processes.run(shell("head -c 1000000 /dev/zero"), slowly, output_limit_bytes=1 << 30)
    assert (ended.exit_code, len(heard)) == (0, 1_000_000)


async def test_a_program_that_cannot_be_started_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await run(Program(path=str(tmp_path / "nothing"), arguments=[], folder="/", environment={}))
