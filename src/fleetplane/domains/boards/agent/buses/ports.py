"""What SPI and I2C can be asked, and the drivers of a real board that answer.

Blocking, and for one thread. A driver raises nothing but `HardwareFault`s. Lengths and addresses are
checked by `Buses` before anything arrives here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Final, Protocol

from fleetplane.domains.boards.agent.gpio.errors import ChipMissing, HardwareUnsupported, from_os

SPI_BUS: Final = 0
"""The one on the header; a channel is its chip select."""
SPI_SPEED_HZ: Final = 1_000_000
"""What every device on a breadboard's wires can follow."""
SPI_MODE: Final = 0


class SpiPort(Protocol):
    def transfer(self, data: bytes) -> bytes:
        """Clock `data` out, and as many bytes in."""
        ...

    def close(self) -> None: ...


class I2cPort(Protocol):
    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, length: int) -> bytes: ...

    def write_then_read(self, address: int, data: bytes, length: int) -> bytes:
        """Both in one transaction, so that nobody else comes between them."""
        ...

    def close(self) -> None: ...


OpenSpi = Callable[[int], SpiPort]
OpenI2c = Callable[[int], I2cPort]


class SpiDevice(Protocol):
    """The part of `spidev.SpiDev` that is used here."""

    max_speed_hz: int
    mode: int

    def open(self, bus: int, device: int) -> None: ...

    def xfer2(self, values: Sequence[int]) -> Sequence[int]: ...

    def close(self) -> None: ...


class I2cMessage(Protocol):
    def __bytes__(self) -> bytes: ...


class I2cBus(Protocol):
    """The part of `smbus2.SMBus` that is used here."""

    def i2c_rdwr(self, *messages: I2cMessage) -> None: ...

    def close(self) -> None: ...


class SpidevPort:
    """One chip select, through /dev/spidev0.N."""

    def __init__(self, channel: int, device: SpiDevice, *, speed_hz: int = SPI_SPEED_HZ) -> None:
        self._device = device
        self._name = f"SPI channel {channel}"
        with _translated(f"opening {self._name}"):
            device.open(SPI_BUS, channel)
            device.max_speed_hz, device.mode = speed_hz, SPI_MODE

    def __repr__(self) -> str:
        return f"<SpidevPort {self._name}>"

    def transfer(self, data: bytes) -> bytes:
        with _translated(f"a transfer on {self._name}"):
            return bytes(self._device.xfer2(list(data)))

    def close(self) -> None:
        self._device.close()


class SmbusPort:
    """One bus, through /dev/i2c-N. Plain I2C messages: SMBus's own calls stop at 32 bytes."""

    def __init__(self, number: int, module: ModuleType) -> None:
        self._message = module.i2c_msg
        self._name = f"I2C bus {number}"
        with _translated(f"opening {self._name}"):
            self._bus: I2cBus = module.SMBus(number)

    def __repr__(self) -> str:
        return f"<SmbusPort {self._name}>"

    def write(self, address: int, data: bytes) -> None:
        with _translated(f"writing to {address:#04x} on {self._name}"):
            self._bus.i2c_rdwr(self._message.write(address, data))

    def read(self, address: int, length: int) -> bytes:
        message: I2cMessage = self._message.read(address, length)
        with _translated(f"reading from {address:#04x} on {self._name}"):
            self._bus.i2c_rdwr(message)
        return bytes(message)

    def write_then_read(self, address: int, data: bytes, length: int) -> bytes:
        message: I2cMessage = self._message.read(address, length)
        with _translated(f"reading a register of {address:#04x} on {self._name}"):
            self._bus.i2c_rdwr(self._message.write(address, data), message)
        return bytes(message)

    def close(self) -> None:
        self._bus.close()


def open_spi(channel: int) -> SpiPort:
    return SpidevPort(
        channel, _driver("spidev", "pip install 'fleetplane-agent[spi]' (needs a compiler)").SpiDev()
    )


def open_i2c(number: int) -> I2cPort:
    return SmbusPort(number, _driver("smbus2", "pip install smbus2"))


def _driver(name: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HardwareUnsupported(f"the Python package {name} is not installed", hint=remedy) from error


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        hint = "enable the bus (raspi-config, or dtparam in config.txt) and reboot"
        raise ChipMissing(f"{doing}: the bus is not there", hint=hint) from error
    except OSError as error:
        raise from_os(error, doing) from error
