"""`fleetplane edge run|runs|cancel|preview|rotate`: tools on many daemons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.cli.exits import Exit
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.running.runs import FleetRun
from fleetplane.domains.edge.cli.edge import PREFIX, client, edge_options
from fleetplane.domains.edge.cli.exits import COMMON, EdgeExit, edge_exits, is_documented

if TYPE_CHECKING:
    from fleetplane.cli.running.run_view import RunDone, ShownEvent

F = TypeVar("F", bound=Callable[..., Any])
ROTATE_TOOL = "edge.rotate_key"
COMMAND_TOOL = "cmd.run"
SECURITY_CONTEXT = "zaru-free"
DEADLINE_SECONDS = 60.0
WHERE = "where:"
"""Before a selector in the language that all domains share."""
NAME_WIDTH = 8
"""Characters of a daemon's id, enough to distinguish daemons."""
STYLES = {"ok": "green", "err": "red", "timed_out": "red", "cancelled": "yellow", "not_started": "dim"}


def policy_options(command: F) -> F:
    """How a run goes through its targets."""
    for option in (
        click.option(
            "--deliver-by",
            type=DURATION,
            help="How long to wait for daemons that are not connected, instead of leaving them out.",
        ),
        click.option(
            "--deadline",
            type=DURATION,
            default=DEADLINE_SECONDS,
            show_default="60s",
            help="Time limit for each daemon.",
        ),
        click.option(
            "--require-min", type=click.IntRange(min=0), default=0, help="Start nothing with fewer targets."
        ),
        click.option(
            "--on-error",
            default="fail-fast",
            show_default=True,
            metavar="fail-fast|continue|stop-after=N",
            help="What to do with the remaining targets after a failure.",
        ),
        click.option(
            "--max-concurrency", type=click.IntRange(min=1), help="Maximum number of targets at once."
        ),
        click.option(
            "--mode",
            default="parallel",
            show_default=True,
            metavar="parallel|sequential|rolling=N",
            help="How targets are started: all at once, one by one or rolling.",
        ),
        click.option("--target", required=True, help="@NODE, group:NAME, all, or a selector."),
    ):
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
@click.option("--tool", default=COMMAND_TOOL, show_default=True, help="Name of the tool.")
@click.option("--arg", "pairs", multiple=True, metavar="KEY=VALUE", help="An argument; a value may be JSON.")
@click.option("--args", "document", help="All arguments, as a JSON object.")
@click.option(
    "--security-context",
    default=SECURITY_CONTEXT,
    show_default=True,
    help="Security context of the daemon to run under.",
)
@click.option("--detach", is_flag=True, help="Start it, print its id and exit.")
@click.argument("command", nargs=-1)
@edge_options
def run(
    target: str,
    tool: str,
    pairs: tuple[str, ...],
    document: str | None,
    security_context: str,
    detach: bool,
    command: tuple[str, ...],
    tenant: str,
    **rest: Any,
) -> None:
    """Run a tool on every daemon that a target means, and show what comes of it.

    A COMMAND after -- is run as it stands, without a shell:

        fleetplane edge run --target tags=prod -- uname -r
    """
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {
        "target": target,
        "tool": tool,
        "args": _arguments(pairs, document, command),
        "security_context_name": security_context,
        "policy": _policy(chosen),
    }
    _go(body, tenant, rest, detach=detach)


@click.command("rotate")
@policy_options
@click.option("--detach", is_flag=True, help="Start it, print its id and exit.")
@edge_options
def rotate(target: str, detach: bool, tenant: str, **rest: Any) -> None:
    """Rotate the keys of daemons. Daemons without support for it fail with that reason."""
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {"target": target, "tool": ROTATE_TOOL, "args": {}, "policy": _policy(chosen)}
    _go(body, tenant, rest, detach=detach)


@edge_exits
def run_fleet(order: FleetRun) -> int:
    """What `fleetplane run` does on edge daemons, and on groups of them."""
    if len(order.names) > 1:
        raise click.UsageError("name one daemon or group, or use a selector: 'edge-nodes where tags=web'.")
    is_group = order.kind.startswith(("edge-group", "eg"))
    if is_group and not order.names:
        raise click.UsageError("name a group: --on edge-group/NAME.")
    if order.names:
        target = f"group:{order.names[0]}" if is_group else f"@{order.names[0]}"
    else:
        target = f"{WHERE}{order.selector}" if order.selector else "all"
    deadline = order.policy["deadline"]
    body = {
        "target": target,
        "tool": COMMAND_TOOL,
        "args": _arguments((), None, order.command),
        "security_context_name": SECURITY_CONTEXT,
        "policy": _policy({**order.policy, "deadline": DEADLINE_SECONDS if deadline is None else deadline}),
    }
    return _gone(body, order.tenant, dict(order.where), detach=order.detach, as_object=True)


def _go(body: dict[str, Any], tenant: str, where: dict[str, Any], *, detach: bool) -> None:
    raise click.exceptions.Exit(_gone(body, tenant, where, detach=detach))


def _gone(
    body: dict[str, Any], tenant: str, where: dict[str, Any], *, detach: bool, as_object: bool = False
) -> int:
    """`as_object`: the id that is printed is the name of the run in the resource API."""
    from fleetplane.cli.running.run_view import watch

    with client(where, tenant) as server:
        started = server.call(
            "POST", f"{PREFIX}/fleet/invoke", body=body, headers={"accept": "application/json"}
        )
        run_id = started["fleet_command_id"]
        if detach:
            click.echo(run_id.replace("-", "") if as_object else run_id)
            return Exit.OK
        ended = watch(
            server,
            f"{PREFIX}/fleet/runs/{run_id}/events",
            shown,
            title=f"run {run_id}",
            fancy=sys.stdout.isatty(),
            name_width=NAME_WIDTH,
        )
    return exit_code(ended, documented=is_documented())


def exit_code(ended: RunDone, *, documented: bool) -> int:
    """The code of a run that has ended; in the common table, one that some did and some did not is 7."""
    found = verdict(ended)
    if documented:
        return found
    if found is EdgeExit.FAILURE and ended.summary["ok"]:
        return Exit.PARTIAL
    return COMMON[found]


def shown(kind: str, data: dict[str, Any]) -> Iterator[ShownEvent]:
    """Events of a run as edge's routes tell them."""
    from fleetplane.cli.running.run_view import RunDone, RunNotice, TargetBegan, TargetDone, TargetPrinted

    match kind:
        case "command_started":
            yield TargetBegan(name=data["node_id"])
        case "command_progress":
            chunk = data["chunk"]
            yield TargetPrinted(
                name=data["node_id"], stdout=str(chunk.get("stdout", "")), stderr=str(chunk.get("stderr", ""))
            )
        case "command_result":
            ((outcome, about),) = data["result"].items()
            yield TargetDone(
                name=data["node_id"],
                outcome=outcome,
                exit_code=about.get("exit_code"),
                words=about.get("message") or about.get("reason") or "",
            )
        case "fleet_result":
            yield RunDone(state=data["outcome"], summary=data["summary"])
        case "error":
            yield RunNotice(message=data["message"])


def verdict(ended: RunDone) -> EdgeExit:
    """What a script should make of how a run ended."""
    match ended.state:
        case "halted":
            return EdgeExit.HALTED
        case "cancelled":
            return EdgeExit.CANCELLED
    summary = ended.summary
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
    """Show which daemons a target selects now, and why others are left out."""
    with client(where, tenant) as server:
        found = server.call("POST", f"{PREFIX}/fleet/preview", body={"target": target})
    rows = [
        *(
            [Cell(text=one["node_id"]), Cell(text=one["name"]), Cell(text="yes", style="green")]
            for one in found["resolved"]
        ),
        *(
            [Cell(text=one["node_id"]), Cell(text=""), Cell(text=f"no: {one['reason']}", style="yellow")]
            for one in found["skipped"]
        ),
    ]
    emit(output, found, PrintedTable(columns=("NODE", "NAME", "MEANT"), rows=rows, empty="nobody"))


@click.command("runs")
@click.argument("run_id", required=False)
@click.option("--tool", help="Only of this tool.")
@click.option(
    "--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Maximum number of rows."
)
@format_option
@edge_options
def runs(run_id: str | None, tool: str | None, limit: int, output: Format, tenant: str, **where: Any) -> None:
    """List runs, newest first; with an id, show the outcome of each daemon."""
    from fleetplane.cli.running.run_view import state_cell

    with client(where, tenant) as server:
        if run_id is not None:
            one = server.call("GET", f"{PREFIX}/fleet/runs/{run_id}")
            emit(output, one, _per_node(one["per_node"]))
            return
        query = {"limit": str(limit)} | ({"tool": tool} if tool else {})
        found = server.call("GET", f"{PREFIX}/fleet/runs", query=query)["items"]
    rows = [
        [
            Cell(text=one["fleet_command_id"]),
            Cell(text=one["tool"]),
            Cell(text=one["started_at"]),
            state_cell(one["outcome"], one["summary"]),
            Cell(text=" ".join(f"{name}={number}" for name, number in one["summary"].items() if number)),
        ]
        for one in found
    ]
    emit(
        output,
        found,
        PrintedTable(columns=("RUN", "TOOL", "STARTED", "OUTCOME", "TARGETS"), rows=rows, empty="no runs"),
    )


def _per_node(found: Sequence[dict[str, Any]]) -> PrintedTable:
    rows = [
        [
            Cell(text=one["node_id"]),
            Cell(text=one["outcome"], style=STYLES.get(one["outcome"], "")),
            Cell(text="" if one["exit_code"] is None else str(one["exit_code"])),
            Cell(text="" if one["duration_ms"] is None else f"{one['duration_ms']} ms"),
            Cell(text=one["message"] or (one["stderr_tail"] or one["stdout_tail"]).strip()[-80:]),
        ]
        for one in found
    ]
    return PrintedTable(
        columns=("NODE", "OUTCOME", "EXIT", "TOOK", "WORDS"), rows=rows, empty="nothing is kept of it"
    )


@click.command("cancel")
@click.argument("run_id")
@edge_options
def cancel(run_id: str, tenant: str, **where: Any) -> None:
    """Cancel a run. Targets already sent are asked to stop; held targets are dropped.

    A daemon of the first generation cannot stop: it finishes, and what it says then is its outcome.
    """
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/fleet/{run_id}/cancel")
    words = "it was over already" if told["already_terminal"] else f"{told['cancelled']} taken back"
    if told["told_to_stop"]:
        words += f", {told['told_to_stop']} told to stop; may finish"
    click.echo(words, err=True)
