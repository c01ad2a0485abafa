"""SPI and I2C for the event loop: what may be asked, within which limits, and who asked.

Each kind of bus has a thread of its own, because a device on I2C may hold its clock for a second. A
bus is opened by the first call that needs it, and again by the next one after it broke.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from fleetplane.domains.boards.agent.buses.ports import I2cPort, OpenI2c, OpenSpi, SpiPort
from fleetplane.domains.boards.agent.gpio.chip import ChipMissing, HardwareFailed
from fleetplane.domains.boards.agent.gpio.hardware_thread import HardwareThread
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied

SPI_LIMIT_BYTES: Final = 4096
"""The kernel's own buffer for one transfer, unless someone enlarged it."""
I2C_LIMIT_BYTES: Final = 256
SPI_CHANNELS: Final = range(2)
I2C_BUSES: Final = range(2)
I2C_ADDRESSES: Final = range(0x08, 0x78)
"""The rest is reserved by the standard."""
I2C_REGISTERS: Final = range(256)

T = TypeVar("T")
P = TypeVar("P", SpiPort, I2cPort)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusPolicy:
    """Decided by the node's own configuration, never from afar."""

    spi_channels: frozenset[int] = frozenset(SPI_CHANNELS)
    i2c_buses: frozenset[int] = frozenset({1})
    """Not 0: it identifies add-on boards, and a stray write there can spoil one for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusEntry:
    """One outcome for the audit log. What was sent or read is not in it, only how much."""

    event: str
    """`spi_transfer`, `i2c_read_register` and so on; ends in `_failed` if it did, and is
    `operation_denied` if nothing was tried."""
    user: str
    where: str
    at_ns: int
    size_bytes: int
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BusCall:
    event: str
    user: str
    where: str
    size_bytes: int


class Buses:
    """Used as `async with Buses(...) as buses`; leaving closes what was opened."""

    def __init__(
        self,
        *,
        open_spi: OpenSpi,
        open_i2c: OpenI2c,
        policy: BusPolicy,
        clock: Clock,
        audit: Callable[[BusEntry], None],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._audit = audit
        self._spi = _Ports[SpiPort]("spi", open_spi)
        self._i2c = _Ports[I2cPort]("i2c", open_i2c)

    def __repr__(self) -> str:
        return f"<Buses {self._spi} {self._i2c}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._spi.close()
        finally:
            await self._i2c.close()

    async def spi_exchange(self, channel: int, data: bytes, *, user: str) -> bytes:
        return await self._spi_transfer("spi_transfer", channel, data, len(data), user)

    async def spi_write(self, channel: int, data: bytes, *, user: str) -> None:
        await self._spi_transfer("spi_write", channel, data, len(data), user)

    async def spi_read(self, channel: int, length: int, *, user: str) -> bytes:
        """Clocks zeros out."""
        return await self._spi_transfer("spi_read", channel, None, length, user)

    async def i2c_write(self, bus: int, address: int, data: bytes, *, user: str) -> None:
        call = self._i2c_call("i2c_write", bus, address, len(data), user)
        self._check_i2c(call, bus, address, "data", len(data))
        await self._carry_out(call, self._i2c, bus, lambda port: port.write(address, data))

    async def i2c_read(self, bus: int, address: int, length: int, *, user: str) -> bytes:
        call = self._i2c_call("i2c_read", bus, address, length, user)
        self._check_i2c(call, bus, address, "length", length)
        return await self._carry_out(call, self._i2c, bus, lambda port: port.read(address, length))

    async def i2c_write_register(
        self, bus: int, address: int, register: int, data: bytes, *, user: str
    ) -> None:
        call = self._i2c_call("i2c_write_register", bus, address, len(data), user)
        self._check_i2c(call, bus, address, "data", len(data), register)
        message = bytes([register]) + data
        await self._carry_out(call, self._i2c, bus, lambda port: port.write(address, message))

    async def i2c_read_register(
        self, bus: int, address: int, register: int, length: int, *, user: str
    ) -> bytes:
        call = self._i2c_call("i2c_read_register", bus, address, length, user)
        self._check_i2c(call, bus, address, "length", length, register)
        ask = bytes([register])
        return await self._carry_out(
            call, self._i2c, bus, lambda port: port.write_then_read(address, ask, length)
        )

    async def _spi_transfer(
        self, event: str, channel: int, data: bytes | None, length: int, user: str
    ) -> bytes:
        call = _BusCall(event=event, user=user, where=f"spi {channel}", size_bytes=length)
        with self._refusing(call):
            _within("channel", channel, SPI_CHANNELS)
            _permitted(channel in self._policy.spi_channels, f"SPI channel {channel}")
            _within("length" if data is None else "data", length, range(1, SPI_LIMIT_BYTES + 1))
        sent = bytes(length) if data is None else data
        return await self._carry_out(call, self._spi, channel, lambda port: port.transfer(sent))

    def _i2c_call(self, event: str, bus: int, address: int, size_bytes: int, user: str) -> _BusCall:
        return _BusCall(event=event, user=user, where=f"i2c {bus} {address:#04x}", size_bytes=size_bytes)

    def _check_i2c(
        self, call: _BusCall, bus: int, address: int, field: str, length: int, register: int = 0
    ) -> None:
        with self._refusing(call):
            _within("bus", bus, I2C_BUSES)
            _permitted(bus in self._policy.i2c_buses, f"I2C bus {bus}")
            _within("address", address, I2C_ADDRESSES)
            _within("register", register, I2C_REGISTERS)
            _within(field, length, range(1, I2C_LIMIT_BYTES + 1))

    def _refusing(self, call: _BusCall) -> _Saying:
        return _Saying(lambda error: self._say("operation_denied", call, error.message))

    async def _carry_out(self, call: _BusCall, ports: _Ports[P], number: int, work: Callable[[P], T]) -> T:
        with _Saying(lambda error: self._say(f"{call.event}_failed", call, error.message)):
            result = await ports.call(number, work)
        self._say(call.event, call)
        return result

    def _say(self, event: str, call: _BusCall, message: str = "") -> None:
        self._audit(
            BusEntry(
                event=event,
                user=call.user,
                where=call.where,
                at_ns=self._clock.now_ns(),
                size_bytes=call.size_bytes,
                message=message,
            )
        )


class _Ports(Generic[P]):
    """The open ports of one kind, and the thread that owns them."""

    def __init__(self, name: str, open_port: Callable[[int], P]) -> None:
        self._name = name
        self._open_port: Callable[[int], P] = open_port
        self._open: dict[int, P] = {}
        self._thread = HardwareThread(name)

    def __repr__(self) -> str:
        return f"{self._name}={sorted(self._open)}"

    async def call(self, number: int, work: Callable[[P], T]) -> T:
        return await self._thread.call(lambda: self._work(number, work))

    async def close(self) -> None:
        await self._thread.close(self._close_all)

    def _work(self, number: int, work: Callable[[P], T]) -> T:
        port = self._open.get(number)
        if port is None:
            port = self._open[number] = self._open_port(number)
        try:
            return work(port)
        except (ChipMissing, HardwareFailed):
            del self._open[number]  # broken for good or for once: the next call opens it anew
            with suppress(FleetplaneError, OSError):
                port.close()
            raise

    def _close_all(self) -> None:
        while self._open:
            _, port = self._open.popitem()
            with suppress(FleetplaneError, OSError):
                port.close()


class _Saying:
    """Tells of an error on its way out."""

    def __init__(self, say: Callable[[FleetplaneError], None]) -> None:
        self._say = say

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FleetplaneError):
            self._say(error)


def _within(name: str, value: int, span: range) -> None:
    if value not in span:
        what = f"{name} of {value} bytes" if name in ("data", "length") else f"{name} {value}"
        raise InvalidArgument(
            f"{what} is out of range: it is {span.start} to {span.stop - 1}",
            field=name,
            details={"cause": "range"},
        )


def _permitted(allowed: bool, what: str) -> None:
    if not allowed:
        raise PermissionDenied(f"{what} is not open to callers on this node", details={"cause": "protected"})
