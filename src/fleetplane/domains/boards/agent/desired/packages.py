"""Packages that this board is to have: what its owner allows, what was changed, and the way back.

Off unless the board's own configuration names packages. Before anything is changed apt is asked what it would
do; if that touches any package that is not allowed, dependencies included, nothing happens. What was there
before is written down first, so that a version can be taken back: a package that was absent is removed, one
that was there gets its version again. Packages that were there anyway are never removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.desired.apt import Apt
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.debian import check_packages
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied, SettingsError
from fleetplane.node.tasks import in_thread

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
