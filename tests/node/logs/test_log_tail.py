"""No line of a log is lost or named twice, whatever happens to the files and to us."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetplane.node.logs.tail import BATCH_LINES, LINE_LIMIT_BYTES, FileTail, TailedLine


def tail(folder: Path, *, rotate_bytes: int = 10**9, late_seconds: float = 3600.0) -> FileTail:
    return FileTail(
        folder / "access.log",
        folder / "access.position",
        epoch="e",
        rotate_bytes=rotate_bytes,
        late_seconds=late_seconds,
    )


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


ACTIONS = st.lists(
    st.sampled_from(
        ["write", "write half", "read", "read and lose", "rotate", "late write", "restart", "retire"]
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_every_line_comes_once_whatever_happens_between(actions: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        log, reading = folder / "access.log", tail(folder)
        written: list[bytes] = []
        got: dict[str, bytes] = {}
        half = b""

        def write(path: Path, *, whole: bool = True) -> None:
            nonlocal half
            text = b"" if half else b"line %d" % len(written)
            if half:
                append(path, b"\n")
                half = b""
            elif whole:
                append(path, text + b"\n")
                written.append(text)
            else:
                append(path, text)
                written.append(text)
                half = text

        def read(*, commit: bool) -> None:
            batch = reading.read()
            for line in batch.lines:
                assert got.setdefault(line.place, line.text) == line.text
            if commit:
                reading.commit(batch)

        for action in [*actions, "finish", "read", "read"]:
            rotated = sorted(folder.glob("access.log.*"), key=lambda path: int(path.suffix[1:]))
            match action:
                case "write":
                    write(log)
                case "write half":
                    write(log, whole=False)
                case "finish" if half:
                    write(log)
                case "read":
                    read(commit=True)
                case "read and lose":
                    read(commit=False)
                case "rotate" if log.exists() and not half and len(rotated) < 3:
                    reading.rotate()
                case "late write" if rotated and not half:
                    write(rotated[-1])
                case "restart":
                    reading = tail(folder)
                case "retire":
                    reading.retire()
        assert sorted(got.values()) == sorted(written)
        assert reading.lost_bytes == 0


def test_a_log_that_was_truncated_begins_anew(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    append(log, b"one\ntwo\n")
    batch = reading.read()
    reading.commit(batch)
    log.write_bytes(b"3\n")

    again = reading.read()
    assert [line.text for line in again.lines] == [b"3"]
    assert not {line.place for line in again.lines} & {line.place for line in batch.lines}


def test_another_file_with_the_same_inode_is_not_mistaken_for_the_old_one(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    append(log, b"first\n")
    reading.commit(reading.read())
    log.write_bytes(b"other and longer\nmore\n")  # what a reused inode looks like
    assert [line.text for line in reading.read().lines] == [b"other and longer", b"more"]


def test_batches_are_bounded_and_together_complete(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    append(log, b"".join(b"%d\n" % number for number in range(1200)))
    sizes, seen = [], []
    while (batch := reading.read()).lines:
        sizes.append(len(batch.lines))
        seen += [int(line.text) for line in batch.lines]
        reading.commit(batch)
    assert sizes == [BATCH_LINES, BATCH_LINES, 200]
    assert seen == list(range(1200))


def test_a_line_too_long_is_counted_and_passed_over(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    append(log, b"x" * (LINE_LIMIT_BYTES + 1) + b"\nshort\n")
    assert [line.text for line in reading.read().lines] == [b"short"]
    assert reading.oversize_lines == 1


def test_files_beyond_the_bound_go_and_what_was_unread_in_them_is_counted(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    for number in range(5):
        append(log, b"%d\n" % number)
        reading.rotate()
    reading.retire()
    assert sorted(path.name for path in tmp_path.glob("access.log.*")) == [
        "access.log.3",
        "access.log.4",
        "access.log.5",
    ]
    assert reading.lost_bytes == 4


def test_a_rotated_file_goes_once_it_was_read_and_is_left_alone(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path, late_seconds=-1.0)
    append(log, b"1\n")
    reading.rotate()
    reading.retire()
    assert (tmp_path / "access.log.1").exists()
    reading.commit(reading.read())
    reading.retire()
    assert not (tmp_path / "access.log.1").exists()


def test_what_was_counted_is_kept_with_the_place_in_the_log(tmp_path: Path) -> None:
    log, reading = tmp_path / "access.log", tail(tmp_path)
    append(log, b"1\n")
    reading.commit(reading.read(), "a note")
    assert tail(tmp_path).note == "a note"


@pytest.mark.parametrize("step", ["_rotated", "_logs"])
def test_a_log_that_is_rotated_while_it_is_read_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """`step` is what was looked at before that."""
    log, reading, got = tmp_path / "access.log", tail(tmp_path), list[TailedLine]()
    looked, turns = getattr(reading, step), iter([True])

    def read() -> None:
        batch = reading.read()
        got.extend(batch.lines)
        if batch.lines:
            reading.commit(batch)

    def then_rotated() -> object:
        found = looked()
        if next(turns, False):
            reading.rotate()
            append(log, b"three\n")
        return found

    append(log, b"one\n")
    if step == "_rotated":
        read()
    append(log, b"two\n")
    monkeypatch.setattr(reading, step, then_rotated)
    for _ in range(3):
        read()
    assert [line.text for line in got] == [b"one", b"two", b"three"]
