"""`fleetplane audit`: read history, and check that it is what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from fleetplane.cli.clients.owner_options import config_option, context_option, data_dir_option
from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.progress import working

if TYPE_CHECKING:
    from fleetplane.client.places import Place

VERIFY_PATH = "/v1/fleet/audit/verify"
VERIFY_SECONDS = 600.0
"""A log of some million entries is read and hashed in that time."""


class AuditVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "list": LazyEntry(
            target="fleetplane.cli.resources.audit:list_entries", help="Show or follow who changed what."
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
