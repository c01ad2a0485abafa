"""`fleetplane audit`: check, offline, that history is what was written."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def audit() -> None:
    """Work with the audit log."""


@audit.command()
@click.option(
    "--data-dir", type=click.Path(path_type=Path), default=Path("./fleetplane-data"), show_default=True,
    help="The server's data directory; the server may be running.",
)  # fmt: skip
def verify(data_dir: Path) -> None:
    """Recompute the hash chain of the audit log and compare.

    Exits 0 when every entry is as it was written, 3 when one is not.
    """
    import asyncio

    from fleetplane.cli.exits import Exit
    from fleetplane.cli.output import flat
    from fleetplane.kernel.audit import verify_file
    from fleetplane.kernel.errors import NotFound

    database = data_dir / "fleetplane.db"
    if not database.is_file():
        raise NotFound(
            f"there is no database at {database}", hint="name the server's data directory with --data-dir"
        )
    verdict = asyncio.run(verify_file(database))
    click.echo(flat(str(verdict)))
    if not verdict.intact:
        raise click.exceptions.Exit(Exit.CONDITION_NOT_MET)
