"""The original controller and its test client as a node sees them: the same frames, bytes and order.

Requests are put together by hand from the numbers of the contract, not by our generated code, and travel
over HTTP/2 in clear text with the headers of the originals' library. The controller asks for the agent's
health, within two seconds, before every call about a pin; the test client runs its commands one by one.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.boards.original_board_agent import CALL_TIMEOUT, PlainChannel, number, varint

SERVICE = "/pi_agent.PiAgentService/"
INPUT, OUTPUT = 1, 2
PULL_NONE, PULL_UP, PULL_DOWN = 1, 2, 3


def signed(field_number: int, value: int) -> bytes:
    """An int32 as the originals' library writes it: a zero is not written, a negative has ten bytes."""
    return number(field_number, value & (1 << 64) - 1) if value else b""


def data(field_number: int, value: bytes) -> bytes:
    return varint(field_number << 3 | 2) + varint(len(value)) + value if value else b""


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values: integers, doubles, floats, and bytes for everything that has a length."""
    at = 0

    def take() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(message):
        tag = take()
        match tag & 7:
            case 0:
                yield tag >> 3, take()
            case 1:
                yield tag >> 3, struct.unpack("<d", message[at : at + 8])[0]
                at += 8
            case 5:
                yield tag >> 3, struct.unpack("<f", message[at : at + 4])[0]
                at += 4
            case 2:
                length = take()
                yield tag >> 3, message[at : at + length]
                at += length
            case other:
                raise AssertionError(f"wire type {other}")


def fields_of(message: bytes) -> dict[int, Any]:
    return dict(fields(message))


@dataclass(slots=True)
class OriginalClient:
    """`gpio-test-client`, one method for each of its commands."""

    channel: PlainChannel
    sent: list[tuple[str, bytes]] = field(default_factory=list)

    async def call(self, method: str, request: bytes, *, timeout: str = CALL_TIMEOUT) -> dict[int, Any]:
        return fields_of(await self.raw(method, request, timeout=timeout))

    async def raw(self, method: str, request: bytes, *, timeout: str = CALL_TIMEOUT) -> bytes:
        self.sent.append((method, request))
        stream = self.channel.open(SERVICE + method, timeout)
        await stream.send(request, end=True)
        return await stream.single()

    async def health(self) -> dict[int, Any]:
        return await self.call("AgentHealth", b"")

    async def config(
        self, pin: int, direction: int, pull: int = PULL_NONE, frequency: int = 0, duty: int = 0
    ) -> dict[int, Any]:
        request = (
            signed(1, pin) + signed(2, direction) + signed(3, pull) + signed(4, frequency) + signed(5, duty)
        )
        return await self.call("ConfigureGPIOPin", request)

    async def read(self, pin: int) -> dict[int, Any]:
        return await self.call("ReadGPIOPin", signed(1, pin))

    async def write(self, pin: int, value: int) -> dict[int, Any]:
        return await self.call("WriteGPIOPin", signed(1, pin) + signed(2, value))

    async def pwm(self, pin: int, frequency: int, duty: int) -> dict[int, Any]:
        return await self.call("SetGPIOPWM", signed(1, pin) + signed(2, frequency) + signed(3, duty))

    async def pins(self) -> list[dict[int, Any]]:
        message = await self.raw("ListConfiguredPins", b"")
        return [fields_of(value) for number_, value in fields(message) if number_ == 1]

    async def metrics(self, seconds: int) -> AsyncIterator[dict[int, Any]]:
        stream = self.channel.open(SERVICE + "StreamSystemMetrics", "60S")
        await stream.send(signed(1, seconds), end=True)
        async for message in stream:
            yield fields_of(message)

    async def demo(self, pin: int = 18) -> list[str]:
        """The whole demonstration; what it prints."""
        lines = [f"health {(await self.health())[1].decode()}"]
        lines.append(f"configured {bool((await self.config(pin, OUTPUT)).get(1))}")
        for value in (1, 0, 1):
            await self.write(pin, value)
            lines.append(f"read {(await self.read(pin)).get(2, 0)}")
        lines.append(f"pwm {bool((await self.pwm(pin, 1000, 50)).get(1))}")
        lines += [f"pin {one[1]} direction {one.get(2, 0)}" for one in await self.pins()]
        return lines


@dataclass(slots=True)
class OriginalController:
    """The controller's own client of agents: it asks for health before everything."""

    client: OriginalClient

    async def _alive(self) -> None:
        assert (await self.client.health())[1] in (b"ok", b"gpio_unavailable")

    async def set(self, pin: int, value: int) -> int:
        await self._alive()
        configured = await self.client.config(pin, OUTPUT)
        if not configured.get(1):
            raise RuntimeError(configured.get(2, b"").decode())
        await self._alive()
        return int((await self.client.write(pin, value)).get(2, 0))

    async def get(self, pin: int) -> int:
        await self._alive()
        return int((await self.client.read(pin)).get(2, 0))
