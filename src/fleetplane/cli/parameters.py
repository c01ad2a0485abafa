"""Options and parameter types that several verbs share: which server, which data directory, which address."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations

if TYPE_CHECKING:
    from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2


SYSTEM_SOCKET = Path("/var/run/device-api/device.sock")
LOCAL_SOCKET = Path("fleetplane-data/device.sock")
TCP_ADDRESS = "127.0.0.1:50051"

SOCKET_PATH_LIMIT_BYTES = 107
"""What fits into the kernel's socket address, less its closing zero byte."""


def default_address(exists: Callable[[Path], bool] = Path.exists) -> str:
    """The system's socket, else the one of a server started in this folder, else the local port.

    Which of them is there changes as servers come and go: ask again for every connection.
    """
    for socket in (SYSTEM_SOCKET, LOCAL_SOCKET):
        if exists(socket):
            return f"unix://{socket.absolute()}"
    return TCP_ADDRESS


def parse_address(text: str) -> str:
    """`unix:///path`, a bare path, `host:port`, or `http://host:port` as a ready file spells it."""
    if text.startswith(("unix:", "/", "./")):
        path = Path(re.sub("^unix:(//)?", "", text))
        if not path.name:
            raise InvalidArgument(f"{text!r} names no socket file", field="address")
        place = str(path.absolute())
        if len(place.encode()) > SOCKET_PATH_LIMIT_BYTES:
            raise InvalidArgument(
                f"the socket path {place} is longer than {SOCKET_PATH_LIMIT_BYTES} bytes, the system's limit",
                field="address",
            )
        return f"unix://{place}"
    rest = text.removeprefix("http://").rstrip("/")
    host, _, port = rest.rpartition(":")
    if not host or "/" in rest or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(
            f"{text!r} is no address", field="address", hint="write unix:///path/to/device.sock or host:port"
        )
    return rest


F = TypeVar("F", bound=Callable[..., Any])

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The server's data directory.  [default: ./fleetplane-data]",
)
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The server's settings, as TOML: where its master key is.",
)


context_option = click.option(
    "--context",
    default="",
    metavar="NAME",
    help="A context of `fleetplane context list`.  [env var: FLEETPLANE_CONTEXT; default: the current one]",
)


def owner_flags() -> Sequence[Callable[[F], F]]:
    """Which server: by its data directory, or by context."""
    return (
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            help="Data directory of a server on this machine; the command acts as its owner.  "
            "[env var: FLEETPLANE_DATA_DIR; default: that of the one server of yours that runs]",
        ),
        context_option,
    )


def owner_options(command: F) -> F:
    """For what is asked at the server's own socket only; the command takes `data_dir`."""
    from functools import wraps

    @wraps(command)
    def located(*arguments: Any, data_dir: Path | None, context: str, **named: Any) -> Any:
        from fleetplane.client.places import Place, owner_directory

        found = owner_directory(Place(context=context, data_dir=data_dir))
        return command(*arguments, data_dir=found, **named)

    wrapped: Any = located
    for option in owner_flags():
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


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
