"""`fleetplane boards metrics`: how boards are, now or over time."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
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
