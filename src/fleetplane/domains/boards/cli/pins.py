"""`fleetplane boards gpio`: pins of boards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, number_of, pages, styled
from fleetplane.kernel.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

LEVELS = {"low": 0, "off": 0, "high": 1, "on": 1}
client_option = click.option(
    "--as",
    "client_id",
    default="",
    help="Name of the program that holds the reservation, where you run several.",
)


@click.group()
def gpio() -> None:
    """Pins of boards. A PIN is a device's number, or BOARD:PIN such as attic:17 (BCM).

    Writing to a pin that has no device yet, or reading one, makes a device for it.
    """


@gpio.command("list")
@click.argument("board", required=False)
@format_option
@board_options
def list_pins(board: str | None, output: Format, **where: Any) -> None:
    """List configured pins of one board or all."""
    with client(where) as server:
        query = [] if board is None else [("node_id", str(number_of(server, board)))]
        found = list(pages(server, "/gpio", query=query))
    rows = [
        [
            Cell(text=str(one["id"])),
            Cell(text=str(one["node_id"])),
            Cell(text=str(one["pin_number"])),
            Cell(text=one["name"]),
            Cell(text=f"{one['device_type']} {one['direction']}"),
            Cell(text="" if one["value"] is None else f"{one['value']:g}"),
            styled(one["status"]),
            Cell(text=one["reserved_by"] or ""),
            Cell(text=one["message"]),
        ]
        for one in found
    ]
    columns = ("ID", "BOARD", "PIN", "NAME", "TYPE", "VALUE", "STATUS", "RESERVED BY", "WORDS")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no pins in use"))


@gpio.command("add")
@click.argument("pin", metavar="BOARD:PIN")
@click.option("--name", default="", help="Name of the device. Default: `pinN`.")
@click.option(
    "--direction", type=click.Choice(["input", "output"]), help="Direction. Default: input; output for pwm."
)
@click.option("--pull", type=click.Choice(["none", "up", "down"]), default="none", show_default=True)
@click.option(
    "--type",
    "kind",
    type=click.Choice(["digital", "pwm"]),
    default="digital",
    show_default=True,
    help="Type of the device.",
)
@click.option("--frequency", type=click.IntRange(min=1), help="Frequency of a PWM waveform, in Hz.")
@click.option("--sample-rate", type=click.IntRange(min=0), default=0, help="Readings to keep per second.")
@board_options
def add(
    pin: str,
    name: str,
    direction: str | None,
    pull: str,
    kind: str,
    frequency: int | None,
    sample_rate: int,
    **where: Any,
) -> None:
    """Configure a pin and print the device's number."""
    board, number = _place(pin)
    with client(where) as server:
        body = {
            "name": name or f"pin{number}",
            "node_id": number_of(server, board),
            "pin_number": number,
            "direction": direction,
            "pull_mode": pull,
            "device_type": kind,
            "config": {"frequency": frequency or 0, "sample_rate": sample_rate},
        }
        made = server.call("POST", f"{PREFIX}/gpio", body=body)["data"]
    click.echo(made["id"])


@gpio.command("remove")
@click.argument("pin")
@board_options
def remove(pin: str, **where: Any) -> None:
    """Delete a pin and free its line."""
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/gpio/{_device(server, pin)['id']}")


@gpio.command("read")
@click.argument("pin")
@format_option
@board_options
def read(pin: str, output: Format, **where: Any) -> None:
    """Read a pin's level from the board."""
    with client(where) as server:
        device = _device(server, pin, make="input")
        told = server.call("POST", f"{PREFIX}/gpio/{device['id']}/read")
    _level(output, told)


@gpio.command("write")
@click.argument("pin")
@click.argument("value")
@client_option
@format_option
@board_options
def write(pin: str, value: str, client_id: str, output: Format, **where: Any) -> None:
    """Drive a pin from now on: low, high, or a duty cycle in percent.

    The level is kept: the board is brought back to it after a restart.
    """
    level = LEVELS.get(value.lower(), int(value) if value.isascii() and value.isdecimal() else None)
    if level is None:
        raise click.UsageError(f"{value!r} is no level; write low, high, or 0 to 100 for a waveform")
    with client(where) as server:
        device = _device(server, pin, make="output")
        if device["direction"] == "input":
            raise InvalidArgument(
                f"pin {device['pin_number']} is an input",
                hint=f"`gpio set {pin} --direction output` changes it",
            )
        told = server.call(
            "POST", f"{PREFIX}/gpio/{device['id']}/write", body={"value": level, "client_id": client_id}
        )
    _level(output, told)


@gpio.command("set")
@click.argument("pin")
@click.option("--name", help="New name of the device.")
@click.option("--direction", type=click.Choice(["input", "output"]))
@click.option("--pull", type=click.Choice(["none", "up", "down"]))
@click.option("--active/--inactive", default=None, help="Whether the board configures the pin.")
@board_options
def change(
    pin: str, name: str | None, direction: str | None, pull: str | None, active: bool | None, **where: Any
) -> None:
    """Change a pin's name, direction, pull or activity; its board follows when it is connected."""
    status = None if active is None else "active" if active else "inactive"
    wanted = {"name": name, "direction": direction, "pull_mode": pull, "status": status}
    body = {key: value for key, value in wanted.items() if value is not None}
    if not body:
        raise click.UsageError("nothing to change: give --name, --direction, --pull, --active or --inactive")
    with client(where) as server:
        server.call("PUT", f"{PREFIX}/gpio/{_device(server, pin)['id']}", body=body)


@gpio.command("readings")
@click.argument("pin")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Maximum number of rows."
)
@format_option
@board_options
def readings(pin: str, limit: int, output: Format, **where: Any) -> None:
    """List a pin's readings and writes, newest first."""
    with client(where) as server:
        device = _device(server, pin)
        path = f"{PREFIX}/gpio/{device['id']}/readings"
        found = server.call("GET", path, query={"limit": str(limit)})["readings"]
    rows = [[Cell(text=one["timestamp"]), Cell(text=f"{one['value']:g}")] for one in found]
    emit(output, found, PrintedTable(columns=("AT", "VALUE"), rows=rows, empty="no readings"))


@gpio.command("reserve")
@click.argument("pin")
@click.option(
    "--for", "seconds", type=DURATION, help="How long the reservation lasts. Default: until released."
)
@client_option
@board_options
def reserve(pin: str, seconds: float | None, client_id: str, **where: Any) -> None:
    """Let nobody else write a pin.

    With --for, what you write under the reservation ends with it: the board itself makes the pin safe,
    even if this server is gone by then.
    """
    with client(where) as server:
        device = _device(server, pin, make="output")
        body = {"client_id": client_id, "ttl_seconds": seconds or 0.0}
        told = server.call("POST", f"{PREFIX}/gpio/{device['id']}/reserve", body=body)
    click.echo(f"reserved by {told['reserved_by']} until {told['expires_at'] or 'released'}", err=True)


@gpio.command("release")
@click.argument("pin")
@client_option
@board_options
def release(pin: str, client_id: str, **where: Any) -> None:
    """Release a reservation."""
    with client(where) as server:
        path = f"{PREFIX}/gpio/{_device(server, pin)['id']}/release"
        server.call("POST", path, body={"client_id": client_id})


def _level(output: Format, told: dict[str, Any]) -> None:
    if output is Format.TABLE:
        click.echo(told["value"])
    else:
        emit(output, told, PrintedTable(columns=(), rows=(), empty=""))


def _place(pin: str) -> tuple[str, int]:
    board, colon, number = pin.rpartition(":")
    if not colon or not board or not (number.isascii() and number.isdecimal()):
        raise click.UsageError(f"{pin!r} is no pin; write BOARD:PIN, such as attic:17")
    return board, int(number)


def _device(server: RestClient, pin: str, *, make: str = "") -> dict[str, Any]:
    """The device that somebody names; made, in this direction, where a board's pin has none."""
    if pin.isascii() and pin.isdecimal():
        found: dict[str, Any] = server.call("GET", f"{PREFIX}/gpio/{pin}")["data"]
        return found
    board, number = _place(pin)
    node = number_of(server, board)
    for device in server.call("GET", f"{PREFIX}/nodes/{node}/gpio")["gpio_devices"]:
        if device["pin_number"] == number:
            return dict(device)
    if not make:
        raise NotFound(f"pin {number} of {board} is not in use", hint="`gpio add` takes it into use")
    body = {"name": f"pin{number}", "node_id": node, "pin_number": number, "direction": make}
    made: dict[str, Any] = server.call("POST", f"{PREFIX}/gpio", body=body)["data"]
    return made
