"""Bringing this board to what its server wants of it, and keeping it there, with or without the server.

What the server sends is checked whole, kept on disk, and then brought about: packages are installed; programs
that are no longer wanted are ended, others started; pins are driven, others released; packages that are no
longer wanted go. It is in place once every package is installed, every program has been up for some seconds
and every pin is driven; a program that ends later is started again, and the server
is told. What is refused changes nothing: what was in place stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.commands.rules import CommandPolicy
from fleetplane.domains.boards.agent.desired import supervision
from fleetplane.domains.boards.agent.desired.packages import Packages
from fleetplane.domains.boards.agent.desired.supervision import DesiredDocument, KeptJob, SupervisedProgram
from fleetplane.domains.boards.agent.gpio.chip import HardwareSilent, LineDirection
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.pins import rules as pin_rules
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinOperation, PinPolicy
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

PIN_RETRY_SECONDS: Final = 60.0
"""Between two tries to drive a pin that could not be: somebody else may have reserved it."""
PACKAGE_RETRY_SECONDS: Final = 600.0
"""Between two tries to install packages: the network may be back, or a lock free."""
CALLER: Final = PinCaller(user="desired")


class DesiredKeeper:
    def __init__(
        self,
        *,
        folder: BoardIdentityFolder,
        pins: Pins,
        policy: CommandPolicy,
        packages: Packages,
        pin_policy: PinPolicy,
        clock: Clock,
        audit: BoardAuditLog,
        clean: Callable[[str], str],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._folder = folder
        self._pins = pins
        self._policy = policy
        self._packages = packages
        self._pin_policy = pin_policy
        self._clock = clock
        self._audit = audit
        self._clean = clean
        self._log = log
        self._desired = DesiredDocument()
        self._sent = ("", "")
        """Set and version of what was sent last, taken or refused."""
        self._in_place = ("", "")
        self._is_done = False
        """Whether all of `_desired` was begun."""
        self._refusal = ""
        self._pin_problem = ""
        self._package_problem = ""
        self._failures = 0
        """Refusals, and tries to drive pins and to install packages; those of programs are added."""
        self._past_failures = 0
        """Of programs that are not wanted any more."""
        self._running: dict[str, tuple[SupervisedProgram, asyncio.Task[None]]] = {}
        self._driven: dict[int, int | None] = {}
        """Pins that are ours to release, each with its level; None for one that is to be driven again."""
        self._told = b""
        self._news: Callable[[], None] = lambda: None
        self._wake = asyncio.Event()
        self._loaded = asyncio.Event()

    def __repr__(self) -> str:
        return f"<DesiredKeeper {self._desired.set or None} programs={len(self._running)}>"

    def on_news(self, tell: Callable[[], None]) -> None:
        """Call `tell` when there is something to report at once; it must not block or raise."""
        self._news = tell

    # What the server says and is told.

    async def take(self, message: pb.DesiredState) -> None:
        """Take what the server wants, or refuse it; never raises for what is in it.

        Waits until what was kept on disk is read, lest that old state replace the new one.
        """
        await self._loaded.wait()
        desired = supervision.of_message(message)
        self._sent = desired.set, desired.version
        try:
            await asyncio.to_thread(self._checked, desired)
        except FleetplaneError as error:
            self._refused(error)
            return
        if desired != self._desired:
            await asyncio.to_thread(self._folder.write, self._folder.desired, supervision.encoded(desired))
            self._log.info("programs.taken", set=desired.set, version=desired.version)
            self._desired, self._in_place, self._is_done = desired, ("", ""), False
            self._pin_problem = self._package_problem = ""  # of what was wanted before
        self._refusal = ""
        self._wake.set()

    def _checked(self, desired: DesiredDocument) -> Mapping[str, KeptJob]:
        """What to run; raises what speaks against it. Blocking."""
        found = supervision.jobs(desired, self._policy)
        self._packages.check(desired.packages)
        for pin in desired.pins:
            refusal = pin_rules.pin_refusal(self._pin_policy, PinOperation.CONFIGURE, pin)
            if refusal is not None:
                raise refusal.error
        return found

    def _refused(self, error: FleetplaneError) -> None:
        self._refusal = error.message
        self._failures += 1
        self._log.warning("programs.refused", set=self._sent[0], version=self._sent[1], error=error.message)
        self._look()

    def drive_again(self) -> None:
        """Drive pins once more: they may have been made safe meanwhile."""
        self._driven = dict.fromkeys(self._driven)
        self._wake.set()

    def applied(self) -> pb.AppliedState:
        """What is reported."""
        programs = [one for one, _ in self._running.values()]
        problems = (
            self._refusal,
            self._package_problem,
            *(one.problem for one in programs),
            self._pin_problem,
        )
        return pb.AppliedState(
            set=self._in_place[0],
            version=self._in_place[1],
            wanted_set=self._sent[0],
            wanted=self._sent[1],
            error=next(filter(None, problems), ""),
            failures=self._failures + self._past_failures + sum(one.failures for one in programs),
            programs=[
                pb.AppliedProgram(
                    name=one.name, running=one.up, exit_code=one.exit_code, restarts=one.restarts
                )
                for one in programs
            ],
            packages=self._packages.applied(),
        )

    # Bringing it about.

    async def run(self) -> None:
        """Until cancelled; then no program is left. Pins are made safe by whoever opened them."""
        await asyncio.to_thread(self._load)
        self._loaded.set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                await self._bring_about(tasks)
                try:
                    async with asyncio.timeout(self._retry_seconds()):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _retry_seconds(self) -> float | None:
        if self._pin_problem:
            return PIN_RETRY_SECONDS
        return PACKAGE_RETRY_SECONDS if self._package_problem else None

    def _load(self) -> None:
        raw = self._folder.read(self._folder.desired)
        if raw is None:
            return
        try:
            self._desired = supervision.decoded(raw)
        except FleetplaneError as error:
            self._log.error("programs.unreadable", error=error.message)  # the server sends it again
            return
        self._sent = self._desired.set, self._desired.version

    async def _bring_about(self, tasks: asyncio.TaskGroup) -> None:
        desired, has_packages = self._desired, True
        try:
            wanted = await asyncio.to_thread(self._checked, desired)
        except FleetplaneError as error:  # of before a restart, with another configuration
            if desired is self._desired:  # else the server has sent another meanwhile, and this is woken
                self._refused(error)
            wanted, desired, has_packages = {}, DesiredDocument(), False  # packages are left as they are
        is_installed = not has_packages or await self._change_packages(self._packages.install, desired)
        if is_installed or not self._running:  # else what runs goes on as it was
            await self._change_programs(wanted, desired, tasks)
        if is_installed and has_packages:
            await self._change_packages(self._packages.clear, desired)
        if desired is self._desired:
            self._is_done = True
        self._look()

    async def _change_packages(
        self, change: Callable[[Mapping[str, str]], Awaitable[None]], desired: DesiredDocument
    ) -> bool:
        """Whether packages are as they should be."""
        try:
            await change(desired.packages)
        except FleetplaneError as error:
            if desired is not self._desired:
                return False  # the server has sent another meanwhile, and this is woken
            self._package_problem = f"packages: {self._clean(error.message)}"
            self._failures += 1
            self._log.warning(
                "packages.failed", set=desired.set, version=desired.version, error=error.message
            )
            return False
        self._package_problem = ""
        return True

    async def _change_programs(
        self, wanted: Mapping[str, KeptJob], desired: DesiredDocument, tasks: asyncio.TaskGroup
    ) -> None:
        for name in [name for name, (one, _) in self._running.items() if wanted.get(name) != one.kept]:
            await self._end(name)
        for name, kept in wanted.items():
            if name not in self._running:
                self._begin(name, kept, tasks)
        await self._drive(desired.pins)

    def _begin(self, name: str, kept: KeptJob, tasks: asyncio.TaskGroup) -> None:
        made = SupervisedProgram(
            name=name,
            kept=kept,
            processes=self._policy.processes,
            memory_bytes=self._policy.memory_bytes,
            clock=self._clock,
            audit=self._audit,
            clean=self._clean,
            changed=self._look,
        )
        self._running[name] = made, tasks.create_task(made.run(), name=f"boards/program/{name}")

    async def _end(self, name: str) -> None:
        program, task = self._running[name]
        task.cancel()
        await asyncio.wait({task})
        self._past_failures += program.failures
        del self._running[name]

    async def _drive(self, wanted: Mapping[int, int]) -> None:
        self._pin_problem = ""
        for pin in [pin for pin in self._driven if pin not in wanted]:
            try:
                await self._pins.release(pin, caller=CALLER)
                self._driven.pop(pin, None)
            except FleetplaneError as error:
                self._not_driven(pin, error)
        for pin, level in wanted.items():
            if self._driven.get(pin) == level:
                continue
            before = self._driven
            try:
                await self._pins.configure(pin, direction=LineDirection.OUTPUT, level=level, caller=CALLER)
                # It may have been made safe since, if somebody has asked for it to be driven again.
                self._driven[pin] = level if before is self._driven else None
            except FleetplaneError as error:
                if isinstance(error, HardwareSilent):  # it may be driven yet, and is ours to release then
                    self._driven[pin] = None
                self._not_driven(pin, error)

    def _not_driven(self, pin: int, error: FleetplaneError) -> None:
        self._pin_problem = self._pin_problem or f"pin {pin}: {error.message}"
        self._failures += 1

    def _look(self) -> None:
        """Whether it is in place by now; tells the server what is new."""
        is_up = all(one.up for one, _ in self._running.values())
        is_well = not self._pin_problem and not self._package_problem
        if self._is_done and is_up and is_well and not self._wake.is_set():
            self._in_place = self._desired.set, self._desired.version
        told = self.applied().SerializeToString(deterministic=True)
        if told != self._told:
            self._told = told
            self._news()
