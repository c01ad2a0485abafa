"""`fleetplane instances config status` and `refresh`: the configuration that a server has in force."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Format, format_option
from fleetplane.domains.instances.cli.instances import operator_options, target


@click.command()
@operator_options
@format_option
def status(output: Format, **where: Any) -> None:
    """Show which configuration is in force."""
    from google.protobuf.empty_pb2 import Empty

    from fleetplane.cli.output import Cell, PrintedTable, emit
    from fleetplane.domains.instances.cli import view as instances_view

    with target(**where).operator() as client:
        found = client.call("GetConfigStatus", Empty())
    texts = (found.etag, found.last_modified.ToJsonString(), str(found.size))
    table = PrintedTable(
        columns=("ETAG", "LAST MODIFIED", "BYTES"), rows=[[Cell(text=text) for text in texts]], empty=""
    )
    emit(output, instances_view.plain(found), table)


@click.command()
@operator_options
@format_option
def refresh(output: Format, **where: Any) -> None:
    """Have the configuration read again, and put in force if it is good.

    Exits 0 whether or not it had changed, 2 when it is wrong; then nothing changes, and the first
    problems are shown with their lines; to an operator (--identity-dir) those in its tenant's part.
    """
    from google.protobuf.empty_pb2 import Empty

    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    place = target(**where)
    if place.identity_dir is None:
        with place.admin() as admin:
            done = admin.call("RefreshConfiguration", admin_pb2.RefreshConfigurationRequest())
    else:
        with place.operator() as client:
            done = client.call("RefreshConfig", Empty())
    for warning in getattr(done, "warnings", ()):
        click.echo(f"warning: {warning}", err=True)
    if output is not Format.TABLE:
        emit(output, instances_view.plain(done), None)  # type: ignore[arg-type]
    elif done.updated:
        click.echo(f"updated from {done.prev_etag or 'none'} to {done.etag}")
    else:
        click.echo(f"unchanged, {done.etag}")
