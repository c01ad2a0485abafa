"""Option types that several verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.address import parse_address
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations

if TYPE_CHECKING:
    from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2

STATUSES = frozenset({"True", "False", "Unknown"})

LONGEST_SECONDS = 100 * 366 * 24 * 3600.0
"""gRPC takes a deadline that is too far away for one that has passed."""


class Duration(click.ParamType[float]):
    """`30s`, `500ms`, `2m`, `1h30m`, or a plain number of seconds; as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = durations.parse_typed(str(value))
        except InvalidArgument as error:
            self.fail(error.message, param, ctx)
        if seconds <= 0:
            self.fail("must be longer than nothing", param, ctx)
        if seconds > LONGEST_SECONDS:
            self.fail("is longer than a hundred years", param, ctx)
        return seconds


class AddressParameter(click.ParamType[str]):
    """An address as gRPC takes it."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_address(str(value))
        except InvalidArgument as error:
            self.fail(f"{error.message}; {error.advice}" if error.advice else error.message, param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionTerm:
    """A condition and the status it should have, such as Ready=True."""

    type: str
    status: str

    def __str__(self) -> str:
        return f"{self.type}={self.status}"

    def holds(self, gpu: gpu_pb2.Gpu) -> bool:
        return any(entry.type == self.type and entry.status == self.status for entry in gpu.status.conditions)

    def actual(self, gpu: gpu_pb2.Gpu) -> str:
        """What is the case instead, for an error message."""
        held = next((entry for entry in gpu.status.conditions if entry.type == self.type), None)
        if held is None:
            return f"it has no condition {self.type}"
        return f"{self.type}={held.status}" + (f" ({held.reason})" if held.reason else "")


class ConditionParameter(click.ParamType[ConditionTerm]):
    name = "condition"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ConditionTerm:
        if isinstance(value, ConditionTerm):
            return value
        kind, equals, status = str(value).partition("=")
        if not kind or not equals or status.capitalize() not in STATUSES:
            self.fail(f"{value!r} is no condition; write TYPE=True, TYPE=False or TYPE=Unknown", param, ctx)
        return ConditionTerm(type=kind, status=status.capitalize())


CONDITION = ConditionParameter()
DURATION = Duration()
ADDRESS = AddressParameter()

address_option = click.option(
    "--address",
    type=ADDRESS,
    envvar=["FLEETPLANE_DEVICE_API", "NVIDIA_DEVICE_API_TARGET"],
    show_envvar=True,
    help="Where the device API is: unix:///path or host:port. Without it: the system's socket, "
    "else ./fleetplane-data/device.sock, else 127.0.0.1:50051.",
)


LOG_LEVELS = ("debug", "info", "warning", "error")


class Label(click.ParamType[tuple[str, str]]):
    """`KEY=VALUE`, as a pair."""

    name = "label"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is no label; write env=production", param, ctx)
        return key, text
