"""`fleetplane edge run|runs|cancel|preview|rotate`: tools on many daemons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from fleetplane.cli.edge import PREFIX, client, edge_options
from fleetplane.cli.edge_exits import EdgeExit
from fleetplane.cli.output import Cell, Format, Table, emit, format_option
from fleetplane.cli.parameters import DURATION

F = TypeVar("F", bound=Callable[..., Any])
ROTATE_TOOL = "edge.rotate_key"
STYLES = {"ok": "green", "err": "red", "timed_out": "red", "cancelled": "yellow", "not_started": "dim"}


def policy_options(command: F) -> F:
    """How a run goes through its targets."""
    for option in (
        click.option(
            "--deliver-by", type=DURATION,
            help="Wait this long for daemons that are away, instead of leaving them out.",
        ),
        click.option("--deadline", type=DURATION, default=60.0, show_default="60s", help="For each daemon."),
        click.option(
            "--require-min", type=click.IntRange(min=0), default=0, help="Start nothing with fewer targets."
        ),
        click.option(
            "--on-error", default="fail-fast", show_default=True, metavar="fail-fast|continue|stop-after=N",
            help="What a failure means for the rest.",
        ),
        click.option("--max-concurrency", type=click.IntRange(min=1), help="At once, at most."),
        click.option(
            "--mode", default="parallel", show_default=True, metavar="parallel|sequential|rolling=N",
            help="In which order.",
        ),
        click.option("--target", required=True, help="@NODE, group:NAME, all, or a selector."),
    ):  # fmt: skip
        command = option(command)
    return command


def _policy(chosen: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": chosen["mode"],
        "max_concurrency": chosen["max_concurrency"],
        "failure_policy": chosen["on_error"],
        "require_min_targets": chosen["require_min"],
        "per_target_deadline_secs": chosen["deadline"],
        "durable": chosen["deliver_by"] is not None,
        "deliver_by_secs": chosen["deliver_by"],
    }


POLICY = ("mode", "max_concurrency", "on_error", "require_min", "deadline", "deliver_by")


@click.command("run")
@policy_options
@click.option("--tool", default="cmd.run", show_default=True, help="What to run.")
@click.option("--arg", "pairs", multiple=True, metavar="KEY=VALUE", help="An argument; a value may be JSON.")
@click.option("--args", "document", help="All arguments, as a JSON object.")
@click.option("--security-context", default="zaru-free", show_default=True, help="Under which rules it runs.")
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@click.argument("command", nargs=-1)
@edge_options
def run(
    target: str, tool: str, pairs: tuple[str, ...], document: str | None, security_context: str,
    detach: bool, command: tuple[str, ...], tenant: str, **rest: Any,
) -> None:  # fmt: skip
    """Run a tool on every daemon that a target means, and show what comes of it.

    A COMMAND after -- is run as it stands, without a shell:

        fleetplane edge run --target tags=prod -- uname -r
    """
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {
        "target": target, "tool": tool, "args": _arguments(pairs, document, command),
        "security_context_name": security_context, "policy": _policy(chosen),
    }  # fmt: skip
    _go(body, tenant, rest, detach=detach)


@click.command("rotate")
@policy_options
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@edge_options
def rotate(target: str, detach: bool, tenant: str, **rest: Any) -> None:
    """Have daemons replace their keys. Daemons that do not know how say so."""
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {"target": target, "tool": ROTATE_TOOL, "args": {}, "policy": _policy(chosen)}
    _go(body, tenant, rest, detach=detach)


def _go(body: dict[str, Any], tenant: str, where: dict[str, Any], *, detach: bool) -> None:
    from fleetplane.cli.edge_grid import watch

    with client(where, tenant) as server:
        started = server.call(
            "POST", f"{PREFIX}/fleet/invoke", body=body, headers={"accept": "application/json"}
        )
        run_id = started["fleet_command_id"]
        if detach:
            click.echo(run_id)
            return
        ended = watch(server, run_id, fancy=sys.stdout.isatty())
    raise click.exceptions.Exit(verdict(ended))


def verdict(ended: dict[str, Any]) -> EdgeExit:
    """What a script should make of how a run ended."""
    match ended["outcome"]:
        case "halted":
            return EdgeExit.HALTED
        case "cancelled":
            return EdgeExit.CANCELLED
    summary = ended["summary"]
    if summary["err"] or summary["not_started"] or summary["cancelled"]:
        return EdgeExit.FAILURE
    return EdgeExit.DEADLINE if summary["timed_out"] else EdgeExit.OK


def _arguments(pairs: Sequence[str], document: str | None, command: Sequence[str]) -> dict[str, Any]:
    try:
        found = json.loads(document) if document else {}
    except ValueError as error:
        raise click.UsageError(f"--args is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError("--args must be a JSON object")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--arg {pair!r}: expected KEY=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    if command:
        found |= {"command": command[0], "args": list(command[1:])}
    return found


@click.command("preview")
@click.option("--target", required=True, help="@NODE, group:NAME, all, or a selector.")
@format_option
@edge_options
def preview(target: str, output: Format, tenant: str, **where: Any) -> None:
    """Whom a target means just now, and who is left out and why."""
    with client(where, tenant) as server:
        found = server.call("POST", f"{PREFIX}/fleet/preview", body={"target": target})
    rows = [
        *([Cell(text=one["node_id"]), Cell(text=one["name"]), Cell(text="yes", style="green")]
          for one in found["resolved"]),
        *([Cell(text=one["node_id"]), Cell(text=""), Cell(text=f"no: {one['reason']}", style="yellow")]
          for one in found["skipped"]),
    ]  # fmt: skip
    emit(output, found, Table(columns=("NODE", "NAME", "MEANT"), rows=rows, empty="nobody"))


@click.command("runs")
@click.argument("run_id", required=False)
@click.option("--tool", help="Only of this tool.")
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="At most so many.")
@format_option
@edge_options
def runs(run_id: str | None, tool: str | None, limit: int, output: Format, tenant: str, **where: Any) -> None:
    """Runs so far, newest first; with an id, what became of each daemon."""
    with client(where, tenant) as server:
        if run_id is not None:
            one = server.call("GET", f"{PREFIX}/fleet/runs/{run_id}")
            emit(output, one, _per_node(one["per_node"]))
            return
        query = {"limit": str(limit)} | ({"tool": tool} if tool else {})
        found = server.call("GET", f"{PREFIX}/fleet/runs", query=query)["items"]
    rows = [
        [
            Cell(text=one["fleet_command_id"]), Cell(text=one["tool"]), Cell(text=one["started_at"]),
            Cell(text=one["outcome"]),
            Cell(text=" ".join(f"{name}={number}" for name, number in one["summary"].items() if number)),
        ]
        for one in found
    ]  # fmt: skip
    emit(
        output,
        found,
        Table(columns=("RUN", "TOOL", "STARTED", "OUTCOME", "TARGETS"), rows=rows, empty="no runs"),
    )


def _per_node(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            Cell(text=one["node_id"]), Cell(text=one["outcome"], style=STYLES.get(one["outcome"], "")),
            Cell(text="" if one["exit_code"] is None else str(one["exit_code"])),
            Cell(text="" if one["duration_ms"] is None else f"{one['duration_ms']} ms"),
            Cell(text=one["message"] or (one["stderr_tail"] or one["stdout_tail"]).strip()[-80:]),
        ]
        for one in found
    ]  # fmt: skip
    return Table(
        columns=("NODE", "OUTCOME", "EXIT", "TOOK", "WORDS"), rows=rows, empty="nothing is kept of it"
    )


@click.command("cancel")
@click.argument("run_id")
@edge_options
def cancel(run_id: str, tenant: str, **where: Any) -> None:
    """Take a run back: those who have it are told, the rest never get it."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/fleet/{run_id}/cancel")
    words = "it was over already" if told["already_terminal"] else f"{told['cancelled']} taken back"
    click.echo(words, err=True)
