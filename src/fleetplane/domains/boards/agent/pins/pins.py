"""The pins of this board, for the event loop.

Every call runs on the one thread that owns the chip, so nothing here ever waits for hardware on the
loop. Besides passing calls on, this module waits: for the next lease to run out, so that a pin whose
holder went silent is safe on time, and for the end, when all pins are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self, TypeVar

from fleetplane.domains.boards.agent.gpio.chip import (
    ChipFactory,
    HardwareFault,
    HardwareOverloaded,
    HardwareSilent,
    LineDirection,
    LinePull,
)
from fleetplane.domains.boards.agent.gpio.hardware_thread import HardwareThread
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import HardwarePwm
from fleetplane.domains.boards.agent.gpio.waveforms import Waveforms
from fleetplane.domains.boards.agent.pins.lines import (
    Audit,
    AuditEntry,
    LeaseState,
    PinLines,
    PinState,
    SeenLevel,
)
from fleetplane.domains.boards.agent.pins.operations import PinBank
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinEvent, PinOperation, PinPolicy
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

CONSUMER: Final = "fleetplane"
RETRY_SECONDS: Final = 1.0
"""Between two tries to make a pin safe on a thread that does not answer."""

T = TypeVar("T")


class Pins:
    """Used as `async with Pins(...) as pins`, with `run` beside it; leaving makes every pin safe."""

    def __init__(
        self,
        chip_factory: ChipFactory,
        policy: PinPolicy,
        clock: Clock,
        *,
        audit: Audit,
        hardware_pwm: HardwarePwm | None = None,
        consumer: str = CONSUMER,
    ) -> None:
        """`audit` is called on the loop, before the call it tells of returns."""
        self._policy = policy
        self._clock = clock
        self._tell = audit
        self._lines = PinLines(chip_factory, clock, waveforms=Waveforms(hardware_pwm), consumer=consumer)
        self._bank = PinBank(self._lines, policy, clock, audit=self._audit)
        self._thread = HardwareThread("gpio")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._expiry: float | None = None

    def __repr__(self) -> str:
        return f"<Pins chip={self.chip_label or None} waiting={self._thread.waiting}>"

    async def __aenter__(self) -> Self:
        """Opens the chip if there is one. A board without pins still has everything else."""
        self._loop = asyncio.get_running_loop()
        with suppress(FleetplaneError):
            await self._thread.call(self._lines.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._thread.close(self._bank.close)

    @property
    def available(self) -> bool:
        """Whether a chip is open. Asks no hardware."""
        return bool(self._lines.label)

    @property
    def chip_label(self) -> str:
        return self._lines.label

    @property
    def unavailable_reason(self) -> str:
        return "" if self.available else self._lines.missing or "the chip was not opened yet"

    async def configure(
        self,
        pin: int,
        *,
        direction: LineDirection = LineDirection.INPUT,
        pull: LinePull = LinePull.NONE,
        level: int | None = None,
        caller: PinCaller,
    ) -> PinState:
        """Without a level an output goes on showing what the wire shows."""
        return await self._call(
            lambda: self._bank.configure(pin, direction=direction, pull=pull, level=level, caller=caller),
            PinOperation.CONFIGURE,
            pin,
            caller,
        )

    async def read(self, pin: int, *, caller: PinCaller, claim: bool = False) -> SeenLevel:
        """`claim`: a pin that is not configured becomes an input, instead of being refused."""
        return await self._call(
            lambda: self._bank.read(pin, caller=caller, claim=claim), PinOperation.READ, pin, caller
        )

    async def write(self, pin: int, level: int, *, caller: PinCaller, claim: bool = False) -> SeenLevel:
        """`claim`: a pin that is not configured becomes an output at this level, without a glitch."""
        return await self._call(
            lambda: self._bank.write(pin, level, caller=caller, claim=claim), PinOperation.WRITE, pin, caller
        )

    async def pwm(self, pin: int, *, frequency_hz: int, duty_percent: int, caller: PinCaller) -> PinState:
        return await self._call(
            lambda: self._bank.pwm(pin, frequency_hz=frequency_hz, duty_percent=duty_percent, caller=caller),
            PinOperation.PWM,
            pin,
            caller,
        )

    async def release(self, pin: int, *, caller: PinCaller) -> None:
        await self._call(lambda: self._bank.release(pin, caller=caller), PinOperation.RELEASE, pin, caller)

    async def lease(self, pin: int, *, caller: PinCaller) -> LeaseState:
        """Take or extend `caller.lease_id` for `caller.lease_seconds`."""
        return await self._call(lambda: self._bank.lease(pin, caller=caller), PinOperation.LEASE, pin, caller)

    async def end_lease(self, pin: int, *, caller: PinCaller) -> None:
        await self._call(lambda: self._bank.end_lease(pin, caller=caller), PinOperation.LEASE, pin, caller)

    async def rehearse(self, operation: PinOperation, pin: int, *, caller: PinCaller) -> None:
        """Raise as the operation would by policy or lease; touch no hardware."""
        await self._call(lambda: self._bank.rehearse(operation, pin, caller=caller), operation, pin, caller)

    async def list(self) -> tuple[PinState, ...]:
        """Every configured pin, with the level it shows now."""
        return await self._thread.call(self._bookkeeping(self._bank.states))

    async def control_lost(self) -> None:
        """The control plane is out of reach: make safe what is configured for that. Say it once a loss."""
        await self._thread.call(self._bookkeeping(self._bank.lose_control))

    async def run(self) -> None:
        """Make pins safe as their leases run out, until cancelled."""
        while True:
            self._wake.clear()
            left = None if self._expiry is None else self._expiry - self._clock.monotonic()
            if left is None or left > 0:
                await self._pause(left)
                continue
            try:
                await self._thread.call(self._bookkeeping(self._bank.expire))
            except HardwareFault:
                # Silent or overloaded: the lease stays run out, and is met again here.
                await self._clock.sleep(RETRY_SECONDS)

    async def _call(self, work: Callable[[], T], operation: PinOperation, pin: int, caller: PinCaller) -> T:
        try:
            return await self._thread.call(self._bookkeeping(work))
        except (HardwareOverloaded, HardwareSilent) as error:
            self._tell(
                AuditEntry(
                    event=PinEvent.OPERATION_DENIED,
                    user=caller.user,
                    pin=pin,
                    at_ns=self._clock.now_ns(),
                    message=error.message,
                    details={"cause": error.cause, "operation": operation},
                )
            )
            raise

    def _bookkeeping(self, work: Callable[[], T]) -> Callable[[], T]:
        """On the thread: note when the next lease runs out, whether or not the caller still waits."""

        def run() -> T:
            try:
                return work()
            finally:
                expiry = self._bank.next_expiry()
                if expiry != self._expiry:
                    self._expiry = expiry
                    self._on_loop(self._wake.set)

        return run

    def _audit(self, entry: AuditEntry) -> None:
        self._on_loop(lambda: self._tell(entry))

    def _on_loop(self, work: Callable[[], None]) -> None:
        assert self._loop is not None, "used before it was entered"
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(work)

    async def _pause(self, seconds: float | None) -> None:
        """Until the time is up, or the next expiry is another one."""
        if seconds is None:
            await self._wake.wait()
            return
        async with asyncio.TaskGroup() as tasks:
            racing = {
                tasks.create_task(self._clock.sleep(seconds)),
                tasks.create_task(self._wait_for_wake()),
            }
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            for task in racing:
                task.cancel()

    async def _wait_for_wake(self) -> None:
        await self._wake.wait()
