"""Starts an agent in the version that is in force; a new version it tries first, and takes back if need be.

A program of its own: it imports nothing of ours, so that no release can break it, and is never replaced by
one. Without a trial it becomes the agent (`exec`) and costs nothing. During a trial it stays beside the
candidate until that has said hello to its server; one that ends, or says nothing in its time, is put aside,
and the launcher becomes the former version. Everything it decides is decided from files that are replaced
as a whole, so that a loss of power at any moment leaves the former version or a confirmed one.

    current         link to the version in force; without it the installed one runs
    former          link to the version before; without it that is the installed one
    trial.json      a candidate that is to be tried, or is being tried
    confirmed       the id of the trial whose candidate has said hello
    outcome.json    why the last candidate was put aside
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

RESTART: Final = 83
"""The exit code of an agent that is supervised and has a new candidate."""
POLL_SECONDS: Final = 0.1
STOP_SECONDS: Final = 10.0
"""For a candidate that did not say hello, before it is killed."""
LAUNCH: Final = "FLEETPLANE_AGENT_LAUNCH"
PATH: Final = "PYTHONPATH"


Document = dict[str, Any]
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class AgentLauncher:
    def __init__(self, root: Path, keys: list[str], arguments: list[str]) -> None:
        self.root = root
        self.keys = keys
        self.arguments = arguments
        self.child: subprocess.Popen[bytes] | None = None
        self.stop_asked = False

    def __repr__(self) -> str:
        return f"<Launcher {self.root}>"

    def run(self) -> NoReturn:
        """Until an agent that was tried ends for good; does not return where none is tried."""
        for number in SIGNALS:
            signal.signal(number, self.pass_on)
        while True:
            try:
                code = self.step()
            except OSError as error:  # such as a full disk: the version in force runs all the same
                tell(f"the version in force runs, because {error}")
                code = None
            if code is None:
                self.become(self.current())
            elif code != RESTART:
                leave(code)

    def step(self) -> int | None:
        """Settle a trial or make one: RESTART to look again, None if there is none, else an exit code."""
        trial = read_trial(self.root / "trial.json")
        if trial is None:
            return None
        if self.is_confirmed(trial):
            self.keep(trial)
        elif trial["started"]:
            self.put_aside(trial, "the trial was interrupted: the machine or the launcher stopped")
        else:
            return self.attempt(trial)
        return RESTART

    # Trials.

    def attempt(self, trial: Document) -> int:
        """The exit code of the candidate, or RESTART if the next version is to be looked for."""
        if trial["candidate"] and not is_installed(self.root / "versions" / trial["candidate"]):
            self.put_aside(trial, "its files are not there")
            return RESTART
        write(self.root / "trial.json", json.dumps({**trial, "started": True}))
        ends = time.monotonic() + float(trial["seconds"])
        self.prepare(trial["candidate"], trial=trial["id"])
        child = self.child = subprocess.Popen(self.command())  # noqa: S603  # our own interpreter
        if self.stop_asked:  # before there was anybody to pass it on to
            child.terminate()
        was_ended = False
        while not self.is_confirmed(trial):
            code = child.poll()
            if code is None and time.monotonic() >= ends:
                code, was_ended = _end(child), True
                reason = f"it did not say hello within {trial['seconds']:g} s"
            else:
                reason = f"it ended with {code} before it said hello"
            if code is None:
                time.sleep(POLL_SECONDS)
            elif self.stop_asked:  # that was no trial
                write(self.root / "trial.json", json.dumps(trial))
                return code
            elif not self.is_confirmed(trial):
                self.put_aside(trial, reason)
                return RESTART
        try:
            self.keep(trial)
        except OSError as error:  # the candidate runs; the next start keeps it
            tell(f"version {trial['version']} could not be put in force yet: {error}")
        # One that said hello while it was being ended has not ended for good.
        return RESTART if was_ended else child.wait()

    def is_confirmed(self, trial: Document) -> bool:
        """Whether the candidate of a trial has said hello."""
        try:
            return (self.root / "confirmed").read_text().strip() == str(trial["id"])
        except OSError:
            return False

    def keep(self, trial: Document) -> None:
        """Put the candidate in force. Done again from the start if it is interrupted."""
        before = self.current()
        if before != trial["candidate"]:
            self.link("former", before)
            self.link("current", trial["candidate"])
        remove(self.root / "outcome.json")
        remove(self.root / "trial.json")
        remove(self.root / "confirmed")

    def put_aside(self, trial: Document, reason: str) -> None:
        """Leave the former version in force, with the reason for the agent to report."""
        outcome = {"version": trial["version"], "attempt": trial["attempt"], "reason": reason}
        write(self.root / "outcome.json", json.dumps(outcome))
        remove(self.root / "trial.json")
        tell(f"version {trial['version']} is put aside: {reason}")

    # Versions.

    def current(self) -> str:
        """The name of the version in force; empty for the installed one, also where files were lost."""
        try:
            name = (self.root / "current").readlink().name
        except OSError:
            return ""
        return name if is_installed(self.root / "versions" / name) else ""

    def link(self, name: str, version: str) -> None:
        """Let a link mean another version, at once."""
        if not version:
            remove(self.root / name)
            return
        beside = self.root / f".{name}"
        remove(beside)
        beside.symlink_to(Path("versions") / version)
        beside.replace(self.root / name)
        sync(self.root)

    def become(self, version: str) -> NoReturn:
        """Replace this process by the agent."""
        if self.stop_asked:
            leave(0)
        self.prepare(version)
        command = self.command()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execv(command[0], command)  # noqa: S606  # our own interpreter

    def prepare(self, version: str, trial: str = "") -> None:
        """Put into the environment what the agent is to know, and where Python is to look first."""
        told = {
            "root": str(self.root),
            "keys": self.keys,
            "launcher": str(Path(__file__).resolve()),
            "arguments": self.arguments,
            "release": version,
            "installed": installed_version(),
            "trial": trial,
            "supervised": bool(trial),
        }
        os.putenv(LAUNCH, json.dumps(told))
        if version:
            os.putenv(PATH, str(self.root / "versions" / version))
        else:
            os.unsetenv(PATH)

    def command(self) -> list[str]:
        """The agent, found where Python looks first."""
        return [sys.executable, "-P", "-m", "fleetplane.cli.main", "agent", *self.arguments]

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the candidate."""
        if number != signal.SIGHUP:
            self.stop_asked = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    try:
        return child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def tell(words: str) -> None:
    """Say something in the agent's log."""
    print(f"fleetplane launcher: {words}", file=sys.stderr, flush=True)


def installed_version() -> str:
    """The version of the installation that this file belongs to."""
    try:
        text = (Path(__file__).resolve().parents[2] / "__init__.py").read_text()
    except OSError:
        return ""
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found is not None else ""


def is_installed(folder: Path) -> bool:
    """Whether a version is there: folders get their name when they are complete."""
    return (folder / "fleetplane" / "__init__.py").is_file()


def read(path: Path) -> Document | None:
    """A document, or None where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_trial(path: Path) -> Document | None:
    """A trial, or None where there is none; one that lacks something is none, and is removed."""
    found = read(path) or {}
    kinds: dict[str, Any] = {"id": str, "candidate": str, "version": str, "attempt": int, "started": bool}
    kinds["seconds"] = (int, float)
    whole = all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    if whole and "/" not in found["candidate"] and found["candidate"] not in (".", ".."):
        return found
    remove(path)
    return None


def write(path: Path, text: str) -> None:
    """Replace a file as a whole, so that it outlives a loss of power."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file that may not be there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync(path.parent)


def sync(folder: Path) -> None:
    """Bring what happened to the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leave(code: int) -> NoReturn:
    """End as the agent ended."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main(words: list[str]) -> NoReturn:
    """`launcher.py ROOT [KEY…] -- ARGUMENTS`"""
    at = words.index("--")
    AgentLauncher(Path(words[0]), words[1:at], words[at + 1 :]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
