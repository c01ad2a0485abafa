"""`fleetplane boards run|runs|cancel|preview`: programs on many boards, in waves."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Format, format_option
from fleetplane.cli.running.fleet_run import FleetRun
from fleetplane.cli.running.runs import POLICY, RunVerbs, policy_of, policy_options, target_of, target_option
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client


@click.command("run")
@policy_options
@click.option("--profile", default="", help="Under which of the board's rules, where it has several.")
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@click.argument("command", nargs=-1, required=True)
@board_options
def run(targets: tuple[str, ...], profile: str, detach: bool, command: tuple[str, ...], **rest: Any) -> None:
    """Run an allowed program on many boards, wave by wave, and show what comes of it.

        fleetplane boards run --target site=attic --mode rolling=2 -- systemctl is-active camera

    A selector has labels, and id, name, role, status, cluster, architecture and model. The exit code is 7
    if it failed on some boards or was halted, 3 with fewer boards than --require-min, 8 if none could be
    reached, 124 if the time was over everywhere.
    """
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {
        "command": command[0],
        "args": list(command[1:]),
        "profile": profile,
        "target": target_of(targets),
        "policy": policy_of(chosen),
    }
    with client(rest) as server:
        code = RunVerbs(server=server, base=PREFIX).start(body, detach=detach)
    raise click.exceptions.Exit(code)


def run_fleet(order: FleetRun) -> int:
    """What `fleetplane run` does on boards."""
    body = {
        "command": order.command[0],
        "args": list(order.command[1:]),
        "profile": "",
        "target": {"names": list(order.names), "selector": order.selector}
        if order.names or order.selector
        else {"all": True},
        "policy": policy_of(dict(order.policy)),
    }
    with client(order.where) as server:
        return RunVerbs(server=server, base=PREFIX).start(body, detach=order.detach)


@click.command("runs")
@click.argument("run_id", required=False)
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="At most so many.")
@format_option
@board_options
def runs(run_id: str | None, limit: int, output: Format, **where: Any) -> None:
    """List runs, newest first; with an id, show what became of each board."""
    with client(where) as server:
        verbs = RunVerbs(server=server, base=PREFIX)
        if run_id is None:
            verbs.list(limit, output)
        else:
            verbs.show(run_id, output)


@click.command("cancel")
@click.argument("run_id")
@board_options
def cancel(run_id: str, **where: Any) -> None:
    """Cancel a run: programs under way are ended, the other boards never get it."""
    with client(where) as server:
        RunVerbs(server=server, base=PREFIX).cancel(run_id)


@click.command("preview")
@target_option
@click.option("--wait", is_flag=True, help="As if boards that are away were waited for.")
@format_option
@board_options
def preview(targets: tuple[str, ...], wait: bool, output: Format, **where: Any) -> None:
    """Show which boards a target means, and which are left out and why."""
    with client(where) as server:
        RunVerbs(server=server, base=PREFIX).preview(targets, wait=wait, output=output)
