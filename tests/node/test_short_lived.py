"""Functions that are called in a process of their own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.kernel.errors import IntegrityError, SettingsError, Unavailable
from fleetplane.node import certificates
from fleetplane.node.identity import PrivateFolder
from fleetplane.node.short_lived import _answer, call_elsewhere


def test_the_result_comes_back() -> None:
    assert call_elsewhere(os.getpid) != os.getpid()
    assert call_elsewhere(file_rules.complaints, {"a.crt": b"x", "b.env": b"A=1"}) == {
        "a.crt": "no certificate in PEM form"
    }


def test_what_it_raises_is_raised_here_with_all_that_it_says(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="holds no private key") as raised:
        call_elsewhere(certificates.load_private_key, b"nonsense", "there")
    assert raised.value.advice == "remove it and a new one is made"
    with pytest.raises(SettingsError, match="cannot be read"):
        call_elsewhere(PrivateFolder.read, PrivateFolder(tmp_path), tmp_path)


def test_what_it_prints_does_not_disturb_its_answer() -> None:
    assert call_elsewhere(os.system, "echo noise") == 0


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(Unavailable, match="could not be called"):
        call_elsewhere(os.abort)


class TwoWords(Exception):
    """Is pickled with one argument and made with two, as some libraries' exceptions are."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@pytest.mark.parametrize("answer", [pickle.dumps((False, TwoWords("a", "b"))), b"", b"x", pickle.dumps(1)])
def test_an_answer_that_cannot_be_read_is_no_crash(answer: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        _answer(answer)


def has_ended(pid: int) -> bool:
    try:
        return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_it_ends_with_whoever_called(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    called = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    program = f"from fleetplane.node.short_lived import call_elsewhere; call_elsewhere(exec, {called!r})"
    caller = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = children_of(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait(60)
    while not has_ended(found[0]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
