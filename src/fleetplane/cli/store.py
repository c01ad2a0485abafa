"""`fleetplane store`, `migrate` and `servers`: what the owner decides and asks about a server's database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from fleetplane.cli.clients.owner_options import config_option, data_dir_option
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.progress import working

COLUMNS = (
    *("NAME", "STATE", "TERM", "VERSION", "LEVEL", "BOOT"),
    *("RENEWED", "LAG", "AGENTS", "CONTROLLERS", "BUS"),
)
STYLES = {"active": "green", "gone": "red"}


@click.group()
def store() -> None:
    """Work with the database of a server that is stopped."""


@store.command("accept-loss")
@data_dir_option
@config_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def accept_loss(data_dir: Path | None, config: Path | None, yes: bool) -> None:
    """Accept a database that has lost acknowledged writes.

    The server refuses such a database. This accepts the loss in so many words: what is there becomes
    the beginning of a new lineage, which stands in the audit log. Everybody who watched the old one is
    told to list again.
    """
    from fleetplane.kernel.store.settings import place as place_of
    from fleetplane.server.offline import DataDirectory, bring_up_to_date, owner

    place = DataDirectory.of(data_dir, config)
    if not yes:
        where = place_of(place.url) if place.url else place.database
        click.confirm(
            f"What {where} has lost was acknowledged and will never come back. Accept that?",
            abort=True,
            err=True,
        )
    place.check_database()
    if not place.url:
        with place.stopped():
            bring_up_to_date(place.database)
    loss = place.accept_loss(actor=owner())
    click.echo(f"accepted: revisions after {loss.revision} up to {loss.acknowledged} are lost")


@click.command()
@click.option("--from", "source", type=click.Choice(["sqlite"]), required=True, help="Where the data is.")
@click.option("--to", "target", type=click.Choice(["postgresql"]), required=True, help="Where it goes.")
@data_dir_option
@config_option
@click.option("--without-telemetry", is_flag=True, help="Leave measurements and log lines where they are.")
def migrate(
    source: str, target: str, data_dir: Path | None, config: Path | None, without_telemetry: bool
) -> None:
    """Move the data of a stopped server to PostgreSQL.

    The settings name the empty database, `[store] url`. The file is checked as for a backup, copied in one
    transaction and compared; then it is set aside. Lineage, revisions, secrets and the audit log stay the
    same: watches resume, and agents notice nothing but the pause. Measurements and log lines follow in
    batches, those that are still kept. Interrupted, it can be repeated.
    """
    del source, target  # the only ones that there are
    from fleetplane.server.migration import migrate as move
    from fleetplane.server.offline import DataDirectory

    place = DataDirectory.of(data_dir, config)
    with working("checking, copying and comparing the data"):
        done = move(place, with_telemetry=not without_telemetry)
    click.echo(f"the file is now {done.aside}", err=True)
    click.echo(f"migrated: revision {done.revision} of lineage {done.lineage}, {done.rows} rows")
    if done.measured:
        click.echo(f"migrated: {done.measured} measurements and log lines")


def _bus(kind: str, connected: bool) -> Cell:
    if kind == "none":
        return Cell(text="-")
    return Cell(text=kind) if connected else Cell(text=f"{kind}, away", style="yellow")


def _level(current: int, supported: int) -> str:
    return str(current) if current == supported else f"{current} of {supported}"


@click.command()
@data_dir_option
@config_option
@format_option
def servers(data_dir: Path | None, config: Path | None, output: Format) -> None:
    """List the servers that share a PostgreSQL database.

    Asks the database that the settings name, so that it works while no server does. TERM counts the active
    servers that there were; LEVEL is what may be written now, and of which level that a server's release
    supports; RENEWED is how long ago a server was heard of; LAG is how many groups of changes a standby had
    not applied then. AGENTS, CONTROLLERS and BUS are what it said of itself within the last seconds: streams
    of agents, controllers that it runs for all servers, and how it hears of writes.
    """
    from fleetplane.kernel.errors import SettingsError
    from fleetplane.kernel.store.engines.postgres_servers import seen
    from fleetplane.server.offline import DataDirectory

    url = DataDirectory.of(data_dir, config).settings.store.url
    if not url:
        raise SettingsError(
            "store.url: is empty: the store is a file, which one server uses alone", field="store.url"
        )
    found = asyncio.run(seen(url))
    data = [
        {
            "name": one.name,
            "state": one.state.value,
            "term": one.term,
            "version": one.version,
            "level": one.level,
            "supported_level": one.supported_level,
            "boot": one.boot,
            "renewed_seconds_ago": None if one.silent_seconds is None else round(one.silent_seconds, 1),
            "lag_groups": one.lag_groups,
            "agents": one.agents,
            "controllers": one.controllers,
            "bus": one.bus.kind.value,
            "bus_connected": one.bus.connected,
        }
        for one in found
    ]
    rows = [
        [
            Cell(text=one.name),
            Cell(text=one.state.value, style=STYLES.get(one.state.value, "")),
            Cell(text=str(one.term or "-")),
            Cell(text=one.version),
            Cell(text=_level(one.level, one.supported_level)),
            Cell(text=str(one.boot)),
            Cell(text="left" if one.silent_seconds is None else f"{one.silent_seconds:.0f}s ago"),
            Cell(text=str(one.lag_groups)),
            Cell(text=str(one.agents)),
            Cell(text=str(one.controllers)),
            _bus(one.bus.kind.value, one.bus.connected),
        ]
        for one in found
    ]
    emit(output, data, PrintedTable(columns=COLUMNS, rows=rows, empty="no server has used this database yet"))
