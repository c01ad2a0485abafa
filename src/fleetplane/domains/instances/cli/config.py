"""`fleetplane instances config`: check configuration documents; `status` and `refresh` ask a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import click

from fleetplane.cli.lazy import LazyEntry, LazyGroup


class ConfigVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "refresh": LazyEntry(
            target="fleetplane.domains.instances.cli.config_remote:refresh",
            help="Have a server read it again.",
        ),
        "status": LazyEntry(
            target="fleetplane.domains.instances.cli.config_remote:status",
            help="Which one a server has in force.",
        ),
    }


@click.group(cls=ConfigVerbs)
def config() -> None:
    """Work with configuration documents."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True))
@click.option("--provider", default="", help="The server's setting instances.provider, if it has one.")
def validate(file: Path, provider: str) -> None:
    """Check FILE (- is stdin) and print every problem with its place.

    One problem a line, as file:line:column: path: message. Exits 0 when the document can be used,
    3 when it cannot. What can be used and has no effect is a warning on standard error.
    """
    import sys

    from fleetplane.cli.exits import Exit
    from fleetplane.domains.instances.configuration import ConfigurationInvalid, check
    from fleetplane.domains.instances.configuration.schema import PROVIDERS

    name = "<stdin>" if str(file) == "-" else str(file)
    text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        checked = check(text, name=name, providers=PROVIDERS if provider else None)
    except ConfigurationInvalid as invalid:
        for problem in invalid.problems:
            click.echo(f"{name}:{problem}")
        raise SystemExit(Exit.CONDITION_NOT_MET) from None
    for warning in checked.warnings:
        click.echo(f"warning: {name}:{warning}", err=True)
    configuration = checked.configuration
    groups = [group for tenant in configuration.groups.values() for group in tenant.values()]
    click.echo(
        f"{name}: valid: cluster {configuration.cluster.id}, shard {configuration.shard.id}, "
        f"{_count(len(configuration.templates), 'template')}, {_count(len(groups), 'group')}, "
        f"{_count(sum(group.size or 0 for group in groups), 'instance')}"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
