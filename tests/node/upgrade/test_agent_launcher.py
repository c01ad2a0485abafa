"""The launcher: which version runs, whatever happened before; real processes where it supervises."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fleetplane.node.upgrade import launcher
from fleetplane.node.upgrade.folder import ReleaseFolder
from fleetplane.node.upgrade.launch import Launch, own_launcher
from fleetplane.node.upgrade.launcher import AgentLauncher

FORMER, CANDIDATE = "1.0-aaaa", "2.0-bbbb"
SECONDS = 60.0


class Became(Exception):
    """The launcher would have become this version."""


class PowerLost(Exception):
    pass


class Deciding(AgentLauncher):
    """Decides as always, and starts nothing: a trial is over as soon as it is written that it began."""

    def become(self, version: str) -> NoReturn:
        raise Became(version)

    def attempt(self, trial: dict[str, object]) -> int:
        launcher.write(self.root / "trial.json", json.dumps({**trial, "started": True}))
        raise Became(f"trial of {trial['candidate']}")


def version(root: Path, name: str, program: str = "") -> None:
    package = root / "versions" / name / "fleetplane"
    (package / "cli").mkdir(parents=True)
    for file in (package / "__init__.py", package / "cli/__init__.py"):
        file.touch()
    (package / "cli/main.py").write_text(program)


@pytest.fixture
def folder(tmp_path: Path) -> ReleaseFolder:
    found = ReleaseFolder(tmp_path / "releases")
    found.make()
    version(found.root, FORMER)
    (found.root / "current").symlink_to(f"versions/{FORMER}")
    return found


def ordered(folder: ReleaseFolder, *, seconds: float = SECONDS) -> None:
    folder.begin_trial(trial="t1", candidate=CANDIDATE, version="2.0", attempt=3, seconds=seconds)


def decided(folder: ReleaseFolder) -> str:
    with pytest.raises(Became) as became:
        Deciding(folder.root, [], []).run()
    return str(became.value)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """In-process launchers set handlers; the tests' own come back."""
    before = {number: signal.getsignal(number) for number in launcher.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_trial_the_version_in_force_runs_and_the_installed_one_where_files_were_lost(
    folder: ReleaseFolder,
) -> None:
    assert decided(folder) == FORMER
    (folder.versions / FORMER / "fleetplane/__init__.py").unlink()
    assert decided(folder) == ""
    (folder.root / "current").unlink()
    assert decided(folder) == ""


def test_power_that_is_lost_during_a_trial_means_the_former_version_and_a_reason(
    folder: ReleaseFolder,
) -> None:
    version(folder.root, CANDIDATE)
    ordered(folder)
    assert decided(folder) == f"trial of {CANDIDATE}"
    assert decided(folder) == FORMER
    failure = folder.failure()
    assert failure is not None
    assert (failure.version, failure.attempt) == ("2.0", 3)
    assert "interrupted" in failure.reason


@pytest.mark.parametrize("confirmed", [False, True])
def test_power_may_be_lost_at_every_write_and_one_of_the_two_versions_runs(
    folder: ReleaseFolder, confirmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every durable step ends with `sync`: power is lost there, one step later each time."""
    version(folder.root, CANDIDATE)
    real, left = launcher.sync, [10**6]

    def sync(path: Path) -> None:
        real(path)
        left[0] -= 1
        if not left[0]:
            raise PowerLost

    monkeypatch.setattr(launcher, "sync", sync)
    expected = CANDIDATE if confirmed else FORMER
    for steps in range(1, 12):
        for name in ("former", "trial.json", "confirmed", "outcome.json"):
            (folder.root / name).unlink(missing_ok=True)
        launcher.write(folder.root / "trial.json", "{}")
        ordered(folder)
        launcher.write(
            folder.root / "trial.json", (folder.root / "trial.json").read_text().replace("false", "true")
        )
        if confirmed:
            folder.confirm("t1", CANDIDATE)
        (folder.root / "current").unlink()
        (folder.root / "current").symlink_to(f"versions/{FORMER}")
        left[0] = steps
        try:
            Deciding(folder.root, [], []).run()
        except PowerLost:
            lost = True
        except Became:
            lost = False
        left[0] = 10**6
        assert decided(folder) == expected
        if confirmed:
            assert (folder.root / "former").readlink().name == FORMER
        if not lost:
            break
    else:
        raise AssertionError("there were more steps than tried")
    assert steps > 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"id": "x"}',
     '{"id": "x", "candidate": "../../etc", "version": "1", "attempt": 1, "seconds": 1.0, "started": false}'],
)  # fmt: skip
def test_a_trial_that_cannot_be_read_keeps_no_agent_from_running(folder: ReleaseFolder, text: str) -> None:
    (folder.root / "trial.json").write_text(text)
    assert decided(folder) == FORMER
    assert not (folder.root / "trial.json").exists()


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_disk_that_takes_nothing_keeps_no_agent_from_running(
    folder: ReleaseFolder, confirmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    version(folder.root, CANDIDATE)
    ordered(folder)
    if confirmed:
        folder.confirm("t1", CANDIDATE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "write", full)
    monkeypatch.setattr(launcher, "remove", full)
    assert decided(folder) in ((FORMER, CANDIDATE) if confirmed else (FORMER,))


# With processes.

SAYS_HELLO = """
import json, os, pathlib, signal, sys, time
told = json.loads(os.environ["FLEETPLANE_AGENT_LAUNCH"])
root = pathlib.Path(told["root"])
(root / "ran").write_text(told["release"] + " " + " ".join(sys.argv[1:]))
if told["trial"]:
    (root / "confirmed").write_text(told["trial"])
while True:
    time.sleep(0.05)
"""
CRASHES = "raise SystemExit(9)"
IS_SILENT = "import time\ntime.sleep(3600)"
NOTES_ITSELF = """
import json, os, pathlib
told = json.loads(os.environ["FLEETPLANE_AGENT_LAUNCH"])
(pathlib.Path(told["root"]) / "ran").write_text(told["release"])
"""


def launched(folder: ReleaseFolder) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", own_launcher(), str(folder.root), "ed25519:key", "--", "edge", "run"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.02)
    return path.read_text()


def gone(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while path.exists():
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.02)


def test_a_version_that_says_hello_is_kept_and_ends_with_its_own_exit_code(folder: ReleaseFolder) -> None:
    version(folder.root, CANDIDATE, SAYS_HELLO)
    ordered(folder)
    process = launched(folder)
    try:
        assert wait_for(folder.root / "ran") == f"{CANDIDATE} agent edge run"
        gone(folder.root / "trial.json")
        assert (folder.linked("current"), folder.linked("former")) == (CANDIDATE, FORMER)
        assert folder.failure() is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        (CRASHES, SECONDS, "it ended with 9 before it said hello"),
        (IS_SILENT, 1.0, "it did not say hello within 1 s"),
    ],
    ids=["crashes", "is silent"],
)
def test_a_version_that_does_not_say_hello_is_put_aside_and_the_former_one_runs(
    folder: ReleaseFolder, program: str, seconds: float, reason: str
) -> None:
    (folder.versions / FORMER / "fleetplane/cli/main.py").write_text(NOTES_ITSELF)
    version(folder.root, CANDIDATE, program)
    ordered(folder, seconds=seconds)
    process = launched(folder)

    assert process.wait(SECONDS) == 0
    assert (folder.root / "ran").read_text() == FORMER
    failure = folder.failure()
    assert failure is not None
    assert (failure.version, failure.attempt, failure.reason) == ("2.0", 3, reason)
    assert folder.linked("current") == FORMER


class Silent(AgentLauncher):
    """Tries a program that says nothing."""

    def prepare(self, version: str, trial: str = "") -> None:
        pass  # the environment is that of all tests

    def command(self) -> list[str]:
        return [sys.executable, "-c", IS_SILENT]


def test_a_version_that_says_hello_while_it_is_being_ended_is_started_again(
    folder: ReleaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    version(folder.root, CANDIDATE)
    ordered(folder, seconds=0.0)
    end = launcher._end

    def too_late(child: subprocess.Popen[bytes]) -> int:
        folder.confirm("t1", CANDIDATE)
        return end(child)

    monkeypatch.setattr(launcher, "_end", too_late)
    assert Silent(folder.root, [], []).step() == launcher.RESTART
    assert decided(folder) == CANDIDATE


def test_a_stop_during_a_trial_is_no_failure_and_the_trial_begins_anew(folder: ReleaseFolder) -> None:
    started = (
        "import os, pathlib, time, json\n"
        "root = pathlib.Path(json.loads(os.environ['FLEETPLANE_AGENT_LAUNCH'])['root'])\n"
        "(root / 'ran').write_text('yes')\ntime.sleep(3600)\n"
    )
    version(folder.root, CANDIDATE, started)
    ordered(folder)
    process = launched(folder)
    wait_for(folder.root / "ran")
    process.send_signal(signal.SIGTERM)

    assert process.wait(SECONDS) == -signal.SIGTERM
    assert folder.failure() is None
    assert decided(folder) == f"trial of {CANDIDATE}"


def test_an_agent_knows_what_the_launcher_told_it(folder: ReleaseFolder) -> None:
    told = {"root": "/r", "keys": ["k"], "launcher": "/l", "arguments": ["gpu"], "of a later one": 1}
    found = Launch.told({"FLEETPLANE_AGENT_LAUNCH": json.dumps(told)})

    assert found is not None
    assert (found.root, found.keys, found.arguments, found.supervised) == ("/r", ("k",), ("gpu",), False)
    assert Launch.told({}) is None
    assert Path(own_launcher()).samefile(launcher.__file__)
