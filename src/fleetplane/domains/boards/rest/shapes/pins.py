"""The shapes of pins, their levels and their reservations."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.boards.pins.kinds import DeviceState, DeviceType, Direction, GpioConfig, Pull
from fleetplane.domains.boards.rest.shapes.base import BoardShape, Data, Rows
from fleetplane.web.rest.values import Number


class ShownPin(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    description: str
    node_id: int
    pin_number: int
    direction: Direction
    pull_mode: Pull
    value: Number | None
    device_type: DeviceType
    status: DeviceState
    config: GpioConfig
    created_at: str
    updated_at: str
    reserved_by: str | None
    reserved_at: str | None
    reservation_ttl: str | None
    """When the reservation ends."""
    wanted: int | None
    value_at: str | None
    reason: str
    message: str


class PinRows(Rows[ShownPin], frozen=True, kw_only=True):
    """Pins in use."""


class PinData(Data[ShownPin], frozen=True, kw_only=True):
    """One pin."""


class NodePins(BoardShape, frozen=True, kw_only=True):
    gpio_devices: Sequence[ShownPin]
    count: int
    node_id: int


class PinLevel(BoardShape, frozen=True, kw_only=True):
    device_id: int
    node_id: int
    pin: int
    value: int
    timestamp: str


class PinReading(BoardShape, frozen=True, kw_only=True):
    device_id: int
    value: Number
    timestamp: str


class PinReadings(BoardShape, frozen=True, kw_only=True):
    readings: Sequence[PinReading]
    count: int
    device_id: int


class PinReservation(BoardShape, frozen=True, kw_only=True):
    pin_id: int
    node_id: int
    pin_number: int
    reserved_by: str
    reserved_at: str
    expires_at: str | None


class PinReservations(BoardShape, frozen=True, kw_only=True):
    reservations: Sequence[PinReservation]
    count: int


class EndedReservations(BoardShape, frozen=True, kw_only=True):
    message: str
    cleaned_count: int


class ReservedPin(BoardShape, frozen=True, kw_only=True):
    message: str
    gpio_id: int
    client_id: str
    reserved_by: str
    expires_at: str | None


class ReleasedPin(BoardShape, frozen=True, kw_only=True):
    message: str
    gpio_id: int
    client_id: str
