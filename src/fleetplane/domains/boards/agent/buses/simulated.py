"""Buses with no hardware under them, for development and for tests.

SPI is a wire from output to input unless told otherwise. On I2C there are memories: the first byte of
a write sets where the next read or the rest of the write begins, as most sensors and EEPROMs have it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

from fleetplane.domains.boards.agent.gpio.errors import from_os

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
