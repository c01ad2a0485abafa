"""SPI and I2C ports: their interface, the drivers of a real board, and simulated ones.

Calls block and belong to one thread. A driver raises only `HardwareFault`s. `Buses` checks lengths and
addresses before it calls a port.

A simulated SPI port is a wire from output to input unless a test gives it a device. A simulated I2C bus holds
memories: the first byte of a write sets where the next read or the rest of the write begins, as most sensors
and EEPROMs do.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Final, Protocol

from fleetplane.domains.boards.agent.gpio.chip import ChipMissing, HardwareUnsupported, from_os

MEMORY_BYTES: Final = 256


class SimulatedSpi:
    def __init__(self, answer: Callable[[bytes], bytes] = bytes) -> None:
        self._answer = answer
        self.sent: list[bytes] = []
        self.failure: int | None = None

    def open(self, _channel: int) -> SimulatedSpi:
        return self

    def transfer(self, data: bytes) -> bytes:
        _fail(self.failure, "a transfer on SPI")
        self.sent.append(data)
        return self._answer(data)[: len(data)].ljust(len(data), b"\0")

    def close(self) -> None:
        pass


class SimulatedI2c:
    def __init__(self, *addresses: int) -> None:
        self.memories = {address: bytearray(MEMORY_BYTES) for address in addresses}
        self._at = dict.fromkeys(addresses, 0)
        self.failure: int | None = None

    def open(self, _number: int) -> SimulatedI2c:
        return self

    def write(self, address: int, data: bytes) -> None:
        memory = self._memory(address)
        self._at[address] = data[0]
        for byte in data[1:]:
            memory[self._at[address]] = byte
            self._at[address] = (self._at[address] + 1) % MEMORY_BYTES

    def read(self, address: int, length: int) -> bytes:
        memory, start = self._memory(address), self._at[address]
        self._at[address] = (start + length) % MEMORY_BYTES
        return bytes(memory[(start + offset) % MEMORY_BYTES] for offset in range(length))

    def write_then_read(self, address: int, data: bytes, length: int) -> bytes:
        self.write(address, data)
        return self.read(address, length)

    def close(self) -> None:
        pass

    def _memory(self, address: int) -> bytearray:
        _fail(self.failure, f"talking to {address:#04x} on I2C")
        if address not in self.memories:
            _fail(errno.EREMOTEIO, f"talking to {address:#04x} on I2C")
        return self.memories[address]


def _fail(number: int | None, doing: str) -> None:
    if number is not None:
        raise from_os(OSError(number, os.strerror(number)), doing)


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
