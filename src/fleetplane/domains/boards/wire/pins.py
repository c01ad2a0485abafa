"""Protobuf to GPIO devices and back, for the original controller's service. Pure."""

from __future__ import annotations

from typing import Final

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
from fleetplane.domains.boards.wire.message_json import enum_table, filled, known
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument

_DIRECTIONS: Final = enum_table(Direction, pi.GPIODirection, "GPIO_DIRECTION_")
_PULLS: Final = enum_table(Pull, pi.GPIOPullMode, "GPIO_PULL_MODE_")
_TYPES: Final = enum_table(DeviceType, pi.GPIODeviceType, "GPIO_DEVICE_TYPE_")
_STATES: Final = enum_table(DeviceState, pi.GPIOStatus, "GPIO_STATUS_")
CONFIG: Final = GpioConfig.__struct_fields__


def device(found: Device) -> pi.GPIODevice:
    spec, status = found.spec, status_of(found)
    value = status.value if status.value is not None else spec.level
    return filled(
        pi.GPIODevice,
        spec,
        found,
        id=device_number(found),
        pin_number=spec.pin,
        direction=_DIRECTIONS[spec.direction],
        pull_mode=_PULLS[spec.pull],
        value=round(value or 0),
        device_type=_TYPES[spec.device_type],
        status=_STATES[status.state],
        node_id=spec.board,
        config=filled(pi.GPIOConfig, spec.config),
    )


def created(request: pi.CreateGPIODeviceRequest) -> GpioSpec:
    """Nothing said means an input without a pull, and a digital one."""
    kind = device_type(request.device_type) or DeviceType.DIGITAL
    usual = Direction.OUTPUT if kind is DeviceType.PWM else Direction.INPUT
    return GpioSpec(
        name=request.name,
        description=request.description,
        board=request.node_id,
        pin=request.pin_number,
        direction=known(request.direction, _DIRECTIONS, "direction") or usual,
        pull=known(request.pull_mode, _PULLS, "pull_mode") or Pull.NONE,
        device_type=kind,
        config=_config(request.config),
    )


def changes(request: pi.UpdateGPIODeviceRequest) -> dict[str, object]:
    """The fields of the spec that are there."""
    found: dict[str, object] = {}
    for field in ("name", "description"):
        if request.HasField(field):
            found[field] = getattr(request, field)
    said = {
        "direction": known(request.direction, _DIRECTIONS, "direction"),
        "pull": known(request.pull_mode, _PULLS, "pull_mode"),
        "device_type": device_type(request.device_type),
    }
    found.update({field: value for field, value in said.items() if value is not None})
    if request.HasField("config"):
        found["config"] = _config(request.config)
    wanted = state(request.status)
    if wanted is DeviceState.ERROR:
        raise InvalidArgument("status can be set to active or inactive", field="status")
    if wanted is not None:
        found["enabled"] = wanted is DeviceState.ACTIVE
    return found


def device_type(said: int) -> DeviceType | None:
    return known(said, _TYPES, "device_type")


def state(said: int) -> DeviceState | None:
    return known(said, _STATES, "status")


def _config(said: pi.GPIOConfig) -> GpioConfig:
    return GpioConfig(**{name: getattr(said, name) for name in CONFIG})
