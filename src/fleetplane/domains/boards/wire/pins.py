"""Protobuf to GPIO devices and back, for the original controller's service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

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
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp

_DIRECTIONS: Final[Mapping[Direction, pi.GPIODirection]] = {
    Direction.INPUT: pi.GPIO_DIRECTION_INPUT,
    Direction.OUTPUT: pi.GPIO_DIRECTION_OUTPUT,
}
_PULLS: Final[Mapping[Pull, pi.GPIOPullMode]] = {
    Pull.NONE: pi.GPIO_PULL_MODE_NONE,
    Pull.UP: pi.GPIO_PULL_MODE_UP,
    Pull.DOWN: pi.GPIO_PULL_MODE_DOWN,
}
_TYPES: Final[Mapping[DeviceType, pi.GPIODeviceType]] = {
    DeviceType.DIGITAL: pi.GPIO_DEVICE_TYPE_DIGITAL,
    DeviceType.ANALOG: pi.GPIO_DEVICE_TYPE_ANALOG,
    DeviceType.PWM: pi.GPIO_DEVICE_TYPE_PWM,
    DeviceType.SPI: pi.GPIO_DEVICE_TYPE_SPI,
    DeviceType.I2C: pi.GPIO_DEVICE_TYPE_I2C,
}
_STATES: Final[Mapping[DeviceState, pi.GPIOStatus]] = {
    DeviceState.ACTIVE: pi.GPIO_STATUS_ACTIVE,
    DeviceState.INACTIVE: pi.GPIO_STATUS_INACTIVE,
    DeviceState.ERROR: pi.GPIO_STATUS_ERROR,
}
_DIRECTIONS_BACK = {int(number): direction for direction, number in _DIRECTIONS.items()}
_PULLS_BACK = {int(number): pull for pull, number in _PULLS.items()}
_TYPES_BACK = {int(number): kind for kind, number in _TYPES.items()}
_STATES_BACK = {int(number): state for state, number in _STATES.items()}
CONFIG: Final = GpioConfig.__struct_fields__

T = TypeVar("T")


def device(found: Device) -> pi.GPIODevice:
    spec, status = found.spec, status_of(found)
    value = status.value if status.value is not None else spec.level
    return pi.GPIODevice(
        id=device_number(found),
        name=spec.name,
        description=spec.description,
        pin_number=spec.pin,
        direction=_DIRECTIONS[spec.direction],
        pull_mode=_PULLS[spec.pull],
        value=round(value or 0),
        device_type=_TYPES[spec.device_type],
        status=_STATES[status.state],
        node_id=spec.board,
        config=pi.GPIOConfig(**{name: getattr(spec.config, name) for name in CONFIG}),
        created_at=timestamp(found.created_at_ns),
        updated_at=timestamp(found.updated_at_ns),
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
        direction=_known(request.direction, _DIRECTIONS_BACK, "direction") or usual,
        pull=_known(request.pull_mode, _PULLS_BACK, "pull_mode") or Pull.NONE,
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
        "direction": _known(request.direction, _DIRECTIONS_BACK, "direction"),
        "pull": _known(request.pull_mode, _PULLS_BACK, "pull_mode"),
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
    return _known(said, _TYPES_BACK, "device_type")


def state(said: int) -> DeviceState | None:
    return _known(said, _STATES_BACK, "status")


def _config(said: pi.GPIOConfig) -> GpioConfig:
    return GpioConfig(**{name: getattr(said, name) for name in CONFIG})


def _known(said: int, table: Mapping[int, T], field: str) -> T | None:
    """None if nothing is said."""
    if not said:
        return None
    try:
        return table[said]
    except KeyError:
        raise InvalidArgument(f"{field} {said} is not known", field=field) from None
