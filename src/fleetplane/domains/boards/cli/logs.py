"""`fleetplane boards logs|metrics`: what a board logs and measures, now or over time."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import click

from fleetplane.cli.exits import CommandFailed, Exit
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, flat, format_option, json_line
from fleetplane.cli.parameters import DURATION
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, number_of, pages

FLAT = ("cpu_usage", "memory_usage", "disk_usage", "temperature")
UNITS = {"cpu_usage": "%", "memory_usage": "%", "disk_usage": "%", "temperature": " °C"}


@click.command()
@click.argument("board", required=False)
@click.option("--series", help="Show one series over time, such as cpu_usage, temperature or disk_usage.")
@click.option("--last", type=DURATION, default=3600.0, show_default="1h", help="With --series: how far back.")
@click.option("--step", type=click.IntRange(1, 86_400), help="With --series: seconds per point.")
@format_option
@board_options
def metrics(
    board: str | None, series: str | None, last: float, step: int | None, output: Format, **where: Any
) -> None:
    """Show a board's metrics now, or the latest metrics of all boards."""
    if series is not None and board is None:
        raise click.UsageError("--series needs a board")
    with client(where) as server:
        if board is None:
            _fleet(output, list(pages(server, "/metrics")))
            return
        path = f"{PREFIX}/nodes/{number_of(server, board)}"
        if series is None:
            _now(output, server.call("GET", f"{path}/system")["data"])
            return
        query = {"series": series, "from": _ago(last)} | ({"step": str(step)} if step else {})
        _over(output, server.call("GET", f"{path}/metrics", query=query))


def _ago(seconds: float) -> str:
    from datetime import UTC, datetime, timedelta

    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def _fleet(output: Format, found: list[dict[str, Any]]) -> None:
    rows = [
        [Cell(text=str(one["node_id"])), *(Cell(text=_shown(one, name)) for name in FLAT)] for one in found
    ]
    columns = ("BOARD", "CPU", "MEMORY", "DISK", "TEMPERATURE")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no boards"))


def _shown(board: dict[str, Any], name: str) -> str:
    return f"{board[name]['value']:.1f}{UNITS[name]}" if name in board else ""


def _now(output: Format, told: dict[str, Any]) -> None:
    rows: list[list[Cell]] = []

    def row(name: str, text: str) -> None:
        rows.append([Cell(text=name), Cell(text=text)])

    missing = told.get("unavailable") or []
    for name in FLAT:
        if name in told and name not in missing:
            row(name, f"{told[name]:.1f}{UNITS[name]}")
    if "cpu_usage" not in told and told["cpu"]:
        row("cpu_usage", f"{told['cpu']['usage_percent']:.1f}%")
    if told["load"]:
        row("load", " ".join(f"{told['load'][name]:.2f}" for name in ("load1", "load5", "load15")))
    for disk in told["disks"]:
        row(f"disk {disk['mountpoint']}", f"{disk['usage_percent']:.1f}%")
    for one in told["network"]:
        row(f"network {one['interface']}", f"{one['bytes_recv']} in, {one['bytes_sent']} out")
    power = told.get("power") or {}
    troubles = [name for name, value in power.items() if value is True]
    if power:
        row("power", ", ".join(troubles) or "good")
    if missing:
        row("not readable", ", ".join(missing))
    emit(output, told, PrintedTable(columns=("WHAT", "IS"), rows=rows, empty="nothing was measured"))


def _over(output: Format, told: dict[str, Any]) -> None:
    rows = [
        [
            Cell(text=point["timestamp"]),
            *(Cell(text=f"{point[name]:.2f}") for name in ("average", "min", "max")),
        ]
        for point in told["points"]
    ]
    columns = ("AT", "AVERAGE", "MIN", "MAX")
    emit(output, told, PrintedTable(columns=columns, rows=rows, empty="nothing was measured then"))


LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_EXITS = {
    400: Exit.USAGE,
    401: Exit.DENIED,
    403: Exit.DENIED,
    404: Exit.NOT_FOUND,
    409: Exit.CONFLICT,
    429: Exit.UNAVAILABLE,
    503: Exit.UNAVAILABLE,
}


@click.command()
@click.argument("board")
@click.option("-f", "--follow", is_flag=True, help="Follow: keep printing new entries.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    help="Number of earlier entries to begin with.",
)
@click.option("-u", "--unit", "units", multiple=True, help="Only of this unit; can be given often.")
@click.option("--source", "sources", multiple=True, help="journal, kernel, agent or file:NAME.")
@click.option("--level", type=click.Choice(LEVELS), help="Minimum severity.")
@click.option("--contains", help="Only entries with this text, ignoring case.")
@click.option("--regex", help="Only entries that match this regular expression.")
@click.option("--since", help="A time such as 2026-03-01T00:00:00Z.")
@click.option("--until", help="End of the range, as --since.")
@click.option("--boot", is_flag=True, help="Only entries of this boot.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one object a line.",
)
@board_options
def logs(board: str, output: str, **rest: Any) -> None:
    """Read a board's logs, and follow them over broken connections."""
    names = ("follow", "tail", "level", "contains", "regex", "since", "until", "boot")
    chosen = {name: rest.pop(name) for name in names}
    query = [
        (name, "true" if value is True else str(value))
        for name, value in chosen.items()
        if value is not None and value is not False
    ]
    query += [("unit", unit) for unit in rest.pop("units")]
    query += [("source", source) for source in rest.pop("sources")]
    with client(rest) as server:
        path = f"{PREFIX}/nodes/{number_of(server, board)}/logs?{urlencode(query)}"
        with server.events("GET", path) as events:
            for _mark, kind, data in events:
                told = json.loads(data)
                if kind == "end":
                    return
                if kind == "error":
                    code = _EXITS.get(told["status"], Exit.FAILURE)
                    raise CommandFailed(code, told["message"])
                click.echo(json_line(told) if output == "json" else _line(told))
    raise CommandFailed(Exit.UNAVAILABLE, "the event stream ended")


def _line(entry: dict[str, Any]) -> str:
    if entry["dropped"]:
        click.echo(f"({entry['dropped']} entries are missing: the reader was too slow)", err=True)
    origin = entry["unit"] or entry["source"]
    pid = f"[{entry['pid']}]" if entry["pid"] else ""
    return flat(f"{entry['timestamp']} {entry['level'] or '-':<8} {origin}{pid}: {entry['message']}")
