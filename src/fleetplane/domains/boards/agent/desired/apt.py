"""Asking apt-get and dpkg, without a shell and within a time: what is there, what would change, change it.

Every name and version comes from `domains/boards/debian.py`'s grammar and stands behind `--`, so that no word
can be an option. Packages are installed only from the board's own sources, and only if apt trusts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetplane.kernel.errors import FailedPrecondition, Unavailable
from fleetplane.kernel.unbroken import finish
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment
from fleetplane.node.programs.guard import Program
from fleetplane.node.programs.output import OutputTail, ProgramStream

APT_GET: Final = "/usr/bin/apt-get"
DPKG: Final = "/usr/bin/dpkg"
DPKG_QUERY: Final = "/usr/bin/dpkg-query"
SUDO: Final = "/usr/bin/sudo"
QUERY_SECONDS: Final = 60.0
TERM_SECONDS: Final = 30.0
"""After the end of its time, for apt to end what it has begun: dpkg does not like to be killed."""
OUTPUT_BYTES: Final = 256 * 1024
WORDS_LIMIT: Final = 300
ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
}
OPTIONS: Final = (
    "--quiet",
    "--assume-yes",
    "--no-install-recommends",
    "--option=DPkg::Lock::Timeout=60",
    "--option=Dpkg::Options::=--force-confdef",
    "--option=Dpkg::Options::=--force-confold",
    "--option=Dpkg::Use-Pty=0",
)
INSTALL: Final = (*OPTIONS, "--no-remove", "--allow-downgrades", "install")
REMOVE: Final = (*OPTIONS, "remove")
INTERRUPTED: Final = "dpkg --configure -a"
"""What apt asks for after dpkg was killed at work."""

_INSTALLED = re.compile(r"Inst (\S+) (?:\[(\S+)\] )?\((\S+) .*")
_REMOVED = re.compile(r"(?:Remv|Purg) (\S+) .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AptPlan:
    """What apt-get would do."""

    installed: Mapping[str, str]
    """Versions by name, dependencies included."""
    removed: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    exit_code: int
    timed_out: bool
    out: str
    err: str

    @property
    def problem(self) -> str:
        """The line that says most; empty if there is none."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("E:")] or lines[-1:]
        return "; ".join(told)[:WORDS_LIMIT]


class _OutputEnds:
    """The ends of what a program writes."""

    def __init__(self) -> None:
        self._ends = {channel: OutputTail(OUTPUT_BYTES) for channel in ProgramStream}

    async def take(self, channel: ProgramStream, data: bytes) -> None:
        self._ends[channel].add(data)

    def text(self, channel: ProgramStream) -> str:
        return bytes(self._ends[channel]).decode("utf-8", "replace")


class Apt:
    def __init__(self, *, sudo: bool, timeout_seconds: float) -> None:
        self._sudo = sudo
        self._timeout_seconds = timeout_seconds
        self.output = ""
        """Of the last change."""

    def __repr__(self) -> str:
        return f"<Apt{' by sudo' if self._sudo else ''}>"

    def check(self) -> None:
        """Refuse where nothing could be installed."""
        if not os.access(APT_GET, os.X_OK):
            raise FailedPrecondition(f"packages cannot be installed: this board has no {APT_GET}")
        if os.geteuid() != 0 and not self._sudo:
            raise FailedPrecondition(
                "packages cannot be installed: the agent is not root",
                hint="run it as root, or let its user run apt-get by sudo and set packages.sudo",
            )

    async def installed(self, names: Collection[str]) -> Mapping[str, str]:
        """The versions that are installed, by name; those that are not are left out."""
        if not names:
            return {}
        words = ("--show", "--showformat=${Package}\\t${db:Status-Status}\\t${Version}\\n", "--")
        ran = await self._run(DPKG_QUERY, (*words, *sorted(names)), seconds=QUERY_SECONDS)
        rows = (line.split("\t") for line in ran.out.splitlines())
        return {row[0]: row[2] for row in rows if len(row) == 3 and row[1] == "installed"}

    async def plan_install(self, wanted: Mapping[str, str]) -> AptPlan:
        """What installing these would do; the lists of packages are fetched anew if apt knows no such."""
        words = ("--simulate", *INSTALL, "--", *_spelled(wanted))
        ran = await self._run(APT_GET, words, seconds=self._timeout_seconds)
        if ran.exit_code:
            await self._changed(APT_GET, ("--quiet", "update"))
            ran = await self._run(APT_GET, words, seconds=self._timeout_seconds)
        return _planned(ran)

    async def plan_remove(self, names: Collection[str]) -> AptPlan:
        """What removing these would do."""
        words = ("--simulate", *REMOVE, "--", *sorted(names))
        return _planned(await self._run(APT_GET, words, seconds=self._timeout_seconds))

    async def install(self, versions: Mapping[str, str]) -> None:
        """Install exactly these."""
        await self._change((*INSTALL, "--", *_spelled(versions)))

    async def remove(self, names: Collection[str]) -> None:
        """Remove exactly these; their configuration stays, as apt leaves it."""
        await self._change((*REMOVE, "--", *sorted(names)))

    async def _change(self, words: Sequence[str]) -> None:
        # To its end, although the agent is stopped meanwhile: half an installation is worse than a wait.
        ran = await finish(self._changed(APT_GET, words))
        if ran.exit_code and INTERRUPTED in f"{ran.out}{ran.err}":
            await finish(self._changed(DPKG, ("--force-confdef", "--force-confold", "--configure", "-a")))
            ran = await finish(self._changed(APT_GET, words))
        _require_success(ran)

    async def _changed(self, program: str, words: Sequence[str]) -> Ran:
        """Run with the rights that changing needs; what it wrote is kept."""
        if os.geteuid() != 0:
            words, program = ("-n", "--", program, *words), SUDO
        ran = await self._run(program, words, seconds=self._timeout_seconds)
        self.output = f"{program} {' '.join(words)}\n{ran.out}{ran.err}"
        return ran

    async def _run(self, path: str, words: Sequence[str], *, seconds: float) -> Ran:
        kept = _OutputEnds()
        program = Program(path=path, arguments=words, environment=dict(ENVIRONMENT))
        containment = Containment(
            no_new_privileges=False, may_detach=True, umask=0o022, term_seconds=TERM_SECONDS
        )
        try:
            ended = await programs.run(program, containment, kept, timeout_seconds=seconds)
        except OSError as error:
            raise Unavailable(f"{path} cannot be run: {error.strerror}") from error
        code = ended.exit_code if ended.is_known and not ended.timed_out else -1
        return Ran(
            exit_code=code,
            timed_out=ended.timed_out,
            out=kept.text(ProgramStream.STDOUT),
            err=kept.text(ProgramStream.STDERR),
        )


def _spelled(versions: Mapping[str, str]) -> list[str]:
    return [f"{name}={version}" if version else name for name, version in sorted(versions.items())]


def _planned(ran: Ran) -> AptPlan:
    _require_success(ran)
    return plan_of(ran.out)


def _require_success(ran: Ran) -> None:
    if ran.timed_out:
        raise Unavailable(f"apt-get did not end in its time: {ran.problem or 'it wrote nothing'}")
    if ran.exit_code:
        raise Unavailable(ran.problem or f"apt-get ended with {ran.exit_code}")


def plan_of(text: str) -> AptPlan:
    """What `apt-get --simulate` says. Pure."""
    installed, removed = {}, set()
    for line in text.splitlines():
        if (found := _INSTALLED.fullmatch(line)) is not None:
            installed[found[1]] = found[3]
        elif (found := _REMOVED.fullmatch(line)) is not None:
            removed.add(found[1])
    return AptPlan(installed=installed, removed=removed)
