"""`fleetplane boards exec`: allowed programs on boards, and what came of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.exits import Exit
from fleetplane.cli.output import Format, emit, flat, format_option
from fleetplane.cli.output import PrintedTable as Columns
from fleetplane.cli.parameters import DURATION
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, cluster_of, number_of
from fleetplane.kernel.errors import Unavailable

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient


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
