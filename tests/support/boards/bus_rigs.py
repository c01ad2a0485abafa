"""Doubles of the two driver packages, with a simulated bus on the other end of their wires."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from types import ModuleType

from fleetplane.domains.boards.agent.buses.ports import SimulatedI2c, SimulatedSpi
from fleetplane.domains.boards.agent.gpio.chip import HardwareFault


class SpiDevDouble:
    """As `spidev.SpiDev`: lists of numbers, and plain OSErrors."""

    def __init__(self, wire: SimulatedSpi, *, refuses: int | None = None) -> None:
        self.max_speed_hz = 0
        self.mode = 3
        self.opened: tuple[int, int] | None = None
        self._wire = wire
        self._refuses = refuses

    def open(self, bus: int, device: int) -> None:
        if self._refuses is not None:
            raise OSError(self._refuses, os.strerror(self._refuses))
        self.opened = (bus, device)

    def xfer2(self, values: Sequence[int]) -> Sequence[int]:
        assert isinstance(values, list), "the real one takes a list"
        assert self.opened, "the real one must be opened"
        if self._wire.failure is not None:
            raise OSError(self._wire.failure, os.strerror(self._wire.failure))
        return list(self._wire.transfer(bytes(values)))

    def close(self) -> None:
        self.opened = None


class MessageDouble:
    """As `smbus2.i2c_msg`."""

    def __init__(self, address: int, data: bytes | None, length: int) -> None:
        self.address, self.sent, self.length = address, data, length
        self.received = b""

    @staticmethod
    def read(address: int, length: int) -> MessageDouble:
        return MessageDouble(address, None, length)

    @staticmethod
    def write(address: int, data: bytes) -> MessageDouble:
        return MessageDouble(address, bytes(data), len(data))

    def __bytes__(self) -> bytes:
        return self.received


def smbus_double(wire: SimulatedI2c, *, refuses: int | None = None) -> ModuleType:
    class SMBus:
        def __init__(self, number: int) -> None:
            if refuses is not None:
                raise OSError(refuses, os.strerror(refuses))

        def i2c_rdwr(self, *messages: MessageDouble) -> None:
            for message in messages:
                try:
                    if message.sent is not None:
                        wire.write(message.address, message.sent)
                    else:
                        message.received = wire.read(message.address, message.length)
                except HardwareFault as error:
                    number = getattr(errno, error.details["errno"])
                    raise OSError(number, os.strerror(number)) from None

        def close(self) -> None:
            pass

    module = ModuleType("smbus2")
    module.SMBus = SMBus  # type: ignore[attr-defined]
    module.i2c_msg = MessageDouble  # type: ignore[attr-defined]
    return module
