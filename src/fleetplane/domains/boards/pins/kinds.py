"""What is kept of the pins of boards.

A device is one pin of one board, with what is to be so (its spec) and what was last found to be so
(its status). It is named by its number, like boards are; the claim `pin` of the kind `board-gpio`,
held by that number, keeps two devices from sharing a pin. A level written to an output is part of
the spec: it is what a board is brought back to after it was away.
"""

from __future__ import annotations

from enum import StrEnum

from fleetplane.domains.boards.kinds import BoardsSpec
from fleetplane.kernel.resources import Kind, Resource


class Direction(StrEnum):
    INPUT = "input"
    OUTPUT = "output"


class Pull(StrEnum):
    NONE = "none"
    UP = "up"
    DOWN = "down"


class DeviceType(StrEnum):
    DIGITAL = "digital"
    ANALOG = "analog"
    PWM = "pwm"
    SPI = "spi"
    I2C = "i2c"


class DeviceState(StrEnum):
    ACTIVE = "active"
    INACTIVE = "inactive"
    ERROR = "error"
    """The board refuses it, or cannot do it; the status says why."""


class GpioConfig(BoardsSpec, frozen=True):
    """What depends on the type; zero where nothing was said."""

    frequency: int = 0
    """Of a waveform, in Hz."""
    duty_cycle: int = 0
    """The initial duty cycle of a waveform, in percent."""
    spi_mode: int = 0
    spi_bits: int = 0
    spi_speed: int = 0
    spi_channel: int = 0
    i2c_address: int = 0
    i2c_bus: int = 0
    sample_rate: int = 0
    """Readings to keep, per second; 0 for those only that somebody asks for."""


class GpioSpec(BoardsSpec, frozen=True):
    name: str
    board: int
    pin: int
    """As the processor counts them (BCM)."""
    description: str = ""
    direction: Direction = Direction.INPUT
    pull: Pull = Pull.NONE
    device_type: DeviceType = DeviceType.DIGITAL
    config: GpioConfig = GpioConfig()
    enabled: bool = True
    level: int | None = None
    """To be driven: 0 or 1, of a waveform its duty cycle in percent. None leaves the pin alone."""
    lease_id: str = ""
    """The lease under which the level was written, if it ends with that."""
    removing: bool = False
    """Deleted, once the board has given the pin up."""


class PinHold(BoardsSpec, frozen=True):
    """Who alone may write, and until when."""

    id: str
    holder: str
    taken_at_ns: int
    expires_at_ns: int | None = None
    """None for one that lasts until it is given back; what is written under it stays."""


class GpioStatus(BoardsSpec, frozen=True):
    state: DeviceState = DeviceState.ACTIVE
    value: float | None = None
    """As last read from the board, or written to it."""
    value_at_ns: int | None = None
    held: bool = False
    """That the board has the pin configured for this device, as far as is known."""
    applied_generation: int = 0
    """Of the spec that the board was last brought to."""
    reason: str = ""
    """Why the board is not as it should be, for programs; empty if it is."""
    message: str = ""
    lease: PinHold | None = None
    owed_lease_id: str = ""
    """A lease that has ended here, and that the board may still keep: it is to give the pin up."""
    doubted: bool = False
    """Of several servers, one sent an order and does not know what came of it: it may still arrive. So the
    board is to be sent a newer one, after which it refuses that."""


Device = Resource[GpioSpec, GpioStatus]
GPIO_DEVICE: Kind[GpioSpec, GpioStatus] = Kind("board-gpio", GpioSpec, GpioStatus)


def status_of(device: Device) -> GpioStatus:
    assert device.status is not None, "a device is never put without a status"
    return device.status


def device_number(device: Device) -> int:
    return int(device.name)
