"""`fleetplane server`: run the control plane in this process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import click

from fleetplane.cli import exits as streams

NEW_OBJECTS = 20_000
"""More than were let go, before Python looks among the newest for what only refers to itself; its default
of 700 has a server with thousands of connections look through all of them several times a second when much
happens. A full look is due after a hundred times as many, and a quarter more than there are."""


@click.command()
@click.option("--data-dir", metavar="DIR", help="Where state is kept.  [default: ./fleetplane-data]")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings, as TOML.")
@click.option("--only", metavar="DOMAINS", help="Run only these domains, such as gpus; comma-separated.")
@click.option(
    "--ready-file", metavar="FILE", help="Write version, pid and addresses here once all listeners accept."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How events are logged.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What is logged.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other setting, such as gpus.lease_seconds=20.",
)
def server(
    data_dir: str | None,
    config: Path | None,
    only: str | None,
    ready_file: str | None,
    log_format: str | None,
    log_level: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Run the control plane until SIGTERM.

    Without options it starts everything on loopback, keeps its state in ./fleetplane-data, and
    says where to go. Settings come from the file, then FLEETPLANE_* variables, then flags; the
    later wins.
    """
    from fleetplane import logs, settings

    if only is not None and not only.strip(", "):  # an empty variable must not mean everything
        raise click.BadParameter("names no domain", param_hint="--only")
    named = {
        "data_dir": data_dir,
        "only": only,
        "ready_file": ready_file,
        "log.format": log_format,
        "log.level": log_level,
    }
    given = {key: value for key, value in named.items() if value is not None}
    loaded = settings.load(config=config, flags={**settings.assignments(assignments), **given})
    logs.configure(level=loaded.log.level, log_format=loaded.log.format)

    # A second of work: whoever made a mistake is told before.
    import uvloop

    from fleetplane.server.root import serve

    uvloop.run(serve(loaded, announce=_announce))


def _announce(addresses: dict[str, list[str]], notices: Sequence[str]) -> None:
    """Print the addresses for a person at a terminal; a closed terminal does not stop the server."""
    _calm_collector()
    try:
        _say_where_to_go(addresses, notices)
    except OSError:
        streams.silence_stdout()


def _calm_collector() -> None:
    """Everything has come up: what is there now stays, and need not be looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 10, 10)


def _say_where_to_go(addresses: dict[str, list[str]], notices: Sequence[str]) -> None:
    click.echo("Fleetplane is ready.")
    for name, places in addresses.items():
        for place in places:
            click.echo(f"  {name:12} {place}")
    attempts = []
    if device := next(iter(addresses.get("device-api", [])), None):
        attempts += [
            f"fleetplane gpus {verb} --address {device.removeprefix('http://')}" for verb in ("list", "watch")
        ]
    if web := next(iter(addresses.get("web", [])), None):
        attempts.append(f"curl {web}/metrics")
    if attempts:
        click.echo("\nTry, in another terminal:\n" + "\n".join(f"  {one}" for one in attempts))
    if notices:
        click.echo("\n" + "\n".join(notices))
