"""`fleetplane backup`, `restore`, `migrate`, `store` and `servers`: the owner's verbs about the database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option, working
from fleetplane.cli.parameters import config_option, data_dir_option


@click.command()
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@data_dir_option
@config_option
@click.option("--with-telemetry", is_flag=True, help="Measurements and log lines, too.")
@click.option(
    "--with-key", is_flag=True, help="The master key, too: whoever has the file then has every secret."
)
def backup(
    target: Path, data_dir: Path | None, config: Path | None, with_telemetry: bool, with_key: bool
) -> None:
    """Write a consistent copy to FILE, a tar; the server may be running.

    The copy is checked before it gets its name: that the database is whole, that its audit log is intact
    under the master key, and that every byte can be read back. Keep the master key elsewhere.
    """
    from fleetplane.server.backups import BackupContents, make
    from fleetplane.server.offline import DataDirectory

    place = DataDirectory.of(data_dir, config)
    with working(f"writing and checking {target}"):
        made = make(place, target, BackupContents(telemetry=with_telemetry, key=with_key))
    click.echo(f"{target}: revision {made.revision}, {len(made.files)} files, verified")


@click.command()
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@data_dir_option
@config_option
@click.option("--replace", is_flag=True, help="Move what is there aside.")
@click.option(
    "--unauthenticated",
    is_flag=True,
    help="Accept a backup of an older release, which anybody who could write to the file may have edited.",
)
def restore(
    source: Path, data_dir: Path | None, config: Path | None, replace: bool, unauthenticated: bool
) -> None:
    """Put a backup into the data directory of a stopped server.

    Checked like a backup, before anything is touched: that its manifest was written under this master key,
    and that every file is the one that the manifest names. The master key is the one of the settings or the
    data directory, else the one in the backup. What is restored begins a new lineage: everybody who watched
    the lost one is told to list again, and the audit log says who restored what.
    """
    from fleetplane.server import backups
    from fleetplane.server.offline import DataDirectory, owner

    place = DataDirectory.of(data_dir, config)
    with working(f"checking and restoring {source}"):
        done = backups.restore(source, place, replace=replace, actor=owner(), unauthenticated=unauthenticated)
    for note in done.verdict.notes:
        click.echo(f"note: {note}", err=True)
    if done.note:
        click.echo(f"note: {done.note}", err=True)
    if done.aside is not None:
        click.echo(f"what was there before is in {done.aside}", err=True)
    click.echo(f"{place.path}: restored revision {done.manifest.revision}, as the beginning of a new lineage")


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
