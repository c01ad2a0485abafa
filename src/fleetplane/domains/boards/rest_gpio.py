"""REST: pins of boards. Who holds a reservation is known from the token, and from what its holder says
beside it: one person may run several programs, and none of them is another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards import gpio_rules
from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.asking import asked_by
from fleetplane.domains.boards.gpio import Devices
from fleetplane.domains.boards.gpio_driver import READINGS_LIMIT, Driver
from fleetplane.domains.boards.gpio_kinds import (
    Device,
    DeviceState,
    DeviceType,
    Direction,
    GpioConfig,
    GpioSpec,
    Pull,
    device_number,
    status_of,
)
from fleetplane.domains.boards.registry import Boards
from fleetplane.domains.boards.rest import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    Json,
    actor,
    choice,
    listed,
    number_in,
    reference,
    whole,
)  # fmt: skip
from fleetplane.domains.boards.views import gpio_device
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.bodies import given
from fleetplane.web.routes import Answer, Query, Route
from fleetplane.web.times import NS_PER_SECOND, parsed, spelled, spelled_or_null

CLIENT_LIMIT = 128
READINGS = 100
DAY_NS = 86_400 * NS_PER_SECOND
_ONE = "/gpio/{id}"
_TAG = "GPIO"


class DeviceBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    node_id: int
    pin_number: int
    description: str = ""
    direction: Direction | None = None
    pull_mode: Pull = Pull.NONE
    device_type: DeviceType = DeviceType.DIGITAL
    config: GpioConfig = GpioConfig()


class DevicePatch(msgspec.Struct, forbid_unknown_fields=True):
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    direction: Direction | UnsetType = UNSET
    pull_mode: Pull | UnsetType = UNSET
    device_type: DeviceType | UnsetType = UNSET
    status: DeviceState | UnsetType = UNSET
    config: GpioConfig | UnsetType = UNSET


class WriteBody(msgspec.Struct, forbid_unknown_fields=True):
    value: int
    client_id: str = ""


class ReserveBody(msgspec.Struct, forbid_unknown_fields=True):
    client_id: str = ""
    ttl: int = 0
    """In nanoseconds; 0 for until it is given back."""
    ttl_seconds: float = 0.0


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    client_id: str = ""


class GpioRoutes:
    def __init__(self, *, boards: Boards, devices: Devices, driver: Driver, clock: Clock) -> None:
        self._boards = boards
        self._devices = devices
        self._driver = driver
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (*self._device_routes(), *self._level_routes(), *self._reservation_routes())

    def _device_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/gpio", handler=self.list, tag=_TAG, summary="Pins in use",
                permission=READ, answer=dict[str, Any],
                query=(
                    Query(name="node_id", summary="Of this board", kind="integer", low=1),
                    Query(name="device_type", summary="Of this type", choices=tuple(DeviceType)),
                    Query(name="status", summary="In this state", choices=tuple(DeviceState)),
                    *PAGING,
                ),
            ),
            Route(
                method="POST", path="/gpio", handler=self.create, tag=_TAG, permission=OPERATE,
                summary="Say what a pin is for", body=DeviceBody, answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=READ, summary="One pin",
                answer=dict[str, Any],
            ),
            Route(
                method="PUT", path=_ONE, handler=self.change, tag=_TAG, permission=OPERATE,
                summary="Say otherwise; its board follows when it can", body=DevicePatch,
                answer=dict[str, Any],
            ),
            Route(
                method="DELETE", path=_ONE, handler=self.delete, tag=_TAG, permission=ADMINISTER,
                summary="Give a pin up", status=NO_CONTENT,
            ),
            Route(
                method="GET", path="/nodes/{id}/gpio", handler=self.of_node, tag=_TAG, permission=READ,
                summary="The pins of a board", answer=dict[str, Any],
            ),
        )  # fmt: skip

    def _level_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path=f"{_ONE}/read", handler=self.read, tag=_TAG, permission=READ,
                summary="The level now, from the board", answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/write", handler=self.write, tag=_TAG, permission=OPERATE,
                summary="Drive a level from now on, or a duty cycle", body=WriteBody, answer=dict[str, Any],
            ),
            Route(
                method="GET", path=f"{_ONE}/readings", handler=self.readings, tag=_TAG, permission=READ,
                summary="Levels that were read and written, newest first", answer=dict[str, Any],
                query=(
                    Query(name="since", summary="From then on", kind="date-time"),
                    Query(name="until", summary="Before then", kind="date-time"),
                    Query(name="limit", summary="At most so many", kind="integer", default=READINGS, low=1,
                          high=READINGS_LIMIT),
                ),
            ),
        )  # fmt: skip

    def _reservation_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/gpio/reservations", handler=self.reservations, tag=_TAG,
                summary="Who alone may write what", permission=READ, answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/gpio/reservations/cleanup", handler=self.cleanup, tag=_TAG,
                summary="End reservations whose time is over", permission=ADMINISTER, answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/reserve", handler=self.reserve, tag=_TAG, permission=OPERATE,
                summary="Let nobody else write; again to renew", body=ReserveBody, body_optional=True,
                answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/release", handler=self.release, tag=_TAG, permission=OPERATE,
                summary="Give a reservation back", body=ReleaseBody, body_optional=True,
                answer=dict[str, Any],
            ),
        )  # fmt: skip

    # Describing.

    async def list(self, call: BoardCall) -> Answer[Json]:
        board, kind = reference(call, "node_id"), choice(call, "device_type", DeviceType)
        state = choice(call, "status", DeviceState)
        found = [
            device
            for device in self._devices.all()
            if board in (None, device.spec.board)
            and kind in (None, device.spec.device_type)
            and state in (None, status_of(device).state)
        ]
        return Answer(content=listed(call, found, gpio_device))

    async def create(self, call: BoardCall) -> Answer[Json]:
        body: DeviceBody = call.body
        usual = Direction.OUTPUT if body.device_type is DeviceType.PWM else Direction.INPUT
        spec = GpioSpec(
            name=body.name, description=body.description, board=body.node_id, pin=body.pin_number,
            direction=body.direction or usual, pull=body.pull_mode, device_type=body.device_type,
            config=body.config,
        )  # fmt: skip
        view = call.answering(lambda made: Answer(content={"data": gpio_device(made)}))
        return view(await self._devices.create(spec, actor=actor(call)))

    async def show(self, call: BoardCall) -> Answer[Json]:
        return Answer(content={"data": gpio_device(self._devices.require(number_in(call)))})

    async def change(self, call: BoardCall) -> Answer[Json]:
        changes = given(call.body)
        if "pull_mode" in changes:
            changes["pull"] = changes.pop("pull_mode")
        if "status" in changes:
            state = changes.pop("status")
            if state is DeviceState.ERROR:
                raise InvalidArgument("can be set to active or inactive", field="status")
            changes["enabled"] = state is DeviceState.ACTIVE
        changed = await self._devices.update(number_in(call), actor=actor(call), **changes)
        return Answer(content={"data": gpio_device(changed)})

    async def delete(self, call: BoardCall) -> Answer[None]:
        await self._devices.delete(number_in(call), actor=actor(call))
        return Answer(content=None)

    async def of_node(self, call: BoardCall) -> Answer[Json]:
        number = number_in(call)
        self._boards.require(number)
        found = [gpio_device(one) for one in self._devices.of_board(number) if not one.spec.removing]
        return Answer(content={"gpio_devices": found, "count": len(found), "node_id": number})

    # Levels.

    async def read(self, call: BoardCall) -> Answer[Json]:
        device = self._devices.require(number_in(call))
        read = await self._driver.read(device_number(device), asked=asked_by(call.caller.principal))
        return Answer(content=_level(device, read.level, read.at_ns))

    async def write(self, call: BoardCall) -> Answer[Json]:
        body: WriteBody = call.body
        device = self._devices.require(number_in(call))
        asked = asked_by(call.caller.principal)
        holder = self._holder(call, body.client_id, device)
        done = await self._driver.write(device_number(device), body.value, holder=holder, asked=asked)
        return Answer(content=_level(device, done.level, done.at_ns))

    async def readings(self, call: BoardCall) -> Answer[Json]:
        number, now_ns = number_in(call), self._clock.now_ns()
        self._devices.require(number)
        limit = whole(call, "limit", default=READINGS, low=1, high=READINGS_LIMIT)
        from_ns, to_ns = _moment(call, "since", now_ns - DAY_NS), _moment(call, "until", now_ns + 1)
        found = await self._driver.readings(number, from_ns=from_ns, to_ns=to_ns, limit=limit)
        readings = [
            {"device_id": number, "value": one.value, "timestamp": spelled(one.at_ns)} for one in found
        ]
        return Answer(content={"readings": readings, "count": len(readings), "device_id": number})

    # Reservations.

    async def reservations(self, _call: BoardCall) -> Answer[Json]:
        found = [_reservation(device) for device in self._devices.reserved()]
        return Answer(content={"reservations": found, "count": len(found)})

    async def cleanup(self, call: BoardCall) -> Answer[Json]:
        ended = await self._devices.cleanup(actor=call.caller.name)
        words = f"{len(ended)} reservations were over"
        return Answer(content={"message": words, "cleaned_count": len(ended)})

    async def reserve(self, call: BoardCall) -> Answer[Json]:
        body: ReserveBody = call.body or ReserveBody()
        seconds = body.ttl_seconds or body.ttl / NS_PER_SECOND
        if seconds < 0:
            raise InvalidArgument("must not be negative", field="ttl")
        device = await self._driver.reserve(
            number_in(call), _named(call, body.client_id), seconds=seconds or None,
            asked=asked_by(call.caller.principal),
        )  # fmt: skip
        lease = status_of(device).lease
        assert lease is not None, "it was reserved just now"
        return Answer(
            content={
                "message": f"pin {device.spec.pin} is reserved",
                "gpio_id": device_number(device),
                "client_id": body.client_id,
                "reserved_by": lease.holder,
                "expires_at": spelled_or_null(lease.expires_at_ns),
            }
        )

    async def release(self, call: BoardCall) -> Answer[Json]:
        body: ReleaseBody = call.body or ReleaseBody()
        device = self._devices.require(number_in(call))
        holder = self._holder(call, body.client_id, device)
        device = await self._devices.release(device_number(device), holder, actor=call.caller.name)
        return Answer(
            content={
                "message": f"pin {device.spec.pin} is free",
                "gpio_id": device_number(device),
                "client_id": body.client_id,
            }
        )

    def _holder(self, call: BoardCall, client_id: str, device: Device) -> str:
        """As whom somebody acts who may hold the reservation.

        Who says nothing beside the token acts for any program of the same person: known clients write
        without saying which of them they are.
        """
        lease = gpio_rules.standing(status_of(device).lease, now_ns=self._clock.now_ns())
        own = _named(call, client_id)
        if not client_id and lease is not None and lease.holder.startswith(f"{own}#"):
            return lease.holder
        return own


def _named(call: BoardCall, client_id: str) -> str:
    if len(client_id) > CLIENT_LIMIT or not client_id.isprintable():
        raise InvalidArgument(f"has at most {CLIENT_LIMIT} printable characters", field="client_id")
    return f"{call.caller.name}#{client_id}" if client_id else call.caller.name


def _moment(call: BoardCall, name: str, default: int) -> int:
    text = call.query.get(name)
    return default if text is None else parsed(text, field=name)


def _level(device: Device, level: int, at_ns: int) -> Json:
    return {
        "device_id": device_number(device),
        "node_id": device.spec.board,
        "pin": device.spec.pin,
        "value": level,
        "timestamp": spelled(at_ns),
    }


def _reservation(device: Device) -> Json:
    lease = status_of(device).lease
    assert lease is not None, "only reserved ones are asked for"
    return {
        "pin_id": device_number(device),
        "node_id": device.spec.board,
        "pin_number": device.spec.pin,
        "reserved_by": lease.holder,
        "reserved_at": spelled(lease.taken_at_ns),
        "expires_at": spelled_or_null(lease.expires_at_ns),
    }
