"""`fleetplane boards logs`: what a board writes down, then and now."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import click

from fleetplane.cli.exits import CommandFailed, Exit
from fleetplane.cli.output import flat, json_line
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, number_of

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
