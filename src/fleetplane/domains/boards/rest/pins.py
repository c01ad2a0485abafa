"""REST: pins of boards. Who holds a reservation is known from the token, and from what its holder says
beside it: one person may run several programs, and none of them is another's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.access import ADMIN, ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.calls.channels import asked_by
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.pins import rules as gpio_rules
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.driver import READINGS_LIMIT, PinDriver
from fleetplane.domains.boards.pins.kinds import (
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
from fleetplane.domains.boards.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    actor,
    changes,
    choice,
    listed,
    number_in,
    reference,
)
from fleetplane.domains.boards.rest.views import (
    EndedReservations,
    NodePins,
    PinData,
    PinLevel,
    PinReading,
    PinReadings,
    PinReservation,
    PinReservations,
    PinRows,
    ReleasedPin,
    ReservedPin,
    gpio_device,
)
from fleetplane.domains.boards.wire.message_json import json_number
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS, spelled, spelled_or_null
from fleetplane.web.rest.bodies import parsed
from fleetplane.web.rest.pages import whole_number
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

CLIENT_LIMIT = 128
READINGS = 100
DAY_NS = 86_400 * NS
_ONE = "/gpio/{id}"
_ROUTES = RouteGroup("GPIO")


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
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    direction: Direction | UnsetType | None = UNSET
    pull_mode: Pull | UnsetType | None = UNSET
    device_type: DeviceType | UnsetType | None = UNSET
    status: DeviceState | UnsetType | None = UNSET
    config: GpioConfig | UnsetType | None = UNSET


class WriteBody(msgspec.Struct, forbid_unknown_fields=True):
    value: int | bool
    client_id: str = ""


class ReserveBody(msgspec.Struct, forbid_unknown_fields=True):
    client_id: str = ""
    ttl: int = 0
    """In nanoseconds; 0 for until it is given back."""
    ttl_seconds: float = 0.0


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    client_id: str = ""


class GpioRoutes:
    def __init__(self, *, boards: Boards, devices: Devices, driver: PinDriver, clock: Clock) -> None:
        self._boards = boards
        self._devices = devices
        self._driver = driver
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (*self._device_routes(), *self._level_routes(), *self._reservation_routes())

    def _device_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/gpio",
                self.list,
                READ,
                query=(
                    Query(name="node_id", summary="Only of this board", kind="integer", low=1),
                    Query(name="device_type", summary="Only of this type", choices=tuple(DeviceType)),
                    Query(name="status", summary="Only in this state", choices=tuple(DeviceState)),
                    *PAGING,
                ),
            ),
            _ROUTES.post("/gpio", self.create, OPERATE, body=DeviceBody, status=CREATED),
            _ROUTES.get(_ONE, self.show, READ),
            _ROUTES.put(_ONE, self.change, OPERATE, body=DevicePatch),
            _ROUTES.delete(_ONE, self.delete, ADMINISTER, status=NO_CONTENT),
            _ROUTES.get("/nodes/{id}/gpio", self.of_node, READ),
        )

    def _level_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.post(f"{_ONE}/read", self.read, READ),
            _ROUTES.post(f"{_ONE}/write", self.write, OPERATE, body=WriteBody),
            _ROUTES.get(
                f"{_ONE}/readings",
                self.readings,
                READ,
                query=(
                    Query(name="since", summary="Start of the range, inclusive", kind="date-time"),
                    Query(name="until", summary="End of the range, exclusive", kind="date-time"),
                    Query(
                        name="limit",
                        summary="Maximum number of rows",
                        kind="integer",
                        default=READINGS,
                        low=1,
                        high=READINGS_LIMIT,
                    ),
                ),
            ),
        )

    def _reservation_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/gpio/reservations", self.reservations, READ),
            _ROUTES.post("/gpio/reservations/cleanup", self.cleanup, ADMINISTER),
            _ROUTES.post(f"{_ONE}/reserve", self.reserve, OPERATE, body=ReserveBody, body_optional=True),
            _ROUTES.post(f"{_ONE}/release", self.release, OPERATE, body=ReleaseBody, body_optional=True),
        )

    # Describing.

    async def list(self, call: BoardCall) -> Answer[PinRows]:
        """List configured pins."""
        board, kind = reference(call, "node_id"), choice(call, "device_type", DeviceType)
        state = choice(call, "status", DeviceState)
        found = [
            device
            for device in self._devices.all()
            if board in (None, device.spec.board)
            and kind in (None, device.spec.device_type)
            and state in (None, status_of(device).state)
        ]
        return Answer(content=listed(call, found, gpio_device, PinRows))

    async def create(self, call: BoardCall) -> Answer[PinData]:
        """Configure a pin."""
        body: DeviceBody = call.body
        usual = Direction.OUTPUT if body.device_type is DeviceType.PWM else Direction.INPUT
        spec = GpioSpec(
            name=body.name,
            description=body.description,
            board=body.node_id,
            pin=body.pin_number,
            direction=body.direction or usual,
            pull=body.pull_mode,
            device_type=body.device_type,
            config=body.config,
        )
        view = call.answering(lambda made: Answer(content=PinData(data=gpio_device(made))))
        return view(await self._devices.create(spec, actor=actor(call)))

    async def show(self, call: BoardCall) -> Answer[PinData]:
        """Get a pin."""
        return Answer(content=PinData(data=gpio_device(self._devices.require(number_in(call)))))

    async def change(self, call: BoardCall) -> Answer[PinData]:
        """Change a pin's direction, pull or label; its board follows when it is connected."""
        said = changes(call.body)
        if "pull_mode" in said:
            said["pull"] = said.pop("pull_mode")
        if "status" in said:
            state = said.pop("status")
            if state is DeviceState.ERROR:
                raise InvalidArgument("can be set to active or inactive", field="status")
            said["enabled"] = state is DeviceState.ACTIVE
        holder = self._holder(call, "", self._devices.require(number_in(call)))
        changed = await self._devices.update(number_in(call), holder=holder, actor=actor(call), **said)
        return Answer(content=PinData(data=gpio_device(changed)))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete a pin and free its line."""
        holder = self._holder(call, "", self._devices.require(number_in(call)))
        await self._devices.delete(number_in(call), holder=holder, actor=actor(call))
        return Answer(content=None)

    async def of_node(self, call: BoardCall) -> Answer[NodePins]:
        """List the pins of a board."""
        number = number_in(call)
        self._boards.require(number)
        found = [gpio_device(one) for one in self._devices.of_board(number) if not one.spec.removing]
        return Answer(content=NodePins(gpio_devices=found, count=len(found), node_id=number))

    # Levels.

    async def read(self, call: BoardCall) -> Answer[PinLevel]:
        """Read a pin's level from the board."""
        device = self._devices.require(number_in(call))
        read = await self._driver.read(device_number(device), asked=asked_by(call.caller.principal))
        return Answer(content=_level(device, read.level, read.at_ns))

    async def write(self, call: BoardCall) -> Answer[PinLevel]:
        """Drive a level or a PWM duty cycle."""
        body: WriteBody = call.body
        device = self._devices.require(number_in(call))
        asked = asked_by(call.caller.principal)
        holder = self._holder(call, body.client_id, device)
        done = await self._driver.write(device_number(device), int(body.value), holder=holder, asked=asked)
        return Answer(content=_level(device, done.level, done.at_ns))

    async def readings(self, call: BoardCall) -> Answer[PinReadings]:
        """List a pin's readings and writes, newest first."""
        device, now_ns = number_in(call), self._clock.now_ns()
        self._devices.require(device)
        limit = whole_number(call, "limit", default=READINGS, low=1, high=READINGS_LIMIT)
        from_ns, to_ns = _moment(call, "since", now_ns - DAY_NS), _moment(call, "until", now_ns + 1)
        found = await self._driver.readings(device, from_ns=from_ns, to_ns=to_ns, limit=limit)
        readings = [
            PinReading(device_id=device, value=json_number(one.value), timestamp=spelled(one.at_ns))
            for one in found
        ]
        return Answer(content=PinReadings(readings=readings, count=len(readings), device_id=device))

    # Reservations.

    async def reservations(self, _call: BoardCall) -> Answer[PinReservations]:
        """List pin reservations."""
        found = [_reservation(device) for device in self._devices.reserved()]
        return Answer(content=PinReservations(reservations=found, count=len(found)))

    async def cleanup(self, call: BoardCall) -> Answer[EndedReservations]:
        """End expired reservations."""
        ended = await self._devices.cleanup(actor=call.caller.name)
        words = f"{len(ended)} reservations were over"
        return Answer(content=EndedReservations(message=words, cleaned_count=len(ended)))

    async def reserve(self, call: BoardCall) -> Answer[ReservedPin]:
        """Reserve a pin for exclusive writing, or renew the reservation."""
        body: ReserveBody = call.body or ReserveBody()
        seconds = body.ttl_seconds or body.ttl / NS
        if seconds < 0:
            raise InvalidArgument("must not be negative", field="ttl")
        device = await self._driver.reserve(
            number_in(call),
            _named(call, body.client_id),
            seconds=seconds or None,
            asked=asked_by(call.caller.principal),
        )
        lease = status_of(device).lease
        assert lease is not None, "it was reserved just now"
        return Answer(
            content=ReservedPin(
                message=f"pin {device.spec.pin} is reserved",
                gpio_id=device_number(device),
                client_id=body.client_id,
                reserved_by=lease.holder,
                expires_at=spelled_or_null(lease.expires_at_ns),
            )
        )

    async def release(self, call: BoardCall) -> Answer[ReleasedPin]:
        """Release a reservation."""
        body: ReleaseBody = call.body or ReleaseBody()
        device = self._devices.require(number_in(call))
        holder = self._holder(call, body.client_id, device)
        device = await self._devices.release(
            device_number(device),
            holder,
            actor=call.caller.name,
            anyones=ADMIN in call.caller.principal.roles,
        )
        return Answer(
            content=ReleasedPin(
                message=f"pin {device.spec.pin} is free",
                gpio_id=device_number(device),
                client_id=body.client_id,
            )
        )

    def _holder(self, call: BoardCall, client_id: str, device: Device) -> str:
        """The name under which a caller holds a reservation.

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


def _level(device: Device, level: int, at_ns: int) -> PinLevel:
    return PinLevel(
        device_id=device_number(device),
        node_id=device.spec.board,
        pin=device.spec.pin,
        value=level,
        timestamp=spelled(at_ns),
    )


def _reservation(device: Device) -> PinReservation:
    lease = status_of(device).lease
    assert lease is not None, "only reserved ones are asked for"
    return PinReservation(
        pin_id=device_number(device),
        node_id=device.spec.board,
        pin_number=device.spec.pin,
        reserved_by=lease.holder,
        reserved_at=spelled(lease.taken_at_ns),
        expires_at=spelled_or_null(lease.expires_at_ns),
    )
