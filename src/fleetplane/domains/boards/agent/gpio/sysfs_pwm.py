"""Waveforms made by the board's own PWM block, through /sys/class/pwm.

A pin is offered only where the board's device tree routes it to the block, or the operator says so:
elsewhere the signal would come out at another pin, or nowhere. The block's controller is found by what
it is and where it sits, never by its number. A routed pin is not to be claimed as a line: that would
take its route away until the next boot.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fleetplane.domains.boards.agent.gpio.chip import HardwareUnsupported, LineBusy, from_os

NANOSECONDS: Final = 1_000_000_000
SETTLE_TRIES: Final = 20
SETTLE_SECONDS: Final = 0.05
"""A second in all: after an export, udev needs a moment to hand the files to the agent's group."""
TREE_NODES_LIMIT: Final = 4096
"""Nodes of pin settings looked through; a board has some two hundred."""


class HardwarePwm(Protocol):
    def offers(self, pin: int) -> bool: ...

    def start(self, pin: int, *, frequency_hz: int, duty_percent: int) -> None:
        """Begin, or change, a waveform."""
        ...

    def stop(self, pin: int) -> None:
        """End a waveform and give the channel back; harmless when there is none."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PwmBlock:
    compatible: str
    address: str
    """How the name of the controller's device begins to end: it tells the header's block from others."""
    channels: Mapping[int, int]
    """By pin. On older boards two pins share a channel, and with it the waveform."""


BLOCKS: Final = (
    PwmBlock(compatible="raspberrypi,rp1-pwm", address="98000.pwm", channels={12: 0, 13: 1, 18: 2, 19: 3}),
    PwmBlock(compatible="brcm,bcm2835-pwm", address="20c000.pwm", channels={12: 0, 13: 1, 18: 0, 19: 1}),
)


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


class SysfsPwm:
    def __init__(
        self,
        root: Path = Path("/"),
        *,
        pins: frozenset[int] | None = None,
        write: Callable[[Path, str], None] = write_text,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pins`: those routed to the block, where the operator knows better than the device tree."""
        self._root = root
        self._said = pins
        self._write = write
        self._sleep = sleep
        self._found: tuple[Path, dict[int, int]] | None = None
        self._looked = False
        self._running: dict[int, Path] = {}

    def __repr__(self) -> str:
        return f"<SysfsPwm {self._root} running={sorted(self._running)}>"

    def offers(self, pin: int) -> bool:
        found = self._controller()
        return found is not None and pin in found[1]

    def start(self, pin: int, *, frequency_hz: int, duty_percent: int) -> None:
        folder = self._running.get(pin) or self._export(pin)
        period = NANOSECONDS // frequency_hz
        duty = period * duty_percent // 100
        try:
            # The block refuses a duty beyond its period, so whichever keeps that true goes first.
            steps = [("duty_cycle", duty), ("period", period)]
            if duty > int((folder / "period").read_text() or 0):
                steps.reverse()
            for name, value in steps:
                self._write(folder / name, str(value))
            self._write(folder / "enable", "1")
        except OSError as error:
            raise from_os(error, f"setting the waveform of pin {pin}") from error

    def stop(self, pin: int) -> None:
        folder = self._running.pop(pin, None)
        if folder is None:
            return
        try:
            self._write(folder / "enable", "0")
            self._write(folder.parent / "unexport", folder.name.removeprefix("pwm"))
        except OSError as error:
            raise from_os(error, f"stopping the waveform of pin {pin}") from error

    def close(self) -> None:
        for pin in list(self._running):
            self.stop(pin)

    def _export(self, pin: int) -> Path:
        found = self._controller()
        if found is None or pin not in found[1]:
            raise HardwareUnsupported(f"pin {pin} is not routed to a PWM block")
        controller, channels = found
        channel = channels[pin]
        folder = controller / f"pwm{channel}"
        sharing = [other for other in self._running if channels[other] == channel]
        if sharing:
            raise LineBusy(f"pin {pin} shares its PWM channel with pin {sharing[0]}, which uses it")
        if folder.exists():
            raise LineBusy(f"the PWM channel of pin {pin} is used by another program")
        try:
            self._write(controller / "export", str(channel))
            self._settle(folder)
        except OSError as error:
            raise from_os(error, f"taking the PWM channel of pin {pin}") from error
        self._running[pin] = folder
        return folder

    def _settle(self, folder: Path) -> None:
        for remaining in reversed(range(SETTLE_TRIES)):
            try:
                self._write(folder / "duty_cycle", "0")
                return
            except (PermissionError, FileNotFoundError):
                if not remaining:
                    raise
                self._sleep(SETTLE_SECONDS)

    def _controller(self) -> tuple[Path, dict[int, int]] | None:
        if not self._looked:
            self._looked = True
            self._found = self._look()
        return self._found

    def _look(self) -> tuple[Path, dict[int, int]] | None:
        for controller in sorted((self._root / "sys/class/pwm").glob("pwmchip*")):
            device = (controller / "device").resolve()
            names = _read(device / "of_node/compatible").split(b"\0")
            for block in BLOCKS:
                if block.compatible.encode() in names and device.name.endswith(block.address):
                    routed = self._said if self._said is not None else self._routed(device)
                    offered = {pin: channel for pin, channel in block.channels.items() if pin in routed}
                    return (controller, offered) if offered else None
        return None

    def _routed(self, device: Path) -> frozenset[int]:
        """The pins that the device tree gives to a controller."""
        wanted = set(_cells(_read(device / "of_node/pinctrl-0")))
        pins: set[int] = set()
        for node in self._pin_settings():
            if wanted.intersection(_cells(_read(node / "phandle"))):
                pins.update(_cells(_read(node / "brcm,pins")))
                named = _read(node / "pins").decode("ascii", "replace").split("\0")
                pins.update(int(name[4:]) for name in named if name[:4] == "gpio" and name[4:].isdigit())
        return frozenset(pins)

    def _pin_settings(self) -> Iterator[Path]:
        tree = self._root / "sys/firmware/devicetree/base"
        for count, phandle in enumerate(tree.glob("**/gpio@*/**/phandle")):
            if count >= TREE_NODES_LIMIT:
                return
            yield phandle.parent


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _cells(data: bytes) -> tuple[int, ...]:
    """A device tree's numbers: big-endian, 32 bits each."""
    return struct.unpack(f">{len(data) // 4}I", data[: len(data) // 4 * 4])
