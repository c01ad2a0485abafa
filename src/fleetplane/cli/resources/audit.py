"""`fleetplane audit list`: who did what, in order, and with `-f` what is done from now on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import flat, say
from fleetplane.cli.resources.show import OutputForm, emit_data, form_option, safe_json
from fleetplane.kernel.errors import IntegrityError

if TYPE_CHECKING:
    from fleetplane.client.sync import Fleet

PLURAL = "audit-entries"
SHOWN = 50
LIMIT_MOST = 1000
"""What the server gives in one page."""
CHANGES_SHOWN = 3


@click.command("list")
@click.option("-f", "--follow", "goes_on", is_flag=True, help="Go on with what is done from now on.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, LIMIT_MOST),
    default=SHOWN,
    show_default=True,
    help="How many of the latest entries to begin with.",
)
@click.option(
    "--field-selector", "fields", default="", metavar="FIELDS", help="Such as spec.actor=operator/local."
)
@form_option
@rest_options
def list_entries(goes_on: bool, tail: int, fields: str, output: OutputForm, **where: Any) -> None:
    """Show who changed what, oldest first; with -f, go on with what is changed.

    `fleetplane get audit-entries` lists all of them, newest first.
    """
    from fleetplane.cli.resources.get import connected

    with connected(where) as fleet:
        last, found = newest(fleet, fields, tail)
        if goes_on:
            for entry in chain(found, followed(fleet, fields, last)):
                emit_entry(output, entry)
        elif output.is_table or output.name == "name":
            for entry in found:
                emit_entry(output, entry)
        else:
            emit_data(output, {"kind": "list", "items": found})
        if not found and output.is_table:
            with_what = f" with {fields}" if fields else ""
            say(f"no audit entries{with_what} ({fleet.endpoint})")


def newest(fleet: Fleet, fields: str, count: int) -> tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]:
    """The last entry of all, and the last that are asked for, oldest first."""
    last = next(iter(next(pages(fleet, "", 1), [])), None)
    found: list[Mapping[str, Any]] = []
    for page in pages(fleet, fields, max(1, count)):
        found += page
        if len(found) >= count:
            break
    until = 0 if last is None else number_of(last)
    return last, [one for one in reversed(found[:count]) if number_of(one) <= until]


def followed(fleet: Fleet, fields: str, last: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Every entry after one, as they come, over any number of connections."""
    from fleetplane.cli.resources.get import on_gap

    number = 0 if last is None else number_of(last)
    after = None if last is None else int(last["metadata"]["revision"])
    for change in fleet.watch(PLURAL, fields=fields, after=after, on_gap=on_gap):
        entry = change.object.raw
        if change.type != "deleted" and number_of(entry) > number:  # those of the same revision come again
            number = number_of(entry)
            yield entry


def pages(fleet: Fleet, fields: str, limit: int) -> Iterator[list[Mapping[str, Any]]]:
    """Pages of entries, newest first."""
    from fleetplane.client import requests
    from fleetplane.client.calls import page_of

    following = ""
    while True:
        query = requests.Query(fields=fields)
        entries, next_one, _ = page_of(fleet.call(requests.page(PLURAL, query, following, limit=limit)))
        yield entries
        if not next_one:
            return
        requests.check_goes_on(following, next_one)
        following = next_one


def number_of(entry: Mapping[str, Any]) -> int:
    """The number of an entry, by which it is called."""
    try:
        return int(entry["metadata"]["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the server's answer is no entry of an audit log: {error!r}") from error


def emit_entry(form: OutputForm, entry: Mapping[str, Any]) -> None:
    """One entry, on a line of its own where people and scripts read lines."""
    if form.is_table:
        click.echo(line_of(entry))
    elif form.name == "json":
        click.echo(safe_json(entry))
    else:
        if form.name == "yaml":
            click.echo("---")
        emit_data(form, entry)


def line_of(entry: Mapping[str, Any]) -> str:
    """An entry for people: its number, when, who, what, and of what. Pure."""
    spec = entry.get("spec") or {}
    changes = [
        f"{one.get('operation')} {one.get('kind')}/{one.get('name')}"
        + (f" in {one['scope']}" if one.get("scope") else "")
        for one in spec.get("changes") or ()
    ]
    more = int(spec.get("changed") or 0) - CHANGES_SHOWN
    shown = ", ".join(changes[:CHANGES_SHOWN]) + (f", and {more} more" if more > 0 else "")
    return flat(
        f"{number_of(entry):>6}  {spec.get('at', '-')}  {spec.get('actor', '-')}  {spec.get('action', '-')}"
        f"  {shown}".rstrip()
    )
