"""`fleetplane proxies traffic`: what requests came to, now and over time."""

from __future__ import annotations

import datetime as dt
import re
import time
from typing import Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.proxies.cli.proxies import PREFIX, client, proxy_options
from fleetplane.kernel.errors import InvalidArgument

WATCH_SECONDS = 5.0
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_COLUMNS = (
    "REQUESTS",
    "DAY-BEFORE",
    "4XX",
    "5XX",
    "P50-MS",
    "P99-MS",
    "IN",
    "OUT",
    "CACHED",
    "FAILED",
)
_GROUPS = ("host", "location", "upstream", "agent")


@click.command("traffic")
@click.option("--since", default="1h", show_default=True, help="How far back, such as 15m, 6h or 30d.")
@click.option("--host", default="", metavar="ID", help="Only of this virtual host.")
@click.option("--agent", default="", metavar="ID", help="Only of this agent.")
@click.option("--location", default="", metavar="PATH", help="Only of locations with this path.")
@click.option("--upstream", default="", metavar="ID", help="Only of this upstream.")
@click.option("--by", type=click.Choice(_GROUPS), default="host", show_default=True, help="What rows are of.")
@click.option("--top", is_flag=True, help="The most frequent paths, clients, referrers and user agents.")
@click.option("--watch", "-w", is_flag=True, help="Show it again every 5 seconds, until interrupted.")
@format_option
@proxy_options
def traffic(
    since: str,
    host: str,
    agent: str,
    location: str,
    upstream: str,
    by: str,
    top: bool,
    watch: bool,
    output: Format,
    workspace: str,
    **where: Any,
) -> None:
    """Show the requests of a workspace, busiest first.

        fleetplane proxies traffic --since 24h

    Counts are exact; percentiles are within 1 %. The first row is all of it, compared with the same hours of
    the day before.
    """
    seconds = _seconds(since)
    with client(where) as server:
        while True:
            query = {
                "from": _moment(seconds),
                "virtual_host_id": host,
                "agent_id": agent,
                "location": location,
                "upstream_id": upstream,
                "by": "location" if by in ("location", "upstream") else "",
            }
            told = server.call(
                "GET",
                f"{PREFIX}/workspaces/{workspace}/traffic",
                query={name: value for name, value in query.items() if value},
            )
            if watch and output is Format.TABLE:
                click.clear()
            emit(output, told, _frequent(told) if top else _rows(told, by))
            if not watch:
                return
            time.sleep(WATCH_SECONDS)


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if found is None or not int(found[1]):
        raise InvalidArgument(f"{text!r} is no length of time", field="--since", hint="write 15m, 6h or 30d")
    return int(found[1]) * _UNITS[found[2]]


def _moment(seconds: int) -> str:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
    return past.strftime("%Y-%m-%dT%H:%M:%SZ")


def _rows(told: dict[str, Any], by: str) -> PrintedTable:
    rows = [_row("all", told["total"], before=str(told["day_before"]["requests"]))]
    rows += [_row(name, said) for name, said in _grouped(told, by)]
    return PrintedTable(columns=(by.upper(), *_COLUMNS), rows=rows, empty="no requests")


def _grouped(told: dict[str, Any], by: str) -> list[tuple[str, dict[str, Any]]]:
    match by:
        case "location":
            return [
                (f"{one['virtual_host'] or one['virtual_host_id']} {one['location']}", one["figures"])
                for one in told["locations"]
            ]
        case "upstream":
            return [(one["name"] or one["upstream_id"], one["figures"]) for one in told["upstreams"]]
        case "agent":
            return [(one["name"] or one["agent_id"], one["figures"]) for one in told["agents"]]
    return [
        (one["name"] or one["virtual_host_id"] or "no host", one["figures"]) for one in told["virtual_hosts"]
    ]


def _row(name: str, said: dict[str, Any], before: str = "") -> list[Cell]:
    failed = said["status_codes"]["5xx"]
    return [
        Cell(text=name),
        Cell(text=str(said["requests"])),
        Cell(text=before),
        Cell(text=str(said["status_codes"]["4xx"])),
        Cell(text=str(failed), style="red" if failed else ""),
        Cell(text=f"{said['latency_ms']['p50']:g}"),
        Cell(text=f"{said['latency_ms']['p99']:g}"),
        Cell(text=str(said["in_bytes"])),
        Cell(text=str(said["out_bytes"])),
        Cell(text=f"{said['cache_hits']}/{said['cache_lookups']}"),
        Cell(text=str(said["upstream_failures"])),
    ]


def _frequent(told: dict[str, Any]) -> PrintedTable:
    rows = [
        [Cell(text=kind), Cell(text=one["value"]), Cell(text=str(one["requests"]))]
        for kind, many in told["top"].items()
        for one in many["values"]
    ]
    return PrintedTable(columns=("KIND", "VALUE", "REQUESTS"), rows=rows, empty="no requests")
