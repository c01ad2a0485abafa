"""SPI and I2C: one contract for simulated buses and for the adapters of real drivers, and the limits."""

from __future__ import annotations

import errno
import importlib.util

import pytest
from support.boards.bus_rigs import SpiDevDouble, smbus_double

from fleetplane.domains.boards.agent.buses.buses import BusEntry, Buses, BusPolicy
from fleetplane.domains.boards.agent.buses.ports import (
    SimulatedI2c,
    SimulatedSpi,
    SmbusPort,
    SpidevPort,
    open_i2c,
    open_spi,
)
from fleetplane.domains.boards.agent.gpio.chip import (
    AccessRefused,
    ChipMissing,
    HardwareFailed,
    HardwareUnsupported,
    NobodyAnswers,
)
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.sim.clock import VirtualClock

SENSOR = 0x48


class Lab:
    def __init__(self, driver: str, policy: BusPolicy | None = None) -> None:
        self.spi, self.i2c = SimulatedSpi(), SimulatedI2c(SENSOR)
        self.audit: list[BusEntry] = []
        self.opened: list[str] = []
        self.driver = driver
        self.buses = Buses(
            open_spi=self.open_spi,
            open_i2c=self.open_i2c,
            policy=policy or BusPolicy(),
            clock=VirtualClock(),
            audit=self.audit.append,
        )

    def open_spi(self, channel: int) -> SimulatedSpi | SpidevPort:
        self.opened.append(f"spi{channel}")
        return self.spi if self.driver == "simulated" else SpidevPort(channel, SpiDevDouble(self.spi))

    def open_i2c(self, number: int) -> SimulatedI2c | SmbusPort:
        self.opened.append(f"i2c{number}")
        return self.i2c if self.driver == "simulated" else SmbusPort(number, smbus_double(self.i2c))

    @property
    def events(self) -> list[str]:
        return [entry.event for entry in self.audit]


@pytest.fixture(params=["simulated", "adapters"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


async def test_spi_exchanges_writes_and_reads(lab: Lab) -> None:
    async with lab.buses as buses:
        assert await buses.spi_exchange(0, b"\x01\x80\xff", user="ann") == b"\x01\x80\xff"
        await buses.spi_write(1, b"abc", user="ann")
        assert await buses.spi_read(0, 4, user="ann") == bytes(4)
    assert lab.spi.sent == [b"\x01\x80\xff", b"abc", bytes(4)]
    assert lab.events == ["spi_transfer", "spi_write", "spi_read"]
    assert [(entry.user, entry.where, entry.size_bytes) for entry in lab.audit][:2] == [
        ("ann", "spi 0", 3),
        ("ann", "spi 1", 3),
    ]


async def test_i2c_writes_and_reads_registers_and_plainly(lab: Lab) -> None:
    async with lab.buses as buses:
        await buses.i2c_write_register(1, SENSOR, 0x10, b"\xca\xfe", user="ann")
        assert await buses.i2c_read_register(1, SENSOR, 0x10, 2, user="ann") == b"\xca\xfe"
        await buses.i2c_write(1, SENSOR, b"\x11", user="ann")
        assert await buses.i2c_read(1, SENSOR, 1, user="ann") == b"\xfe"
    assert lab.events == ["i2c_write_register", "i2c_read_register", "i2c_write", "i2c_read"]
    assert lab.audit[0].where == "i2c 1 0x48"


async def test_the_longest_transfers_pass(lab: Lab) -> None:
    async with lab.buses as buses:
        assert len(await buses.spi_exchange(0, bytes(range(256)) * 16, user="ann")) == 4096
        assert len(await buses.i2c_read(1, SENSOR, 256, user="ann")) == 256
        await buses.i2c_write_register(1, SENSOR, 0, bytes(range(256)), user="ann")
        assert bytes(lab.i2c.memories[SENSOR]) == bytes(range(256))


async def test_an_address_where_nobody_is_says_so(lab: Lab) -> None:
    async with lab.buses as buses:
        with pytest.raises(NobodyAnswers) as caught:
            await buses.i2c_read(1, 0x50, 1, user="ann")
        assert caught.value.details["cause"] == "no-answer"
        assert await buses.i2c_read(1, SENSOR, 1, user="ann") == b"\0"
    assert lab.events == ["i2c_read_failed", "i2c_read"]
    assert lab.opened == ["i2c1"]


async def test_a_bus_that_broke_is_opened_anew(lab: Lab) -> None:
    async with lab.buses as buses:
        lab.spi.failure = errno.EIO
        with pytest.raises(HardwareFailed):
            await buses.spi_read(0, 1, user="ann")
        lab.spi.failure = None
        await buses.spi_read(0, 1, user="ann")
        await buses.spi_read(0, 1, user="ann")
    assert lab.opened == ["spi0", "spi0"]
    assert lab.events == ["spi_read_failed", "spi_read", "spi_read"]


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("spi_exchange", (0, b""), "data"),
        ("spi_exchange", (0, bytes(4097)), "data"),
        ("spi_write", (2, b"a"), "channel"),
        ("spi_write", (-1, b"a"), "channel"),
        ("spi_read", (0, 0), "length"),
        ("spi_read", (0, 4097), "length"),
        ("spi_read", (0, -1), "length"),
        ("spi_read", (0, 2**31 - 1), "length"),
        ("i2c_write", (1, SENSOR, b""), "data"),
        ("i2c_write", (1, SENSOR, bytes(257)), "data"),
        ("i2c_write", (2, SENSOR, b"a"), "bus"),
        ("i2c_write", (1, 0x07, b"a"), "address"),
        ("i2c_write", (1, 0x78, b"a"), "address"),
        ("i2c_read", (1, SENSOR, 257), "length"),
        ("i2c_read", (1, -1, 1), "address"),
        ("i2c_write_register", (1, SENSOR, 256, b"a"), "register"),
        ("i2c_write_register", (1, SENSOR, 0, bytes(257)), "data"),
        ("i2c_read_register", (1, SENSOR, -1, 1), "register"),
        ("i2c_read_register", (1, SENSOR, 0, 0), "length"),
    ],
)
async def test_what_is_out_of_range_is_named_and_reaches_no_bus(
    method: str, arguments: tuple[object, ...], field: str
) -> None:
    lab = Lab("simulated")
    async with lab.buses as buses:
        with pytest.raises(InvalidArgument) as caught:
            await getattr(buses, method)(*arguments, user="ann")
    assert caught.value.field == field
    assert lab.opened == []
    assert lab.events == ["operation_denied"]


async def test_the_bus_that_identifies_add_on_boards_is_closed_unless_opened_by_name() -> None:
    lab = Lab("simulated")
    async with lab.buses as buses:
        with pytest.raises(PermissionDenied) as caught:
            await buses.i2c_write(0, SENSOR, b"a", user="ann")
        assert caught.value.details["cause"] == "protected"
        assert lab.events == ["operation_denied"]
    lab = Lab("simulated", BusPolicy(i2c_buses=frozenset({0}), spi_channels=frozenset()))
    async with lab.buses as buses:
        await buses.i2c_write(0, SENSOR, b"a", user="ann")
        with pytest.raises(PermissionDenied):
            await buses.spi_read(0, 1, user="ann")


@pytest.mark.parametrize(
    ("number", "fault"),
    [(errno.ENOENT, ChipMissing), (errno.EACCES, AccessRefused), (errno.EIO, HardwareFailed)],
)
def test_a_bus_that_cannot_be_opened_says_why(number: int, fault: type[Exception]) -> None:
    with pytest.raises(fault):
        SpidevPort(0, SpiDevDouble(SimulatedSpi(), refuses=number))
    with pytest.raises(fault):
        SmbusPort(1, smbus_double(SimulatedI2c(), refuses=number))


def test_an_spi_device_is_opened_on_the_header_and_set_up() -> None:
    device = SpiDevDouble(SimulatedSpi())
    port = SpidevPort(1, device)
    assert device.opened == (0, 1)
    assert (device.max_speed_hz, device.mode) == (1_000_000, 0)
    port.close()
    assert device.opened is None


def test_without_its_package_spi_says_what_to_install() -> None:
    if importlib.util.find_spec("spidev") is not None:
        pytest.skip("spidev is installed here")
    with pytest.raises(HardwareUnsupported, match="spidev is not installed") as caught:
        open_spi(0)
    assert "fleetplane-agent[spi]" in caught.value.advice


def test_the_real_i2c_package_reports_a_bus_that_is_not_there() -> None:
    with pytest.raises(ChipMissing):
        open_i2c(99)
