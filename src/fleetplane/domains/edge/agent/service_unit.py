"""The daemon as a systemd service of one user: the unit's text, where it lies, and how it is started.

Nothing here runs by itself: `systemctl` is asked only through the `run` that is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, SettingsError
from fleetplane.kernel.files import write_durably

NAME: Final = "fleetplane-edge.service"

Run = Callable[[Sequence[str]], int]
"""Runs a program to its end and gives its exit code."""

_UNIT: Final = """\
[Unit]
Description=Fleetplane edge daemon
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
ExecStart={command} agent edge run --state-dir {state}{options}
Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec=90
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=tmpfs
BindPaths={state}
BindReadOnlyPaths=-{program_home}
ReadWritePaths=-{state}
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemUnit:
    folder: Path
    """Where the user's units lie."""
    run: Run

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def install(
        self, *, state: Path, options: Sequence[str] = (), force: bool = False, start: bool = True
    ) -> list[str]:
        """Write the unit and have it started now and at every boot; what could not be done besides."""
        if self.path.exists() and not force:
            raise AlreadyExists(f"{self.path} is there already", hint="--force replaces it")
        content = unit(state=state, options=options)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, content.encode(), mode=0o644)
        if not start:
            return []
        if self.run(["systemctl", "--user", "daemon-reload"]) != 0:
            raise SettingsError("systemd does not answer for this user", hint=f"the unit is in {self.path}")
        warnings = []
        if self.run(["loginctl", "enable-linger"]) != 0:
            warnings.append("lingering could not be enabled: the daemon ends when the user logs out")
        if self.run(["systemctl", "--user", "enable", "--now", NAME]) != 0:
            warnings.append(f"{NAME} could not be started; `systemctl --user status {NAME}` says why")
        return warnings

    def uninstall(self) -> bool:
        """Whether there was one."""
        if not self.path.exists():
            return False
        self.run(["systemctl", "--user", "disable", "--now", NAME])
        self.path.unlink()
        self.run(["systemctl", "--user", "daemon-reload"])
        return True

    def status(self) -> str:
        if not self.path.exists():
            return "not installed"
        return (
            "running"
            if self.run(["systemctl", "--user", "is-active", "--quiet", NAME]) == 0
            else "not running"
        )


def unit(*, state: Path, options: Sequence[str] = (), command: str = "") -> str:
    """Pure but for where this program lies."""
    program = command or f"{_quoted(sys.executable)} -m fleetplane.cli.main"
    written = "".join(f" {_quoted(option)}" for option in options)
    home = Path(sys.prefix)
    return _UNIT.format(
        command=program, state=_quoted(str(state)), options=written, program_home=_quoted(str(home))
    )


def _quoted(text: str) -> str:
    """As systemd reads it: `%` begins a specifier, and words end at spaces."""
    if any(ord(character) < 32 for character in text):
        raise InvalidArgument(f"{text!r} cannot be written into a unit")
    text = text.replace("%", "%%").replace("$", "$$")
    if not text or any(character in text for character in " '\"\\;"):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def default_folder() -> Path:
    return Path("~/.config/systemd/user").expanduser()
