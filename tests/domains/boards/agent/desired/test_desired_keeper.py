"""What an agent keeps running and drives, without its server: refusals, ends, and a start from disk."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog
from support.boards.boards_rig import until

from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.config import ProgramsSection, RuleSection
from fleetplane.domains.boards.agent.desired.keeper import DesiredKeeper
from fleetplane.domains.boards.agent.desired.packages import PackagePolicy, Packages
from fleetplane.domains.boards.agent.gpio.chip import HardwareSilent
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard, Wire
from fleetplane.domains.boards.agent.gpio.hardware_thread import HardwareThread
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinPolicy
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import SystemClock

RULES = (
    RuleSection(program="/usr/bin/sleep", forms=(("[0-9]+",),)),
    RuleSection(program="/usr/bin/ls", forms=(("/.*",),)),
)
NO_PACKAGES = PackagePolicy()
HIGH = pb.GPIORequest.HIGH


def wanted(version: str, *programs: tuple[str, str], pins: tuple[int, ...] = ()) -> pb.DesiredState:
    """Programs as a command and its one argument; those that sleep are up at once, others never."""
    return pb.DesiredState(
        set="lab",
        version=version,
        programs=[
            pb.DesiredProgram(
                name=f"p{at}",
                command=command,
                args=[argument],
                up_seconds=0.0 if command.endswith("sleep") else 300.0,
            )
            for at, (command, argument) in enumerate(programs)
        ],
        pins=[pb.DesiredPin(pin=pin, state=HIGH) for pin in pins],
    )


@contextlib.asynccontextmanager
async def keeping(
    folder: Path | BoardIdentityFolder,
    copper: SimulatedBoard,
    rules: tuple[RuleSection, ...] = RULES,
    packages: PackagePolicy = NO_PACKAGES,
) -> AsyncIterator[DesiredKeeper]:
    identity = folder if isinstance(folder, BoardIdentityFolder) else BoardIdentityFolder(folder)
    clock, log = SystemClock(), structlog.get_logger()
    identity.make()
    with BoardAuditLog(identity.audit, clock, log) as audit:
        async with Pins(copper.open, PinPolicy(), clock, audit=audit.pin) as pins:
            keeper = DesiredKeeper(
                folder=identity,
                pins=pins,
                policy=ProgramsSection(rules=rules).policy(),
                packages=Packages(packages, folder=identity, audit=audit, log=log),
                pin_policy=PinPolicy(),
                clock=clock,
                audit=audit,
                clean=lambda text: text.replace("missing", "[redacted]"),
                log=log,
            )
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(keeper.run())
                yield keeper
                running.cancel()


def has(keeper: DesiredKeeper, version: str) -> bool:
    said = keeper.applied()
    return said.version == version and not said.error and all(one.running for one in said.programs)


async def test_what_is_refused_changes_nothing_and_what_was_taken_is_run_after_a_restart(
    tmp_path: Path,
) -> None:
    copper = SimulatedBoard()
    async with keeping(tmp_path, copper) as keeper:
        await keeper.take(wanted("1", ("/usr/bin/sleep", "1001"), pins=(17,)))
        await until(lambda: has(keeper, "1"))
        assert copper.wire(17, "look").level() == 1
        for refused, why in (
            (wanted("2", ("/usr/bin/id", "-u")), "allow list"),
            (wanted("2", ("/usr/bin/sleep", "soon")), "arguments"),
            (wanted("2", ("/usr/bin/sleep", "1"), pins=(2,)), "protected"),
        ):
            before = keeper.applied().failures
            await keeper.take(refused)
            said = keeper.applied()
            assert why in said.error
            assert (said.version, said.wanted, said.failures) == ("1", "2", before + 1)
        assert copper.wire(17, "look").level() == 1
    async with keeping(tmp_path, copper) as keeper:
        await until(lambda: has(keeper, "1"))
        assert keeper.applied().wanted == "1", "what was refused is not kept"
        assert copper.wire(17, "look").level() == 1
        await keeper.take(pb.DesiredState())  # of no set any more
        await until(lambda: keeper.applied() == pb.AppliedState(failures=keeper.applied().failures))
    async with keeping(tmp_path, copper) as keeper:
        await keeper.take(wanted("3", ("/usr/bin/sleep", "1001")))
        await until(lambda: has(keeper, "3"))
    async with keeping(tmp_path, copper, rules=()) as keeper:  # its owner allows nothing any more
        await until(lambda: "runs no commands" in keeper.applied().error)
        assert not keeper.applied().programs


class SlowDisk(BoardIdentityFolder):
    """What is kept there is read at once and handed over only when told."""

    handed_over = threading.Event()

    def read(self, path: Path) -> bytes | None:
        found = super().read(path)
        assert self.handed_over.wait(60)
        return found


async def test_what_is_sent_while_the_disk_is_still_read_is_not_replaced_by_what_is_on_it(
    tmp_path: Path,
) -> None:
    async with keeping(tmp_path, SimulatedBoard()) as keeper:
        await keeper.take(wanted("1", ("/usr/bin/sleep", "1001")))
        await until(lambda: has(keeper, "1"))
    slow = SlowDisk(tmp_path)
    async with keeping(slow, SimulatedBoard()) as keeper, asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(keeper.take(wanted("2", ("/usr/bin/sleep", "1002"))))
        await asyncio.wait({taking}, timeout=0.2)
        slow.handed_over.set()
        await until(lambda: has(keeper, "2"))
        assert keeper.applied().wanted == "2"


class SlowCopper(SimulatedBoard):
    """Holds up the first call for one pin after `hold`, until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held_pin: int | None = None
        self.go = threading.Event()
        self.calls: list[str] = []

    def hold(self, pin: int) -> None:
        self.held_pin = pin

    @property
    def holds(self) -> bool:
        return self.held_pin is None

    def wire(self, pin: int, doing: str) -> Wire:
        self.calls.append(doing)
        if pin == self.held_pin:
            self.held_pin = None
            assert self.go.wait(60)
        return super().wire(pin, doing)


async def test_pins_to_be_driven_again_while_one_is_released_do_not_end_the_keeper(tmp_path: Path) -> None:
    copper = SlowCopper()
    async with keeping(tmp_path, copper) as keeper:
        await keeper.take(wanted("1", ("/usr/bin/sleep", "1001"), pins=(17,)))
        await until(lambda: has(keeper, "1"))
        copper.hold(17)
        await keeper.take(wanted("2", ("/usr/bin/sleep", "1001")))
        await until(lambda: copper.holds)
        keeper.drive_again()
        copper.go.set()
        await until(lambda: has(keeper, "2"))
        assert copper.wires[17].consumer is None


async def test_a_pin_that_is_being_driven_is_driven_again_if_that_is_asked_meanwhile(tmp_path: Path) -> None:
    copper = SlowCopper()
    async with keeping(tmp_path, copper) as keeper:
        copper.hold(17)
        await keeper.take(wanted("1", pins=(17,)))
        await until(lambda: copper.holds)
        keeper.drive_again()
        copper.go.set()
        await until(lambda: "reconfiguring pin 17" in copper.calls)
        await until(lambda: has(keeper, "1"))


async def test_pins_to_be_driven_again_are_released_if_they_are_not_wanted_by_then(tmp_path: Path) -> None:
    copper = SlowCopper()
    async with keeping(tmp_path, copper) as keeper:
        copper.hold(18)
        await keeper.take(wanted("1", pins=(17, 18)))
        await until(lambda: copper.holds)
        await keeper.take(wanted("2", ("/usr/bin/sleep", "1001")))
        keeper.drive_again()
        copper.go.set()
        await until(lambda: has(keeper, "2"))
        assert [copper.wires[pin].consumer for pin in (17, 18)] == [None, None]


async def test_a_pin_that_was_driven_too_late_to_be_told_is_released_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copper = SlowCopper()
    async with keeping(tmp_path, copper) as keeper:
        thread = keeper._pins._thread

        async def given_up_once_begun(work: Callable[[], object]) -> None:
            """Not by the clock: a call whose time is over before it began is dropped."""
            calling = asyncio.create_task(HardwareThread.call(thread, work))
            await until(lambda: copper.holds)
            calling.cancel()
            raise HardwareSilent("gpio did not answer")

        monkeypatch.setattr(thread, "call", given_up_once_begun)
        copper.hold(17)
        await keeper.take(wanted("1", pins=(17,)))
        await until(lambda: "did not answer" in keeper.applied().error)
        monkeypatch.undo()
        copper.go.set()
        await until(lambda: copper.wires[17].consumer)
        await keeper.take(wanted("2", ("/usr/bin/sleep", "1001")))
        await until(lambda: has(keeper, "2"))
        assert copper.wires[17].consumer is None


async def test_a_program_that_ends_is_told_with_its_last_words_and_started_again(tmp_path: Path) -> None:
    async with keeping(tmp_path, SimulatedBoard()) as keeper:
        told: list[str] = []
        keeper.on_news(lambda: told.append(keeper.applied().error))
        await keeper.take(wanted("1", ("/usr/bin/ls", "/missing")))
        await until(lambda: keeper.applied().programs and keeper.applied().programs[0].restarts)
        said = keeper.applied()
        assert said.version == ""
        assert said.error.startswith("program p0 ended with 2: ")
        assert "[redacted]" in said.error, "what the owner wants hidden is not told"
        assert told[-1] == said.error
        await keeper.take(wanted("2", ("/usr/bin/sleep", "1001")))
        await until(lambda: has(keeper, "2"))
        assert keeper.applied().failures >= 1
