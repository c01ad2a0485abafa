"""`fleetplane top`: every machine and GPU with how it is and what was measured of it lately."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import Cell, PrintedTable, drawing, emit_table, has_colour, say, terminal_table
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.resources.kinds import Kinds, scope_of, scope_options
from fleetplane.cli.resources.show import OutputForm, age, emit_data, form_option, style_of

if TYPE_CHECKING:
    from fleetplane.client.sync import Fleet

KINDS = ("boards", "edge-nodes", "instances", "proxy-agents", "gpus")
EVERY_SECONDS = 2.0
SEEN = ("lastHeartbeatAt", "lastSeenAt", "observedAt", "registeredAt")
"""Where a status says when something was heard of last, the best first."""
FIGURES = (
    ("CPU", "cpuPercent", "%"),
    ("MEMORY", "memoryPercent", "%"),
    ("DISK", "diskPercent", "%"),
    ("LOAD", "loadAverage", ""),
    ("GPU", "gpuPercent", "%"),
    ("TEMP", "temperatureCelsius", "°C"),
    ("POWER", "powerWatts", "W"),
    ("REQ/S", "requestsPerSecond", ""),
    ("CONN", "connections", ""),
    ("5XX", "errorPercent", "%"),
)


@click.command()
@click.argument("what", nargs=-1, metavar="[KIND]…")
@click.option("--once", is_flag=True, help="Print it once. So it is when the output is no terminal.")
@click.option("--every", type=DURATION, default=EVERY_SECONDS, show_default="2s", help="Between two looks.")
@scope_options
@form_option
@rest_options
def top(
    what: tuple[str, ...],
    once: bool,
    every: float,
    scope: str,
    tenant: str,
    all_scopes: bool,
    output: OutputForm,
    **where: Any,
) -> None:
    """Show machines and GPUs, the state of each, when it was heard of, and its latest figures.

    On a terminal it goes on until it is interrupted. KIND is boards, edge-nodes, instances, proxy-agents or
    gpus; all of them when not given.
    """
    from fleetplane.cli.resources.get import connected

    with connected(where) as fleet:
        chosen = chosen_kinds(Kinds(fleet).all(), what)
        place = scope_of(fleet, scope, tenant, all_scopes)
        if once or not output.is_table or not sys.stdout.isatty():
            rows = look(fleet, chosen, place)
            if not output.is_table:
                emit_data(output, {"kind": "list", "items": rows})
            elif rows:
                emit_table(drawn(rows, time.time()))
            else:
                where_ = f"at {place}" if place else "anywhere that you may look"
                say(f"no machines and no GPUs {where_} ({fleet.endpoint})")
            return
        live(fleet, chosen, place, every)


def chosen_kinds(known: Sequence[Mapping[str, Any]], words: Sequence[str]) -> list[Mapping[str, Any]]:
    """The resources that are shown, in their order. Pure."""
    from fleetplane.cli.resources.kinds import words_of

    shown = [one for plural in KINDS for one in known if one["plural"] == plural]
    if not words:
        return [one for one in shown if "list" in one.get("may", ())]
    for word in words:
        if not any(word.lower() in words_of(one) for one in shown):
            raise click.UsageError(f"{word!r} is none of {', '.join(str(one['plural']) for one in shown)}.")
    return [one for one in shown if any(word.lower() in words_of(one) for word in words)]


def look(fleet: Fleet, chosen: Sequence[Mapping[str, Any]], scope: str) -> list[dict[str, Any]]:
    """Everything that is shown, as of now."""
    from fleetplane.client.requests import Query

    found: list[dict[str, Any]] = []
    for resource in chosen:
        resources = fleet.resource(str(resource["plural"]))
        measured: dict[tuple[str, str], Mapping[str, Any]] = {}
        if "figures" in resource.get("verbs", ()):
            for one in resources.figures(Query(scope=scope)):
                measured[str(one.get("scope")), str(one.get("name"))] = one
        for item in resources.list(Query(scope=scope)).items:
            figures = measured.get((item.metadata.scope, item.name)) or {}
            found.append(row_of(item.raw, figures))
    return found


def row_of(shown: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """One machine, from its object and what was measured of it. Pure."""
    status, metadata = shown.get("status") or {}, shown.get("metadata") or {}
    spec = shown.get("spec") or {}
    seen = figures.get("at") or next((status[name] for name in SEEN if status.get(name)), None)
    return {
        "kind": shown.get("kind"),
        "metadata": {"name": metadata.get("name"), "scope": metadata.get("scope")},
        "displayName": spec.get("displayName") or metadata.get("name"),
        "state": status.get("state") or status.get("health") or "-",
        "health": status.get("health"),
        "seenAt": seen,
        "figures": dict(figures.get("values") or {}),
    }


def drawn(rows: Sequence[Mapping[str, Any]], now: float) -> PrintedTable:
    """The table of all of them; columns of figures that nobody has are left out. Pure."""
    columns = [one for one in FIGURES if any(one[1] in row["figures"] for row in rows)]
    return PrintedTable(
        columns=("NAME", "STATE", "SEEN", *(title for title, _, _ in columns)),
        rows=[list(_cells(row, columns, now)) for row in rows],
        empty="",
    )


def _cells(row: Mapping[str, Any], columns: Sequence[tuple[str, str, str]], now: float) -> Iterator[Cell]:
    state = str(row["state"])
    yield Cell(text=f"{row['kind']}/{row['displayName']}")
    yield Cell(text=state, style=style_of(str(row["health"] or state)))
    yield Cell(text=age(row["seenAt"], now))
    for _, name, unit in columns:
        value = row["figures"].get(name)
        text = "-" if not isinstance(value, int | float) else f"{value:.1f}{unit}"
        is_high = unit == "%" and isinstance(value, int | float) and value >= HIGH_PERCENT
        yield Cell(text=text, style="yellow" if is_high else "")


HIGH_PERCENT = 90.0
"""From where a share is worth a look."""


def live(fleet: Fleet, chosen: Sequence[Mapping[str, Any]], scope: str, every: float) -> None:
    """Redraw it until it is interrupted; a server that is away is waited for."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from fleetplane.kernel.errors import Unavailable

    console = Console()
    with drawing(), Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            try:
                rows = look(fleet, chosen, scope)
                text = terminal_table(drawn(rows, time.time()), console.width, colour=has_colour())
                head = f"{len(rows)} at {scope or '/'}  {time.strftime('%H:%M:%S')}  {fleet.endpoint}\n\n"
            except (Unavailable, TimeoutError) as error:
                head, text = "", str(error)
            shown = "\n".join((head + text).splitlines()[: max(1, console.height - 1)])
            screen.update(Text.from_ansi(shown), refresh=True)
            time.sleep(every)
