"""The agent ships logs, and nothing that was put under a log's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetplane.domains.proxies.agent.nginx.control import AddedLines
from fleetplane.node.logs.tail import FileTail

SECRET = b"root:x:0:0\n"


def lines(tail: FileTail) -> list[bytes]:
    return [line.text for line in tail.read().lines]


@pytest.mark.parametrize("name", ["access.log", "access.log.1"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_under_a_logs_name_is_not_read(tmp_path: Path, name: str, link: object) -> None:
    logs, secret = tmp_path / "logs", tmp_path / "secret"
    logs.mkdir()
    secret.write_bytes(SECRET)
    assert callable(link)
    link(secret, logs / name)
    other = logs / ("access.log.2" if name == "access.log" else "access.log")
    other.write_bytes(b"a request\n")
    tail = FileTail(logs / "access.log", tmp_path / "position", epoch="e")
    assert lines(tail) == [b"a request"]
    assert tail.refused == (name,)
    tail.retire()
    assert (logs / name).exists(), "it is not ours to remove"
    (logs / name).unlink()
    assert lines(tail) == [b"a request"]
    assert not tail.refused


def test_a_pipe_under_a_logs_name_does_not_hold_the_agent_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "access.log")
    tail = FileTail(tmp_path / "access.log", tmp_path / "position", epoch="e")
    assert lines(tail) == []
    assert tail.refused == ("access.log",)


def test_what_nginx_says_is_not_read_through_a_link_either(tmp_path: Path) -> None:
    log, secret = tmp_path / "error.log", tmp_path / "secret"
    reader = AddedLines(log)
    secret.write_bytes(SECRET)
    os.link(secret, log)
    assert reader.lines() == []
    log.unlink()
    log.write_bytes(b"fine\n")
    assert reader.lines() == ["fine"]
