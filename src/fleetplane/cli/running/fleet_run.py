"""`fleetplane run`: one command on agents of any domain that runs commands, by kind and selector.

The domain that has the kind does the rest, with its own routes, permissions and limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.running.runs import POLICY, policy_options_alone
from fleetplane.domains.declaration import Runner

_WHERE = re.compile(r"\s*(?P<kind>[a-z-]+)(?:\s+where\s+(?P<selector>\S.*))?\s*", re.DOTALL)
_NAMED = re.compile(r"\s*(?P<kind>[a-z-]+)/(?P<name>\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What somebody wants run, and on whom."""

    kind: str
    """As it was written, such as `boards`."""
    names: tuple[str, ...]
    selector: str
    """In the language of every fleet; empty, like `names`, for all agents of the kind."""
    command: tuple[str, ...]
    policy: Mapping[str, Any]
    """The options of `cli.running.runs.policy_options`."""
    tenant: str
    detach: bool
    where: Mapping[str, Any]
    """Which server, as `Place` takes it."""


@click.command("run")
@click.option(
    "--on",
    "targets",
    multiple=True,
    required=True,
    metavar="KIND[/NAME | where SELECTOR]",
    help="On whom: 'boards where role=sensor', edge-nodes, board/attic. Names can be given often.",
)
@policy_options_alone
@click.option("--tenant", default="default", show_default=True, help="Whose agents, where tenants have some.")
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@click.argument("command", nargs=-1, required=True)
@rest_options
def run(targets: tuple[str, ...], tenant: str, detach: bool, command: tuple[str, ...], **rest: Any) -> None:
    """Run a command on boards or edge daemons, and show what comes of it.

    \b
        fleetplane run --on 'boards where role=sensor' --mode rolling=2 -- uname -a
        fleetplane run --on edge-nodes -- uptime
        fleetplane run --on edge-group/web --on-error continue -- systemctl is-active nginx

    The command runs as it stands, without a shell, as far as each agent's own rules allow it. The exit code
    is 7 if it failed on some or was halted, 3 with fewer than --require-min, 8 if none could be reached, 124
    if the time was over everywhere.
    """
    from fleetplane.domains import discovery
    from fleetplane.domains.declaration import load

    chosen = {name: rest.pop(name) for name in POLICY}
    kind, names, selector = parsed(targets)
    runners = [one for domain in discovery.installed().declarations for one in domain.runners]
    runner = runner_of(kind, runners)
    code = load(runner.target)(
        FleetRun(
            kind=kind,
            names=names,
            selector=selector,
            command=command,
            policy=chosen,
            tenant=tenant,
            detach=detach,
            where=rest,
        )
    )
    raise click.exceptions.Exit(code)


def parsed(targets: Sequence[str]) -> tuple[str, tuple[str, ...], str]:
    """The kind, the names and the selector of what stands after `--on`. Pure."""
    named = [_NAMED.fullmatch(one) for one in targets]
    if all(named):
        kinds = {one["kind"] for one in named if one is not None}
        if len(kinds) > 1:
            raise click.UsageError(f"--on names {' and '.join(sorted(kinds))}; a run is for one kind.")
        return kinds.pop(), tuple(one["name"] for one in named if one is not None), ""
    if len(targets) > 1:
        raise click.UsageError("--on is given once, or as KIND/NAME for each.")
    found = _WHERE.fullmatch(targets[0])
    if found is None:
        raise click.UsageError(f"--on {targets[0]!r} is not KIND, KIND/NAME or KIND where SELECTOR.")
    return found["kind"], (), (found["selector"] or "").strip()


def runner_of(kind: str, runners: Sequence[Runner]) -> Runner:
    """Who runs commands on agents of a kind. Pure."""
    for one in runners:
        if kind in one.kinds:
            return one
    known = ", ".join(one.kinds[0] for one in runners)
    raise click.UsageError(f"commands do not run on {kind!r}; there are: {known}.")
