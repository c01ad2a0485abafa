"""The same wires behind three drivers: simulated, libgpiod over a double, libgpiod over the kernel."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gpiod
from gpiod import _ext
from gpiod.line import Bias, Value
from gpiod.line import Direction as KernelDirection
from gpiod.line_settings import _line_settings_to_ext

from fleetplane.domains.boards.agent.gpio.chip import Chip, LineDirection, LinePull
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard, Wire
from fleetplane.domains.boards.agent.gpio.gpiod_chip import Config, KernelRequest, open_header_chip

LINES = 28


class GpioRig(Protocol):
    """The world outside a chip."""

    def open(self) -> Chip: ...

    def drive(self, pin: int, level: int) -> None: ...

    def level(self, pin: int) -> int:
        """What a meter at the wire would show."""
        ...

    def occupy(self, pin: int, consumer: str) -> None: ...

    def history(self, pin: int) -> list[int] | None:
        """Every level that the wire has shown; None where nobody recorded it."""
        ...


class SimulatedRig:
    def __init__(self) -> None:
        self.board = SimulatedBoard(LINES)

    def open(self) -> Chip:
        return self.board.open()

    def drive(self, pin: int, level: int) -> None:
        self.board.drive(pin, level)

    def level(self, pin: int) -> int:
        return self.board.wires[pin].level()

    def occupy(self, pin: int, consumer: str) -> None:
        self.board.occupy(pin, consumer)

    def history(self, pin: int) -> list[int]:
        return list(self.board.wires[pin].history)


class DoubleRig(SimulatedRig):
    """The real adapter over a double of the kernel's chip."""

    def open(self) -> Chip:
        return open_header_chip(lambda: ["/dev/gpiochip0"], open_chip=lambda path: KernelDouble(self.board))


@dataclass(frozen=True, kw_only=True)
class LineInfoDouble:
    name: str
    used: bool
    consumer: str


class KernelDouble:
    """As much of `gpiod.Chip` as the adapter uses, with the kernel's rules and errors."""

    def __init__(
        self, board: SimulatedBoard, label: str = "pinctrl-bcm2711", names: tuple[str, ...] = ()
    ) -> None:
        self.board = board
        self.closed = False
        self.failure: int | None = None
        self._label = label
        self._names = names

    def get_info(self) -> gpiod.ChipInfo:
        return gpiod.ChipInfo(name="gpiochip0", label=self._label, num_lines=len(self.board.wires))

    def get_line_info(self, line: int | str) -> LineInfoDouble:
        assert isinstance(line, int)
        wire = self.board.wires[line]
        name = self._names[line] if line < len(self._names) else ""
        return LineInfoDouble(name=name, used=wire.consumer is not None, consumer=wire.consumer or "")

    def request_lines(self, config: Config, consumer: str | None = None) -> KernelRequest:
        ((offset, settings),) = config.items()
        assert isinstance(offset, int)
        assert settings is not None
        assert consumer is not None
        assert len(consumer) < 32
        must_suit_the_library(offset, settings)
        self.must_work()
        wire = self.board.wires[offset]
        if wire.consumer is not None:
            raise os_error(errno.EBUSY)
        wire.consumer = consumer
        apply(wire, settings)
        return RequestDouble(self, offset)

    def must_work(self) -> None:
        if self.failure is not None:
            raise os_error(self.failure)

    def close(self) -> None:
        self.closed = True


class RequestDouble:
    def __init__(self, chip: KernelDouble, offset: int) -> None:
        self._chip = chip
        self._offset = offset

    @property
    def _wire(self) -> Wire:
        return self._chip.board.wires[self._offset]

    def get_value(self, line: int | str) -> Value:
        self._chip.must_work()
        return Value(self._wire.level())

    def set_value(self, line: int | str, value: Value) -> None:
        self._chip.must_work()
        if self._wire.direction is not LineDirection.OUTPUT:
            raise os_error(errno.EPERM)
        self._wire.driven = value.value
        self._wire.settle()

    def reconfigure_lines(self, config: Config) -> None:
        self._chip.must_work()
        settings = config[self._offset]
        assert settings is not None
        must_suit_the_library(self._offset, settings)
        assert settings.direction is not KernelDirection.AS_IS, "the kernel wants a direction here"
        apply(self._wire, settings)

    def release(self) -> None:
        self._wire.consumer = None
        self._wire.direction = LineDirection.INPUT
        self._wire.settle()


def must_suit_the_library(offset: int, settings: gpiod.LineSettings) -> None:
    """The C library checks what it is given before the kernel does, and needs no chip for that."""
    _ext.LineConfig().add_line_settings([offset], _line_settings_to_ext(settings))


def apply(wire: Wire, settings: gpiod.LineSettings) -> None:
    if settings.direction is KernelDirection.AS_IS:
        if settings.bias is not Bias.AS_IS:
            raise os_error(errno.EINVAL)  # the kernel takes a bias only together with a direction
        return
    if settings.direction is KernelDirection.OUTPUT:
        wire.driven = settings.output_value.value
        wire.direction = LineDirection.OUTPUT
    else:
        wire.direction = LineDirection.INPUT
    wire.pull = {Bias.PULL_UP: LinePull.UP, Bias.PULL_DOWN: LinePull.DOWN}.get(settings.bias, LinePull.NONE)
    wire.settle()


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


CONFIGFS = Path("/sys/kernel/config/gpio-sim")


def why_no_kernel_simulator() -> str | None:
    """None when the kernel's simulator can be used here, else the reason in words."""
    if not CONFIGFS.parent.is_dir():
        return "the kernel has no configfs at /sys/kernel/config, so no gpio-sim"
    if not CONFIGFS.is_dir():
        return "the kernel's gpio-sim module is not loaded (modprobe gpio-sim)"
    if not os.access(CONFIGFS, os.W_OK):
        return f"{CONFIGFS} may not be written by this user"
    return None


class KernelSimulatorRig:
    def __init__(self, label: str, sysfs: Path) -> None:
        self._label = label
        self._sysfs = sysfs
        self._others: list[gpiod.LineRequest] = []

    def open(self) -> Chip:
        return open_header_chip(labels=(self._label,))

    def drive(self, pin: int, level: int) -> None:
        (self._sysfs / f"sim_gpio{pin}/pull").write_text("pull-up" if level else "pull-down")

    def level(self, pin: int) -> int:
        return int((self._sysfs / f"sim_gpio{pin}/value").read_text())

    def occupy(self, pin: int, consumer: str) -> None:
        device = f"/dev/{self._sysfs.name}"
        self._others.append(gpiod.request_lines(device, {pin: None}, consumer=consumer))

    def history(self, pin: int) -> None:
        return None

    def close(self) -> None:
        for request in self._others:
            request.release()


@contextmanager
def kernel_simulator() -> Iterator[KernelSimulatorRig]:
    device = CONFIGFS / f"fleetplane-{uuid.uuid4().hex[:12]}"
    bank = device / "bank"
    bank.mkdir(parents=True)
    try:
        (bank / "num_lines").write_text(str(LINES))
        (bank / "label").write_text(device.name)
        (device / "live").write_text("1")
        dev_name = (device / "dev_name").read_text().strip()
        chip_name = (bank / "chip_name").read_text().strip()
        rig = KernelSimulatorRig(device.name, Path("/sys/devices/platform") / dev_name / chip_name)
        yield rig
        rig.close()
        (device / "live").write_text("0")
    finally:
        bank.rmdir()
        device.rmdir()
