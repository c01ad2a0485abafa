"""Logs from files, the journal and the agent itself: filters, cursors, rotation, and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.boards.boards_rig import until
from support.boards.journal_double import JournalDouble

from fleetplane.domains.boards.agent.logs import entries as log_entries
from fleetplane.domains.boards.agent.logs import entries as patterns
from fleetplane.domains.boards.agent.logs import logs
from fleetplane.domains.boards.agent.logs.entries import Level, LogEntry, Redaction, query
from fleetplane.domains.boards.agent.logs.journal import SystemJournal, parse
from fleetplane.domains.boards.agent.logs.logs import EntryTail, LogRing, Logs, Queue, RingReader
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)

AT = 1_700_000_000.0


def make_logs(
    *,
    journal: JournalDouble | None = None,
    files: dict[str, Path] | None = None,
    ring: LogRing | None = None,
    redact: tuple[str, ...] = (),
    keep_alive_seconds: float = 30.0,
) -> Logs:
    clock = SystemClock()
    return Logs(
        journal=SystemJournal(program=str(journal.program) if journal else "/no/journalctl"),
        ring=ring or LogRing(clock, run="r1"),
        files=files or {},
        clock=clock,
        redaction=Redaction.of(redact, field="redact"),
        hostname="pi-1",
        keep_alive_seconds=keep_alive_seconds,
    )


async def read(made: Logs, **wanted: Any) -> list[LogEntry]:
    async with asyncio.timeout(60):
        return [entry async for entry in made.stream(query(**wanted))]


async def messages(made: Logs, **wanted: Any) -> list[str]:
    return [entry.message for entry in await read(made, **wanted)]


@contextlib.asynccontextmanager
async def following(made: Logs, **wanted: Any) -> AsyncGenerator[AsyncGenerator[LogEntry, None], None]:
    async with contextlib.aclosing(made.stream(query(follow=True, **wanted))) as entries:
        yield entries


async def take(entries: AsyncGenerator[LogEntry, None], count: int) -> list[LogEntry]:
    async with asyncio.timeout(60):
        return [await anext(entries) for _ in range(count)]


# Filters.


def entry(message: str = "hello", **more: Any) -> LogEntry:
    return LogEntry(**{"at_ns": 100, "message": message, "source": "agent", "position": "1", **more})


@pytest.mark.parametrize(
    ("wanted", "found", "matches"),
    [
        ({"min_level": 4}, {"level": Level.WARNING}, True),
        ({"min_level": 4}, {"level": Level.NOTICE}, False),
        ({"min_level": 4}, {"level": Level.EMERGENCY}, True),
        ({"min_level": 2}, {}, True),  # what does not say counts as information
        ({"min_level": 3}, {}, False),
        ({"units": ("a", "b")}, {"unit": "b"}, True),
        ({"units": ("a",)}, {"unit": "c"}, False),
        ({"contains": "WORLD"}, {"message": "hello world"}, True),
        ({"contains": "world"}, {"message": "hello"}, False),
        ({"regex": "^h.*o$"}, {"message": "hello"}, True),
        ({"regex": "^x"}, {"message": "hello"}, False),
        ({"since_ns": 100}, {"at_ns": 100}, True),
        ({"since_ns": 101}, {"at_ns": 100}, False),
        ({"until_ns": 100}, {"at_ns": 100}, False),
        ({"until_ns": 101}, {"at_ns": 100}, True),
        ({"contains": "hello", "min_level": 5}, {"level": Level.INFO}, False),
    ],
)
def test_every_condition_must_hold(wanted: dict[str, Any], found: dict[str, Any], matches: bool) -> None:
    assert query(**wanted).wants(entry(**found)) is matches


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"min_level": 9}, "min_level"),
        ({"tail_lines": 10_001}, "tail_lines"),
        ({"tail_lines": -1}, "tail_lines"),
        ({"units": ("--file=/etc/shadow",)}, "units"),
        ({"units": ("a b",)}, "units"),
        ({"units": ("*",)}, "units"),
        ({"units": ("",)}, "units"),
        ({"units": ("x",) * 17}, "units"),
        ({"contains": "x" * 1025}, "contains"),
        ({"regex": "("}, "regex"),
        ({"regex": "x" * 513}, "regex"),
        ({"regex": r"(.{1,1000}){1000}"}, "regex"),
        ({"regex": r"(a)\1"}, "regex"),
        ({"regex": r"(?=a)"}, "regex"),
        ({"since_ns": 5, "until_ns": 5}, "until"),
        ({"sources": ("agent",) * 9}, "sources"),
        ({"cursor": "x" * 5000}, "cursor"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": "agent=1\n"}, "cursor"),
    ],
)
def test_a_filter_that_cannot_be_is_named(wanted: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        query(**wanted)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(a|a)*b", "(a*)*b", "(.*a){12}b", "^(([a-z])+.)+[A-Z]([a-z])+$"]
)
def test_patterns_made_to_hang_do_not(pattern: str) -> None:
    wanted = query(regex=pattern)
    for text in ("x" * 60_000, "a" * 60_000, "aX" * 30_000):
        assert wanted.wants(entry(text)) in (True, False)  # one that takes more than half a second raises


def test_without_a_safe_matcher_callers_have_no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LIBRARY", "no_such_library")
    with pytest.raises(Unimplemented):
        query(regex="a")
    assert patterns.compiled("a+", field="x", trusted=True).fullmatch("aa")


@given(st.text(max_size=300))
def test_no_pattern_ends_the_agent(pattern: str) -> None:
    with contextlib.suppress(InvalidArgument):
        query(regex=pattern).wants(entry("some text é \u2028 \U0001f600"))


# Files.


async def test_the_last_lines_of_a_file_with_levels_and_times(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text(
        "old\n2023-11-14T22:13:20Z ERROR it broke\n[2023-11-14 22:13:21,500] warning: hot\nplain\n"
    )
    found = await read(make_logs(files={"app": log}), sources=("file:app",), tail_lines=3)
    assert [one.message[-8:] for one in found] == ["it broke", "ing: hot", "plain"]
    assert [one.level for one in found] == [Level.ERROR, Level.WARNING, Level.UNSPECIFIED]
    assert found[0].at_ns == 1_700_000_000 * 10**9
    assert found[1].at_ns == 1_700_000_001_500_000_000
    assert {one.unit for one in found} == {"app"}
    assert {one.source for one in found} == {"file:app"}


async def test_a_cursor_resumes_after_its_entry_and_beats_since(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("".join(f"line {number}\n" for number in range(1500)))
    made = make_logs(files={"app": log})
    first = await read(made, sources=("file:app",), tail_lines=1000)
    assert first[0].message == "line 500"

    rest = await read(made, cursor=first[299].cursor, since_ns=2**62)

    assert [one.message for one in rest] == [f"line {number}" for number in range(800, 1500)]


async def test_a_wanted_line_far_from_the_end_is_found(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    with log.open("w") as file:
        file.write("needle one\n")
        file.writelines(f"hay {number} {'x' * 80}\n" for number in range(12_000))  # more than a megabyte
        file.write("needle two\n")
    made = make_logs(files={"app": log})
    assert await messages(made, sources=("file:app",), contains="needle") == ["needle one", "needle two"]
    assert await messages(made, sources=("file:app",), contains="needle", tail_lines=1) == ["needle two"]


async def test_following_survives_rotation_and_truncation(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    made = make_logs(files={"app": log})
    async with following(made, sources=("file:app",)) as entries:
        assert (await take(entries, 1))[0].message == "one"
        with log.open("a") as file:
            file.write("two\nthr")
        assert (await take(entries, 1))[0].message == "two"
        with log.open("a") as file:
            file.write("ee\n")
        log.rename(tmp_path / "app.log.1")
        log.write_text("four\n")
        assert [one.message for one in await take(entries, 2)] == ["three", "four"]
        log.write_text("5\n")
        assert (await take(entries, 1))[0].message == "5"


async def test_what_was_rotated_out_of_reach_is_a_gap(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    made = make_logs(files={"app": log})
    (one,) = await read(made, sources=("file:app",))
    replacement = tmp_path / "new"
    replacement.write_text("two\n")
    replacement.rename(log)
    (two,) = await read(made, cursor=one.cursor)
    assert (two.message, two.fields) == ("two", {"gap": "true"})


async def test_another_file_with_the_same_inode_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    made = make_logs(files={"app": log})
    (one,) = await read(made, sources=("file:app",))
    log.write_text("other and longer\nmore\n")  # what a reused inode looks like
    found = await read(made, cursor=one.cursor)
    assert [(entry.message, entry.fields) for entry in found] == [
        ("other and longer", {"gap": "true"}),
        ("more", {}),
    ]


async def test_a_cursor_of_an_older_agent_and_of_a_file_that_grew_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\n")
    made = make_logs(files={"app": log})
    (one,) = await read(made, sources=("file:app",))
    with log.open("a") as file:
        file.write("two\n")  # the first bytes are more than they were
    older = one.cursor.rpartition(":")[0]
    assert older.count(":") == one.cursor.count(":") - 1
    for cursor in (one.cursor, older):
        assert await messages(made, cursor=cursor) == ["two"]


async def test_a_cursor_does_not_show_what_the_log_says(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("password=hunter2\n")
    (one,) = await read(make_logs(files={"app": log}), sources=("file:app",))
    assert "hunter2" not in one.cursor
    assert b"hunter2".hex() not in one.cursor


async def test_long_lines_are_cut_and_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"x" * 200_000 + b"\n\xff\xfe\0bin\n")
    long, odd = await read(make_logs(files={"app": log}), sources=("file:app",))
    assert len(long.message) == log_entries.MESSAGE_LIMIT_BYTES
    assert long.fields == {"truncated": "true"}
    assert odd.message == "\ufffd\ufffd\ufffdbin"


@pytest.mark.parametrize(
    "source",
    ["file:/etc/shadow", "file:../../etc/shadow", "file:", "file:other", "/etc/shadow", "FILE:app", ""],
)
async def test_no_path_of_a_caller_is_ever_read(tmp_path: Path, source: str) -> None:
    log = tmp_path / "app.log"
    log.write_text("mine\n")
    made = make_logs(files={"app": log})
    with pytest.raises(InvalidArgument) as refused:
        await read(made, sources=(source,))
    assert refused.value.field == "sources"
    with contextlib.suppress(FleetplaneError):
        assert await messages(made, cursor=f"{source}=1:0") == []
        pytest.fail("a cursor opened something")


async def test_links_and_devices_are_not_logs(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("/etc/passwd")
    os.mkfifo(pipe)
    made = make_logs(files={"link": link, "pipe": pipe, "none": tmp_path / "none"})
    for source, error in (("link", Unavailable), ("pipe", FailedPrecondition), ("none", Unavailable)):
        with pytest.raises(error):
            await read(made, sources=(f"file:{source}",))


@pytest.mark.parametrize("cursor", ["file:app=x", "file:app=1", "file:app=-1:5", "file:app=1:2:3"])
async def test_a_cursor_that_is_none_of_ours_is_refused(tmp_path: Path, cursor: str) -> None:
    log = tmp_path / "app.log"
    log.write_text("x\n")
    with pytest.raises(InvalidArgument, match="cursor"):
        await read(make_logs(files={"app": log}), cursor=cursor)


# The journal.


@pytest.fixture
def journal(tmp_path: Path) -> JournalDouble:
    return JournalDouble(tmp_path / "journal")


async def test_entries_of_the_journal_come_with_all_that_is_known(journal: JournalDouble) -> None:
    cursor = journal.add("it broke", PRIORITY="3", SYSLOG_IDENTIFIER="app")
    (found,) = await read(make_logs(journal=journal))
    assert (found.message, found.level, found.unit, found.pid) == (
        "it broke",
        Level.ERROR,
        "app.service",
        4711,
    )
    assert (found.source, found.hostname, found.cursor) == ("journal", "pi-1", f"journal={cursor}")
    assert found.at_ns == 1_700_000_000_000_001_000
    assert found.fields["SYSLOG_IDENTIFIER"] == "app"


async def test_choosing_is_left_to_journalctl_in_arguments_that_are_ours(journal: JournalDouble) -> None:
    journal.add("a")
    await read(
        make_logs(journal=journal),
        units=("b.service", "a.service"),
        min_level=4,
        current_boot_only=True,
        since_ns=int(AT * 1e9),
        until_ns=int((AT + 5) * 1e9),
        tail_lines=7,
        sources=("journal",),
    )
    (arguments,) = journal.calls()
    assert arguments[0:4] == ["--output=json", "--all", "--quiet", "--no-pager"]
    assert arguments[5:] == [
        "--priority=4",
        "--unit=a.service",
        "--unit=b.service",
        "--boot",
        "--since=@1700000000.000000",
        "--until=@1700000005.000000",
        "--lines=7",
    ]


async def test_a_text_is_looked_for_beyond_the_last_lines(journal: JournalDouble) -> None:
    journal.add("needle 1")
    for number in range(300):
        journal.add(f"hay {number}")
    journal.add("Needle 2")
    assert await messages(make_logs(journal=journal), contains="needle", tail_lines=5) == [
        "needle 1",
        "Needle 2",
    ]


async def test_following_goes_on_exactly_where_the_backlog_ended(journal: JournalDouble) -> None:
    journal.add("before")
    made = make_logs(journal=journal)
    async with following(made) as entries:
        assert (await take(entries, 1))[0].message == "before"
        journal.add("after 1")
        journal.add("after 2")
        found = await take(entries, 2)
    assert [one.message for one in found] == ["after 1", "after 2"]
    resumed = await messages(made, cursor=found[0].cursor)
    assert resumed == ["after 2"]


async def test_an_empty_journal_is_followed_from_now(journal: JournalDouble) -> None:
    made = make_logs(journal=journal)
    async with following(made) as entries:
        waiting = asyncio.create_task(anext(entries))
        await until(lambda: any("--follow" in call for call in journal.calls()))
        journal.add("first", at=AT * 2)
        assert (await waiting).message == "first"


async def test_the_child_goes_when_the_reader_does(journal: JournalDouble) -> None:
    journal.add("x")
    made = make_logs(journal=journal)
    async with following(made) as entries:
        await take(entries, 1)
        waiting = asyncio.create_task(anext(entries))
        await until(lambda: children(journal))
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    await until(lambda: not children(journal))
    assert made.streams == 0


def children(journal: JournalDouble) -> list[int]:
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            with contextlib.suppress(OSError):
                if str(journal.program).encode() in (one / "cmdline").read_bytes():
                    found.append(int(one.name))
    return found


async def test_kernel_messages_are_a_source_of_their_own(journal: JournalDouble) -> None:
    journal.add("from a service")
    journal.add("Under-voltage detected!", _TRANSPORT="kernel", _SYSTEMD_UNIT=None, PRIORITY="1")
    (found,) = await read(make_logs(journal=journal), sources=("kernel",))
    assert (found.message, found.unit, found.level) == ("Under-voltage detected!", "kernel", Level.ALERT)


async def test_odd_entries_do_not_end_the_stream(journal: JournalDouble) -> None:
    journal.add([0xC3, 0xA9, 0xFF])
    journal.add(None)
    journal.add(["first", "second"])
    journal.add_raw(b"not json\n")
    journal.add("x" * 100_000)
    journal.add("y" * 3_000_000)
    journal.add("last", PRIORITY="none", _PID="-5")
    found = await read(make_logs(journal=journal))
    assert [one.message[:12] for one in found] == ["é\ufffd", "", "first second", "x" * 12, "last"]
    assert found[3].fields["truncated"] == "true"
    assert (found[4].level, found[4].pid) == (Level.UNSPECIFIED, 0)


async def test_a_cursor_that_the_journal_forgot_is_told(journal: JournalDouble) -> None:
    journal.add("x")
    with pytest.raises(InvalidArgument, match="does not know it"):
        await read(make_logs(journal=journal), cursor="journal=s=0;i=0")
    with pytest.raises(InvalidArgument, match="none of ours"):
        await read(make_logs(journal=journal), cursor="journal=--file;/etc")


async def test_where_there_is_no_journal_that_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("from a file\n")
    made = make_logs(files={"app": log})
    assert made.sources == ("agent", "file:app")
    with pytest.raises(Unavailable, match="journalctl"):
        await read(made, sources=("journal",))
    assert await messages(made) == ["from a file"]


def test_a_line_that_is_no_entry_is_none() -> None:
    for line in (b"", b"[]", b"1", b'{"a":1}', b'{"__CURSOR":1,"__REALTIME_TIMESTAMP":"1"}', b"\xff"):
        assert parse(line, "journal") is None


# The agent's own, several sources, slow readers.


async def test_the_agents_own_words_are_a_log() -> None:
    ring = LogRing(SystemClock(), run="r1", limit=3)
    for number in range(5):
        ring(None, "warning", {"event": f"event {number}", "number": number, "level": "warning"})
    made = make_logs(ring=ring)
    found = await read(made, sources=("agent",))
    assert [one.message for one in found] == ["event 2", "event 3", "event 4"]
    assert (found[0].level, found[0].fields) == (Level.WARNING, {"number": "2"})
    assert [one.message for one in await read(made, cursor=found[1].cursor)] == ["event 4"]
    assert len(await read(made, cursor="agent=another-run:3")) == 3


class SlowClock(SystemClock):
    """Tells a thread the time only when it may go on."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def now_ns(self) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.go.wait(60)
        return super().now_ns()


def test_what_a_thread_is_about_to_say_is_not_taken_for_said() -> None:
    clock = SlowClock()
    ring = LogRing(clock, run="r1")
    ring.add("info", {"event": "first"})
    speaking = threading.Thread(target=ring.add, args=("info", {"event": "second"}))
    _, seen = ring.after(0)
    speaking.start()
    assert clock.reached.wait(60)
    between, seen = ring.after(seen)
    clock.go.set()
    speaking.join(60)
    after, _ = ring.after(seen)
    assert [one.message for one in (*between, *after)] == ["second"]


async def test_what_a_thread_says_wakes_whoever_follows() -> None:
    ring, loop = LogRing(SystemClock(), run="r1"), asyncio.get_running_loop()
    following = asyncio.create_task(anext(RingReader(ring, query(sources=("agent",))).follow()))
    await asyncio.sleep(0)  # from here on it waits
    began = loop.time()
    threading.Timer(0.2, ring.add, args=("info", {"event": "said"})).start()
    async with asyncio.timeout(60):
        assert (await following).message == "said"
    assert loop.time() - began < 30, "and nothing else did"


async def test_several_sources_are_merged_by_time_and_resumed_together(
    tmp_path: Path, journal: JournalDouble
) -> None:
    log = tmp_path / "app.log"
    log.write_text("2023-11-14T22:13:21Z file 1\n2023-11-14T22:13:25Z file 2\n")
    journal.add("journal 1", at=AT + 2)
    journal.add("journal 2", at=AT + 7)
    made = make_logs(files={"app": log}, journal=journal)

    found = await read(made, sources=("journal", "file:app"))

    assert [one.message[-9:] for one in found] == [
        "3:21Z file 1"[-9:],
        "journal 1",
        "3:25Z file 2"[-9:],
        "journal 2",
    ]
    rest = await messages(made, cursor=found[1].cursor)
    assert sorted(rest) == ["2023-11-14T22:13:25Z file 2", "journal 2"]


async def test_what_the_owner_calls_secret_is_cut_out() -> None:
    ring = LogRing(SystemClock(), run="r1")
    ring.add("info", {"event": "login password=hunter2 ok"})
    made = make_logs(ring=ring, redact=(r"password=\S+",))
    assert await messages(made, sources=("agent",)) == ["login [redacted] ok"]


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    ring = LogRing(SystemClock(), run="r1", limit=5000)
    ring.add("info", {"event": "first"})
    made = make_logs(ring=ring)
    async with following(made, sources=("agent",)) as entries:
        assert (await take(entries, 1))[0].message == "first"
        waiting = asyncio.create_task(anext(entries))
        await asyncio.sleep(0)
        ring.add("info", {"event": "second"})
        assert (await waiting).message == "second"
        for number in range(1500):
            ring.add("info", {"event": f"event {number}"})
        await asyncio.sleep(0.05)  # the sources do not wait for the reader

        found = await take(entries, 1000)

    assert found[0].dropped == 500
    assert found[0].message == "event 500"
    assert sum(one.dropped for one in found) == 500
    assert found[-1].message == "event 1499"


async def test_silence_is_broken_so_that_both_sides_know() -> None:
    made = make_logs(keep_alive_seconds=0.05)
    async with following(made, sources=("agent",)) as entries:
        (found,) = await take(entries, 1)
    assert (found.message, found.source, found.cursor) == ("", "agent", "")


async def test_following_ends_where_it_was_told_to() -> None:
    made = make_logs()
    until_ns = SystemClock().now_ns() + 200_000_000
    async with asyncio.timeout(60):
        found = [one async for one in made.stream(query(follow=True, sources=("agent",), until_ns=until_ns))]
    assert all(one.message == "" for one in found)


def test_memory_is_bounded_by_size_too() -> None:
    tail = EntryTail(10_000, limit_bytes=100_000)
    queue = Queue(limit_bytes=100_000)
    for number in range(100):
        big = entry("x" * 10_000, position=str(number))
        tail.add(big)
        queue.put(big)
    assert len(tail.entries()) == 4
    assert tail.entries()[-1].position == "99"
    assert re.search(r"<Queue 4 entries, \d+ bytes, 96 dropped>", repr(queue))


def test_limits_fit_the_message_limit() -> None:
    assert logs.QUEUE_ENTRIES == 1000
    assert log_entries.MESSAGE_LIMIT_BYTES + log_entries.CURSOR_LIMIT < 4 * 1024 * 1024
