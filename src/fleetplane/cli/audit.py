"""`fleetplane audit`: list who did what, follow it with `-f`, and verify that the log is what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import flat, say, working
from fleetplane.cli.parameters import config_option, context_option, data_dir_option
from fleetplane.cli.resources.show import OutputForm, emit_data, form_option, safe_json
from fleetplane.kernel.errors import IntegrityError

if TYPE_CHECKING:
    from fleetplane.client.places import Place
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


VERIFY_PATH = "/v1/fleet/audit/verify"
VERIFY_SECONDS = 600.0
"""A log of some million entries is read and hashed in that time."""


class AuditVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "list": LazyEntry(
            target="fleetplane.cli.audit:list_entries", help="Show or follow who changed what."
        ),
    }


@click.group(cls=AuditVerbs)
def audit() -> None:
    """Work with the audit log."""


@audit.command()
@config_option
@rest_options
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Checkpoints that were kept elsewhere: a file of lines, or a folder of such. May be repeated.",
)
@click.option(
    "--archive",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where archived entries are, on the server's machine.  [default: audit in the data directory]",
)
@click.option(
    "--archived-elsewhere",
    is_flag=True,
    help="Begin after the archived entries, on the word of the signed checkpoint at the cut.",
)
def verify(
    config: Path | None,
    anchors: tuple[Path, ...],
    archive: Path | None,
    archived_elsewhere: bool,
    **where: Any,
) -> None:
    """Recompute the chain of the audit log under the server's key and compare; the server may be running.

    Every entry, archived ones included, must be as it was written, and what the database holds must be what
    the entries say, secrets included. With checkpoints that were kept elsewhere this also finds a past
    that was rewritten, cut or replaced by somebody who had the server and its keys.

    On the server's machine its files are read, also if it is stopped. A server elsewhere checks itself: that
    is its own word.

    Exits 0 when everything is as it was written, 3 when something is not.
    """
    from fleetplane.cli.exits import Exit
    from fleetplane.cli.output import flat
    from fleetplane.client.places import Place

    place = Place(**where)
    if config is None and _is_elsewhere(place):
        if archive is not None:
            raise click.UsageError("--archive names files of the server's machine; verify there with it.")
        intact, told, notes = _verified_elsewhere(place, _lines(anchors), archived_elsewhere)
    else:
        from fleetplane.server.offline import DataDirectory

        folder = DataDirectory.of(_here(place.data_dir, config, place.context), config)
        with working("verifying the audit log"):
            verdict = folder.verified(
                _lines(anchors), archives=archive, archives_are_elsewhere=archived_elsewhere
            )
        intact, told, notes = verdict.intact, str(verdict), verdict.notes
    for note in notes:
        click.echo(flat(f"note: {note}"), err=True)
    click.echo(flat(told))
    if not intact:
        raise click.exceptions.Exit(Exit.CONDITION_NOT_MET)


def _is_elsewhere(place: Place) -> bool:
    """Whether another machine's server is meant; a token alone does not mean one."""
    from fleetplane import environment
    from fleetplane.client.places import completed, context_of

    variables = environment.current()
    place = completed(place, variables)
    context = context_of(place, variables)
    return bool(place.server) or (context is not None and not context.is_local)


def _verified_elsewhere(
    place: Place, anchors: Sequence[bytes], archived_elsewhere: bool
) -> tuple[bool, str, Sequence[str]]:
    """What a server that is elsewhere says of its own log."""
    body = {
        "anchors": [one.decode("utf-8", "replace") for one in anchors],
        "archived_elsewhere": archived_elsewhere,
    }
    with connect(place) as server:
        told = server.call("POST", VERIFY_PATH, body=body, timeout_seconds=VERIFY_SECONDS)
    return bool(told["intact"]), str(told["message"]), told["notes"]


def _here(data_dir: Path | None, config: Path | None, context: str) -> Path | None:
    """The data directory that is meant, by the rules of every verb; files elsewhere cannot be verified."""
    from fleetplane.client.places import Place, owner_directory

    if config is not None:
        return data_dir
    return owner_directory(Place(context=context, data_dir=data_dir))


def _lines(places: tuple[Path, ...]) -> list[bytes]:
    """Checkpoints that were kept in files, a line each."""
    files = [
        file for place in places for file in (sorted(place.rglob("*.json*")) if place.is_dir() else [place])
    ]
    return [line for file in files for line in file.read_bytes().splitlines() if line.strip()]


@audit.command("public-key")
@data_dir_option
@config_option
@context_option
def public_key(data_dir: Path | None, config: Path | None, context: str) -> None:
    """Print the public half of the key that signs checkpoints: Ed25519, in hexadecimal."""
    from fleetplane.server.offline import DataDirectory

    click.echo(DataDirectory.of(_here(data_dir, config, context), config).keys.checkpoints().public.hex())
