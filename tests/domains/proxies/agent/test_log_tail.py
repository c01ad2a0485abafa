"""No line of a log is lost or named twice, whatever happens to the files and to us."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetplane.domains.proxies.agent.log_lines import (
    Traffic,
    access_entry,
    entry_id,
    error_entry,
    parse_request,
    read_traffic,
)
from fleetplane.domains.proxies.agent.tail import BATCH_LINES, LINE_LIMIT_BYTES, Tail


def tail(folder: Path, *, rotate_bytes: int = 10**9, late_seconds: float = 3600.0) -> Tail:
    return Tail(
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
        "access.log.3", "access.log.4", "access.log.5",
    ]  # fmt: skip
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


# Lines.

LINE = {
    "time": "1794783182.314", "remote_addr": "127.0.0.1", "method": "GET", "uri": "/a?b=%22",
    "protocol": "HTTP/1.1", "host": "a.test", "status": "502", "body_bytes_sent": "1", "bytes_sent": "155",
    "request_length": "134", "request_time": "0.150", "upstream_response_time": "0.001, 0.149",
    "user_agent": 'curl "8" \\ é', "referer": "", "request_id": "9f71", "virtual_host_id": "h1",
}  # fmt: skip


def test_a_line_of_the_access_log_becomes_an_entry() -> None:
    request = parse_request(json.dumps(LINE).encode())
    assert request is not None
    entry = access_entry(request, identity="i")
    assert entry.timestamp == 1794783182314
    assert (entry.level, entry.message) == ("access", "GET /a?b=%22 HTTP/1.1")
    assert entry.fields["response_time_ms"] == "150"
    assert entry.fields["upstream_response_time_ms"] == "149"
    assert entry.fields["user_agent"] == LINE["user_agent"]
    assert "referer" not in entry.fields


def test_bytes_that_are_not_text_do_not_lose_the_line() -> None:
    request = parse_request(b'{"uri":"/\xff\xfe","status":"400"}')
    assert request is not None
    assert request.uri == "/\ufffd\ufffd"
    assert parse_request(b'{"uri":"/') is None


def test_a_line_of_the_error_log_becomes_an_entry() -> None:
    entry = error_entry(b"2026/11/15 22:53:04 [emerg] 12#12: bind() failed", identity="i")
    assert entry is not None
    assert (entry.level, entry.message, entry.fields["source"]) == ("emerg", "bind() failed", "nginx_error")
    assert error_entry(b"garbage", identity="i") is None


def test_a_line_has_the_same_id_whenever_it_is_sent() -> None:
    assert entry_id("agent", "e:1:0") == entry_id("agent", "e:1:0")
    assert len({entry_id("a", "e:1:0"), entry_id("b", "e:1:0"), entry_id("a", "e:1:1")}) == 3


def test_requests_add_up() -> None:
    traffic = Traffic()
    for status in ("200", "204", "502", "-"):
        request = parse_request(json.dumps({**LINE, "status": status}).encode())
        assert request is not None
        traffic.count(request)
    assert traffic.responses == {"2xx h1": 2, "5xx h1": 1, "other h1": 1}
    assert (traffic.request_bytes, traffic.response_bytes, sum(traffic.durations)) == (536, 620, 4)
    assert read_traffic(msgspec.json.encode(traffic).decode()) == traffic
    assert read_traffic("") == Traffic()
