"""What the launcher told this agent, and how the agent is started anew by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from fleetplane.kernel.errors import SettingsError
from fleetplane.node.upgrade.launcher import LAUNCH, RESTART


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Comes from a launcher that may be older or newer than this agent: fields are added, never changed."""

    root: str
    keys: tuple[str, ...]
    """Public keys whose releases are installed."""
    launcher: str
    arguments: tuple[str, ...]
    release: str = ""
    """The folder of the version that runs; empty for the installed one."""
    installed: str = ""
    """The version of the installation that the launcher belongs to."""
    trial: str = ""
    """The id of the trial that this agent has to confirm."""
    supervised: bool = False
    """Whether the launcher waits for this process to end."""

    @classmethod
    def told(cls, environment: Mapping[str, str]) -> Launch | None:
        """None for an agent that was started without a launcher."""
        text = environment.get(LAUNCH)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{LAUNCH} cannot be read: {error}") from error

    def again(self) -> NoReturn:
        """Let the launcher look for the version to run. Nothing of this process may be open any more."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.supervised:
            raise SystemExit(RESTART)
        become_launched(self.root, self.keys, self.arguments, launcher=self.launcher)


def become_launched(root: str, keys: Sequence[str], arguments: Sequence[str], *, launcher: str) -> NoReturn:
    """Become the launcher, which ignores every `PYTHON…` variable."""
    command = [sys.executable, "-I", launcher, root, *keys, "--", *arguments]
    os.execv(command[0], command)  # noqa: S606  # our own interpreter


def own_launcher() -> str:
    """The launcher of this installation."""
    return str(Path(__file__).with_name("launcher.py"))
