"""`fleetplane backup` and `fleetplane restore`: a checked copy of a data directory, and the way back."""

from __future__ import annotations

from pathlib import Path

import click

from fleetplane.cli.clients.owner_options import config_option, data_dir_option
from fleetplane.cli.progress import working


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
