"""Packages that this board should have: what its owner allows, what was changed, and the way back.

Off unless the board's own configuration names packages. Before anything is changed apt is asked what it would
do; if that touches any package that is not allowed, dependencies included, nothing happens. The state before
is written down first, so that a version can be taken back: a package that was absent is removed, one that was
present gets its version again. Packages that were present anyway are never removed.

apt-get and dpkg are run without a shell and with a time limit. Every name and version matches the grammar of
`domains/boards/debian.py` and stands behind `--`, so that no word can be an option. Packages are installed
only from the board's own sources, and only if apt trusts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.debian import check_packages
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied, SettingsError, Unavailable
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, Program
from fleetplane.node.programs.run import OutputTail, ProgramStream
from fleetplane.node.tasks import in_thread

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
        ran = await run_to_completion(self._changed(APT_GET, words))
        if ran.exit_code and INTERRUPTED in f"{ran.out}{ran.err}":
            await run_to_completion(
                self._changed(DPKG, ("--force-confdef", "--force-confold", "--configure", "-a"))
            )
            ran = await run_to_completion(self._changed(APT_GET, words))
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


PATTERN: Final = re.compile(r"[a-z0-9*][a-z0-9+.*-]{0,99}")
PATTERNS_LIMIT: Final = 256
TIMEOUT_SECONDS: Final = (10.0, 7200.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagePolicy:
    """What the board's owner allows."""

    allow: tuple[str, ...] = ()
    sudo: bool = False
    timeout_seconds: float = 600.0

    def checked(self) -> PackagePolicy:
        """The policy, or SettingsError naming the field."""
        for one in self.allow[:PATTERNS_LIMIT]:
            if PATTERN.fullmatch(one) is None:
                raise SettingsError(f"packages.allow: {one[:80]!r} is no name", field="packages.allow")
        if len(self.allow) > PATTERNS_LIMIT:
            raise SettingsError(f"packages.allow has at most {PATTERNS_LIMIT} names", field="packages.allow")
        low, high = TIMEOUT_SECONDS
        if not low <= self.timeout_seconds <= high:
            raise SettingsError(
                f"packages.timeout_seconds is {low:g} to {high:g}", field="packages.timeout_seconds"
            )
        return self

    def allows(self, name: str) -> bool:
        """Whether a package is named; only * is special."""
        return any(re.fullmatch(re.escape(one).replace(r"\*", ".*"), name) for one in self.allow)


class ChangedPackage(msgspec.Struct, frozen=True, kw_only=True):
    """A package that was changed for the server. As it stands on disk: no field may be renamed."""

    before: str = ""
    """What was installed before the first change; empty if nothing was."""
    any: str = ""
    """What was installed when any version would do: what "any" means after an exact one."""
    needed_by: tuple[str, ...] = ()
    """For a dependency: what it came with."""


Changed = Mapping[str, ChangedPackage]


class Packages:
    def __init__(
        self,
        policy: PackagePolicy,
        *,
        folder: BoardIdentityFolder,
        audit: BoardAuditLog,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._policy = policy
        self._folder = folder
        self._audit = audit
        self._log = log
        self._apt = Apt(sudo=policy.sudo, timeout_seconds=policy.timeout_seconds)
        self._changed: dict[str, ChangedPackage] | None = None
        self.state: Mapping[str, str] = {}
        """Versions of the packages of the set as dpkg had them last, empty for one that is not installed."""

    def __repr__(self) -> str:
        return f"<Packages {len(self.state)} of {len(self._policy.allow)} allowed>"

    def applied(self) -> list[pb.AppliedPackage]:
        """What is reported."""
        return [pb.AppliedPackage(name=name, version=self.state[name]) for name in sorted(self.state)]

    def check(self, wanted: Mapping[str, str]) -> None:
        """Refuse what may not be installed here. Blocking."""
        if not wanted:
            return
        check_packages(list(wanted.items()))
        if not self._policy.allow:
            raise PermissionDenied("this board installs no packages: packages.allow names none")
        for name in wanted:
            if not self._policy.allows(name):
                raise PermissionDenied(f"package {name} is not on the allow list of this board")
        self._apt.check()

    # Bringing it about.

    async def install(self, wanted: Mapping[str, str]) -> None:
        """Have these installed, and give back versions of packages that are not wanted any more."""
        changed = await self._load()
        targets = dict(wanted)
        for name, one in changed.items():
            if name not in wanted and one.before and self._is_over(name, one, wanted):
                targets[name] = one.before
            elif name in wanted and not wanted[name]:
                targets[name] = one.any or one.before
        there = await self._apt.installed({*targets, *changed})
        missing = {
            name: version
            for name, version in targets.items()
            if name not in there or (version and there[name] != version)
        }
        if missing:
            self._apt.check()
            plan = await self._apt.plan_install(missing)
            self._require_allowed(plan.installed)
            if plan.removed:
                raise FailedPrecondition(f"apt would remove {', '.join(sorted(plan.removed)[:5])}")
            if absent := sorted(missing.keys() - plan.installed.keys()):
                raise FailedPrecondition(f"apt would not install {', '.join(absent)}")
            before = await self._apt.installed(plan.installed)
            await self._note(_grown(changed, plan.installed, before, wanted))
            await self._carry_out("package_install", plan.installed)
        await self._look(wanted)

    async def clear(self, wanted: Mapping[str, str]) -> None:
        """Remove what was installed for the server and is not wanted any more."""
        changed = await self._load()
        unwanted = {name: one for name, one in changed.items() if self._is_over(name, one, wanted)}
        there = await self._apt.installed(unwanted)
        if going := [name for name, one in unwanted.items() if not one.before and name in there]:
            self._apt.check()
            plan = await self._apt.plan_remove(going)
            if others := sorted(set(plan.removed) - set(going)):
                raise FailedPrecondition(
                    f"{', '.join(sorted(going))} cannot be removed: {', '.join(others[:5])} would go with it"
                )
            await self._carry_out("package_remove", dict.fromkeys(going, ""))
        if unwanted:
            await self._note({name: one for name, one in changed.items() if name not in unwanted})
        await self._look(wanted)

    def _is_over(self, name: str, one: ChangedPackage, wanted: Collection[str]) -> bool:
        """Whether a package is to be as it was. One that the owner allows no more is left alone."""
        is_needed = name in wanted or any(whom in wanted for whom in one.needed_by)
        return not is_needed and self._policy.allows(name)

    def _require_allowed(self, names: Collection[str]) -> None:
        if strange := sorted(name for name in names if not self._policy.allows(name)):
            raise PermissionDenied(
                f"apt would also change {', '.join(strange[:5])}, which the allow list of this board lacks"
            )

    async def _carry_out(self, act: str, versions: Mapping[str, str]) -> None:
        self._audit.require(act, {"packages": dict(versions)})
        try:
            if act == "package_install":
                await self._apt.install(versions)
            else:
                await self._apt.remove(versions)
            self._log.info("packages.changed", act=act, packages=dict(versions))
        finally:
            output = self._apt.output.encode()
            await in_thread(lambda: self._folder.write(self._folder.packages_log, output))

    async def _look(self, wanted: Mapping[str, str]) -> None:
        there = await self._apt.installed(wanted)
        self.state = {name: there.get(name, "") for name in wanted}

    # What was there before.

    async def _load(self) -> dict[str, ChangedPackage]:
        if self._changed is None:
            raw = await in_thread(lambda: self._folder.read(self._folder.packages))
            try:
                kept = msgspec.json.decode(raw or b"{}", type=dict[str, ChangedPackage])
            except msgspec.MsgspecError as error:  # then nothing is taken back: better than a wrong version
                self._log.error("packages.unreadable", error=str(error))
                kept = {}
            self._changed = kept
        return self._changed

    async def _note(self, changed: Changed) -> None:
        content = msgspec.json.encode(changed) + b"\n"
        await in_thread(lambda: self._folder.write(self._folder.packages, content))
        self._changed = dict(changed)


def _grown(
    changed: Changed, plan: Mapping[str, str], before: Mapping[str, str], wanted: Mapping[str, str]
) -> Changed:
    """What is written down before a plan is carried out. Pure."""
    found = dict(changed)
    for name, version in plan.items():
        one = found.get(name) or ChangedPackage(before=before.get(name, ""))
        if name in wanted:
            any_version = version if not wanted[name] else one.any
            found[name] = msgspec.structs.replace(one, any=any_version, needed_by=())
        elif name not in changed:
            found[name] = msgspec.structs.replace(one, needed_by=tuple(sorted(wanted)))
    return found
