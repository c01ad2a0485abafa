"""Lines of a real chip, through the kernel's character device and libgpiod.

The chip is found by its label, then by the names of its lines, never by its number: numbers change
with kernels and with what else is plugged in. The kernel keeps claims exclusive and ends them when
the process does, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import gpiod
from gpiod.line import Bias, Value
from gpiod.line import Direction as KernelDirection

from fleetplane.domains.boards.agent.gpio.chip import (
    CONSUMER_LIMIT,
    AccessRefused,
    ChipMissing,
    GpioLine,
    HardwareFault,
    LineBusy,
    LineDirection,
    LineIsInput,
    LinePull,
    LineReleased,
    from_os,
    require_level,
    require_pin,
)

HEADER_LABELS: Final = ("pinctrl-rp1", "pinctrl-bcm2711", "pinctrl-bcm2835", "pinctrl-bcm2712")
"""Chips that carry the header, in the order they are preferred; the offset of a line is its pin.
The fifth board has two of these names, and its header hangs on the first."""
HEADER_PINS: Final = 28
CHIPS_LIMIT: Final = 64
"""Chips looked at. A board with a few expanders has ten."""

_BIAS: Final = {LinePull.NONE: Bias.DISABLED, LinePull.UP: Bias.PULL_UP, LinePull.DOWN: Bias.PULL_DOWN}
_DIRECTION: Final = {
    LineDirection.INPUT: KernelDirection.INPUT,
    LineDirection.OUTPUT: KernelDirection.OUTPUT,
}

Config = dict[Iterable[int | str] | int | str, gpiod.LineSettings | None]


class KernelRequest(Protocol):
    """The part of `gpiod.LineRequest` that is used here."""

    def get_value(self, line: int | str) -> Value: ...

    def set_value(self, line: int | str, value: Value) -> None: ...

    def reconfigure_lines(self, config: Config) -> None: ...

    def release(self) -> None: ...


class LineFacts(Protocol):
    """The part of `gpiod.LineInfo` that is used here."""

    @property
    def name(self) -> str: ...

    @property
    def used(self) -> bool: ...

    @property
    def consumer(self) -> str: ...


class KernelChip(Protocol):
    """The part of `gpiod.Chip` that is used here."""

    def get_info(self) -> gpiod.ChipInfo: ...

    def get_line_info(self, line: int | str) -> LineFacts: ...

    def request_lines(self, config: Config, consumer: str | None = None) -> KernelRequest: ...

    def close(self) -> None: ...


OpenChip = Callable[[str], KernelChip]


def device_paths(folder: Path = Path("/dev")) -> list[str]:
    found = sorted(folder.glob("gpiochip*"))[:CHIPS_LIMIT]
    return [str(path) for path in found if gpiod.is_gpiochip_device(str(path))]


def open_header_chip(
    paths: Callable[[], Sequence[str]] = device_paths,
    *,
    open_chip: OpenChip = gpiod.Chip,
    labels: Sequence[str] = HEADER_LABELS,
) -> GpiodChip:
    """The chip behind the board's header. A chip factory."""
    seen: list[str] = []
    refused: HardwareFault | None = None
    named: GpiodChip | None = None
    chosen: GpiodChip | None = None
    for path in paths():
        try:
            chip = open_chip(path)
        except OSError as error:
            refused = from_os(error, f"opening {path}", path=path)
            continue
        with translated(f"looking at {path}"):
            label, pins = chip.get_info().label, _pins_by_name(chip)
        seen.append(label)
        if label in labels and _better(label, chosen, labels):
            _close(chosen)
            chosen = GpiodChip(chip, {pin: pin for pin in range(chip.get_info().num_lines)})
        elif pins and chosen is None and named is None:
            named = GpiodChip(chip, pins)
        else:
            chip.close()
    if chosen is not None:
        _close(named)
        return chosen
    if named is not None:
        return named
    if isinstance(refused, AccessRefused):
        raise refused
    raise ChipMissing(
        f"no GPIO chip carries the header: none is labelled {', '.join(labels)} "
        f"and none has lines named GPIO<n>; there are {', '.join(seen) or 'no chips at all'}",
        hint="run the agent on a board with a header, or with simulated pins",
    )


class GpiodChip:
    def __init__(self, chip: KernelChip, offsets: Mapping[int, int]) -> None:
        """`offsets`: of the chip's lines, by pin."""
        self._chip = chip
        self._offsets = dict(offsets)
        self._label = chip.get_info().label
        self._claimed: dict[int, GpiodLine] = {}
        self._open = True

    def __repr__(self) -> str:
        return f"<GpiodChip {self._label} claimed={sorted(self._claimed)}>"

    @property
    def label(self) -> str:
        return self._label

    @property
    def lines(self) -> int:
        return max(self._offsets, default=-1) + 1

    def claim(
        self, pin: int, *, direction: LineDirection, pull: LinePull, level: int | None = None, consumer: str
    ) -> GpioLine:
        offset = self._offset(pin)
        keeping = direction is LineDirection.OUTPUT and level is None
        # Without a level to drive, the line is first taken as it is: only then can its level be read,
        # and asking for an input instead would let go of a wire that is being driven.
        settings = gpiod.LineSettings() if keeping else _settings(direction, pull, level)
        try:
            request = self._chip.request_lines({offset: settings}, consumer=consumer[:CONSUMER_LIMIT])
        except OSError as error:
            raise self._why_not(error, pin) from error
        line = GpiodLine(self, pin, offset, request, direction)
        if keeping:
            try:
                line.reconfigure(direction=direction, pull=pull)
            except HardwareFault:
                request.release()
                raise
        self._claimed[pin] = line
        return line

    def holder(self, pin: int) -> str | None:
        with translated(f"asking who holds pin {pin}"):
            info = self._chip.get_line_info(self._offset(pin))
        return (info.consumer or "unnamed") if info.used else None

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for line in list(self._claimed.values()):
            line.release()
        self._chip.close()

    def forget(self, pin: int) -> None:
        self._claimed.pop(pin, None)

    def _offset(self, pin: int) -> int:
        if not self._open:
            raise LineReleased("the chip is closed")
        require_pin(pin, self.lines)
        if pin not in self._offsets:
            raise ChipMissing(f"{self._label} has no line named GPIO{pin}")
        return self._offsets[pin]

    def _why_not(self, error: OSError, pin: int) -> HardwareFault:
        fault = from_os(error, f"claiming pin {pin}")
        if isinstance(fault, LineBusy):
            with suppress(HardwareFault):
                holder = self.holder(pin) or "someone who just let go"
                return LineBusy(f"pin {pin} is held by {holder!r}", consumer=holder, errno="EBUSY")
        return fault


class GpiodLine:
    def __init__(
        self, chip: GpiodChip, pin: int, offset: int, request: KernelRequest, direction: LineDirection
    ) -> None:
        self._chip = chip
        self._pin = pin
        self._offset = offset
        self._request: KernelRequest | None = request
        self._direction = direction

    def __repr__(self) -> str:
        return f"<GpiodLine {self._pin} {'held' if self._request else 'released'}>"

    @property
    def pin(self) -> int:
        return self._pin

    def read(self) -> int:
        with translated(f"reading pin {self._pin}"):
            return int(self._held().get_value(self._offset) is Value.ACTIVE)

    def write(self, level: int) -> None:
        require_level(level)
        request = self._held()
        if self._direction is not LineDirection.OUTPUT:
            raise LineIsInput(f"pin {self._pin} is an input")
        with translated(f"writing pin {self._pin}"):
            request.set_value(self._offset, _value(level))

    def reconfigure(self, *, direction: LineDirection, pull: LinePull, level: int | None = None) -> None:
        request = self._held()
        if level is None:
            level = self.read()
        with translated(f"reconfiguring pin {self._pin}"):
            request.reconfigure_lines({self._offset: _settings(direction, pull, level)})
        self._direction = direction

    def release(self) -> None:
        if self._request is None:
            return
        request, self._request = self._request, None
        self._chip.forget(self._pin)
        request.release()

    def _held(self) -> KernelRequest:
        if self._request is None:
            raise LineReleased(f"pin {self._pin} was released")
        return self._request


@contextmanager
def translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os(error, doing) from error


def _settings(direction: LineDirection, pull: LinePull, level: int | None) -> gpiod.LineSettings:
    if level is not None:
        require_level(level)
    return gpiod.LineSettings(direction=_DIRECTION[direction], bias=_BIAS[pull], output_value=_value(level))


def _value(level: int | None) -> Value:
    return Value.ACTIVE if level else Value.INACTIVE


def _better(label: str, chosen: GpiodChip | None, labels: Sequence[str]) -> bool:
    return chosen is None or labels.index(label) < labels.index(chosen.label)


def _pins_by_name(chip: KernelChip) -> dict[int, int]:
    """Offsets of the lines named GPIO<n>; empty unless there is at least one."""
    names = {f"GPIO{pin}": pin for pin in range(HEADER_PINS)}
    found: dict[int, int] = {}
    for offset in range(chip.get_info().num_lines):
        pin = names.get(chip.get_line_info(offset).name or "")
        if pin is not None:
            found.setdefault(pin, offset)
    return found


def _close(chip: GpiodChip | None) -> None:
    if chip is not None:
        chip.close()
