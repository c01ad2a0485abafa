"""`fleetplane boards exec|run|runs|cancel|preview`: programs on one board or many, and their outcomes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.exits import Exit
from fleetplane.cli.output import Format, emit, flat, format_option
from fleetplane.cli.output import PrintedTable as Columns
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.running.runs import (
    POLICY,
    FleetRun,
    RunVerbs,
    policy_of,
    policy_options,
    target_of,
    target_option,
)
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, cluster_of, number_of
from fleetplane.kernel.errors import Unavailable

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient


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


@click.command("exec", context_settings={"ignore_unknown_options": False})
@click.option("--board", "boards", multiple=True, metavar="BOARD", help="Run on this board; repeatable.")
@click.option("--cluster", metavar="CLUSTER", help="Run on all boards of this cluster.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Run on all boards with this label."
)
@click.option("--all", "everywhere", is_flag=True, help="Run on all boards.")
@click.option("--profile", default="", help="Command profile of the board, where it has several.")
@click.option(
    "--run-for",
    type=DURATION,
    default=30.0,
    show_default="30s",
    help="Time limit, after which the program is terminated.",
)
@click.option("--deliver-by", type=DURATION, help="How long to wait for boards that are not connected.")
@click.option("--detach", is_flag=True, help="Start it, print its id and exit.")
@click.argument("command", nargs=-1, required=True)
@format_option
@board_options
def execute(
    boards: tuple[str, ...],
    cluster: str | None,
    labels: tuple[str, ...],
    everywhere: bool,
    profile: str,
    run_for: float,
    deliver_by: float | None,
    detach: bool,
    command: tuple[str, ...],
    output: Format,
    **where: Any,
) -> None:
    """Run a program on boards, without a shell, and show what it prints.

    What may be run is decided on each board, in its own configuration; nothing is, unless that says so.

        fleetplane boards exec --board attic -- uptime

    With one board, its output is printed as it is, and its exit code is 0, or 1 with the program's own
    on stderr. With several, each line has its board in front, and 7 means that it failed on some.
    """
    with client(where) as server:
        target = {
            "node_ids": [number_of(server, board) for board in boards],
            "cluster_id": cluster_of(server, cluster) if cluster is not None else None,
            "labels": dict(_pair(label) for label in labels),
            "all": everywhere,
        }
        body = {
            "command": command[0],
            "args": list(command[1:]),
            "profile": profile,
            "timeout_seconds": run_for,
            "deliver_within_seconds": deliver_by or 0.0,
            "target": target,
        }
        started = server.call("POST", f"{PREFIX}/exec", body=body)
        if detach:
            click.echo(started["command_id"])
            return
        outcomes = _follow(server, started, output)
    if output is not Format.TABLE:
        emit(output, outcomes, Columns(columns=(), rows=(), empty=""))
    raise click.exceptions.Exit(_verdict(outcomes))


def _pair(label: str) -> tuple[str, str]:
    key, equals, value = label.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--label {label!r}: expected KEY=VALUE")
    return key, value


def _follow(server: RestClient, started: dict[str, Any], output: Format) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = []
    alone = started["count"] == 1
    with server.events("GET", f"{PREFIX}/commands/{started['command_id']}/events") as events:
        for _mark, kind, data in events:
            if kind == "end":
                return outcomes
            outcome = json.loads(data)
            outcomes.append(outcome)
            if output is Format.TABLE:
                _print(outcome, "" if alone else f"[{outcome['node_id']}] ")
    raise Unavailable(
        "the event stream ended before every board had answered",
        hint=f"the command is {started['command_id']}, and goes on",
    )


def _print(outcome: dict[str, Any], before: str) -> None:
    for stream, is_error in (("stdout", False), ("stderr", True)):
        for line in outcome.get(stream, "").splitlines():
            click.echo(before + flat(line), err=is_error)
        if outcome.get(f"{stream}_truncated"):
            click.echo(f"{before}({stream} was longer)", err=True)
    if not outcome["success"]:
        words = outcome["message"] or f"exit code {outcome.get('exit_code')}"
        click.echo(f"fleetplane: board {outcome['node_id']}: {outcome['state']}: {flat(words)}", err=True)


def _verdict(outcomes: list[dict[str, Any]]) -> Exit:
    failed = [outcome for outcome in outcomes if not outcome["success"]]
    if not failed:
        return Exit.OK
    if len(failed) < len(outcomes):
        return Exit.PARTIAL
    states = {outcome["state"] for outcome in failed}
    if states <= {"undeliverable", "expired"}:
        return Exit.UNAVAILABLE
    return Exit.TIMEOUT if states == {"timed_out"} else Exit.FAILURE
