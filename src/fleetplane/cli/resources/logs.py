"""`fleetplane logs`: what an object of any kind writes down, then and now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import flat, say
from fleetplane.cli.resources.kinds import Kinds, complete_targets, named_target, scope_of, scope_options
from fleetplane.cli.resources.show import safe_json
from fleetplane.kernel.errors import Unavailable

if TYPE_CHECKING:
    from fleetplane.client.sync import Resources
    from fleetplane.client.watches import LogLine

TAIL, TAIL_MOST = 100, 10_000
AGAIN_SECONDS = 2.0


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND/NAME", shell_complete=complete_targets)
@click.option("-f", "--follow", is_flag=True, help="Go on with lines as they come.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, TAIL_MOST),
    default=TAIL,
    show_default=True,
    help="Number of earlier lines to begin with.",
)
@click.option("--level", default="", help="Minimum severity, as the object's log names it.")
@click.option("--source", default="", help="Only of this unit, file or target; of a proxy: access, agent.")
@click.option("--contains", default="", help="Only lines with this text, ignoring case.")
@scope_options
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one object a line.",
)
@rest_options
def logs(
    what: tuple[str, ...],
    follow: bool,
    tail: int,
    level: str,
    source: str,
    contains: str,
    scope: str,
    tenant: str,
    all_scopes: bool,
    output: str,
    **where: Any,
) -> None:
    """Read or follow the log of an object.

    \b
    fleetplane logs -f board/attic          the board's journal, kernel and agent
    fleetplane logs proxy-agent/web-1       requests, and what NGINX complains about
    fleetplane logs group/workers           errors of a group and its instances
    fleetplane logs -f run/ID               what a run's targets print
    """
    from fleetplane.cli.resources.get import connected

    kind, name = named_target(what)
    with connected(where) as fleet:
        resource = Kinds(fleet).named(kind)
        if "logs" not in resource.get("verbs", ()):
            known = ", ".join(
                str(one["name"]) for one in Kinds(fleet).all() if "logs" in one.get("verbs", ())
            )
            raise click.UsageError(f"{resource['plural']} have no logs here; there are logs of: {known}.")
        resources = fleet.resource(str(resource["plural"]))
        asked = {
            "scope": scope_of(fleet, scope, tenant, all_scopes),
            "level": level,
            "source": source,
            "contains": contains,
        }
        for line in (
            followed(resources, name, asked, tail=tail)
            if follow
            else resources.logs(name, tail=tail, **asked)
        ):
            if line.dropped:
                say(f"({line.dropped} lines are missing: the reader was too slow)")
            click.echo(text_of(line) if output == "text" else safe_json(told(line)))


def followed(resources: Resources, name: str, asked: Mapping[str, str], *, tail: int) -> Iterator[LogLine]:
    """Lines as they come, over any number of connections; the first must succeed."""
    is_open = False
    while True:
        try:
            for line in resources.logs(name, follow=True, tail=0 if is_open else tail, **asked):
                is_open = True
                yield line
            return
        except (Unavailable, TimeoutError) as error:
            if not is_open:
                raise
            say(f"{error}; again in {AGAIN_SECONDS:g} s")
            time.sleep(AGAIN_SECONDS)


def text_of(line: LogLine) -> str:
    """One line for people. Pure."""
    level = f" {line.level:<7}" if line.level else ""
    return flat(f"{line.at}{level} {line.source}: {line.message}".strip())


def told(line: LogLine) -> dict[str, Any]:
    """One line for programs. Pure."""
    found = {"at": line.at, "level": line.level, "source": line.source, "message": line.message}
    return {**found, "dropped": line.dropped} if line.dropped else found
