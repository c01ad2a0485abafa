"""`fleetplane boards provision|operation`: k3s on boards, rehearsed, done, followed and undone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.exits import CommandFailed, Exit
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, flat, format_option
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, cluster_of, number_of, pages

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

STYLES = {"ready": "green", "failed": "red", "cancelled": "yellow", "rolled_back": "green"}
GOOD = ("ready", "rolled_back")
"""How an operation that did what was asked for ends."""


@click.command()
@click.argument("board")
@click.option("--cluster", metavar="CLUSTER", help="Cluster that the board becomes part of.")
@click.option(
    "--role",
    type=click.Choice(["master", "worker"]),
    help="Role in the cluster. Default: the board's recorded role.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="BOARD",
    help="Board that joins as a worker afterwards; repeatable.",
)
@click.option("--version", "k3s_version", default="", help="Version of k3s, such as v1.31.4+k3s1.")
@click.option("--channel", default="", help="Release channel of k3s, such as stable.")
@click.option(
    "--k3s",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of k3s as NAME=VALUE, such as tls_san.",
)
@click.option("--credential", default="", help="Name of the SSH credential. Default: `default`.")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="[BOARD=]ADDRESS",
    help="Confirm a board's SSH address, where only the board itself has reported it; repeatable.",
)
@click.option(
    "--request-id", default="", help="Idempotency key: the same one resumes the operation where it failed."
)
@click.option("--check", is_flag=True, help="Check whether the board can be provisioned, and change nothing.")
@click.option("--undo", is_flag=True, help="Uninstall instead.")
@click.option("--dry-run", is_flag=True, help="Print the exact commands; connect to no board.")
@click.option("--detach", is_flag=True, help="Start it, print its id and exit.")
@format_option
@board_options
def provision(board: str, check: bool, undo: bool, detach: bool, output: Format, **rest: Any) -> None:
    """Install k3s on a board over SSH, and follow it.

    Boards are looked at first: architecture, memory, disk, clock, and the memory cgroup, which is
    turned on where it is missing. What fails stands still at the step that failed; the same
    --request-id, or `operation resume`, goes on there.
    """
    if check and undo:
        raise click.UsageError("--check and --undo exclude each other")
    names = (
        "cluster",
        "role",
        "workers",
        "k3s_version",
        "channel",
        "settings",
        "credential",
        "request_id",
        "dry_run",
        "addresses",
    )
    chosen = {name: rest.pop(name) for name in names}
    with client(rest) as server:
        path, body = _order(server, board, chosen, check=check, undo=undo)
        told = server.call("POST", f"{PREFIX}{path}", body=body)
        if chosen["dry_run"]:
            _print_plan(told, output)
        elif detach:
            click.echo(told["operation_id"])
        else:
            _follow(server, told["operation_id"])


def _order(
    server: RestClient, board: str, chosen: dict[str, Any], *, check: bool, undo: bool
) -> tuple[str, dict[str, Any]]:
    number = number_of(server, board)
    config = _settings(chosen["settings"])
    config |= {
        name: chosen[key] for name, key in (("version", "k3s_version"), ("channel", "channel")) if chosen[key]
    }
    body: dict[str, Any] = {
        "credential": chosen["credential"],
        "request_id": chosen["request_id"],
        "dry_run": chosen["dry_run"],
        "k3s_config": config,
    }
    if chosen["addresses"]:
        body["addresses"] = _addresses(server, number, chosen["addresses"])
    if check or undo:
        return f"/nodes/{number}/{'check' if check else 'deprovision'}", body
    cluster = cluster_of(server, chosen["cluster"]) if chosen["cluster"] is not None else None
    workers = [number_of(server, worker) for worker in chosen["workers"]]
    if not workers:
        return f"/nodes/{number}/provision", {**body, "role": chosen["role"], "cluster_id": cluster}
    if cluster is None:
        raise click.UsageError("--worker needs --cluster, the cluster that all boards belong to")
    if chosen["role"] == "worker":
        return f"/clusters/{cluster}/scale", {**body, "worker_node_ids": [number, *workers]}
    return f"/clusters/{cluster}/provision", {**body, "master_node_id": number, "worker_node_ids": workers}


def _addresses(server: RestClient, board: int, given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, address = text.partition("=")
        number = number_of(server, name) if equals else board
        found[str(number)] = address if equals else text
    return found


def _settings(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--k3s {pair!r}: expected NAME=VALUE")
        found[name] = value
    return found


def _print_plan(told: dict[str, Any], output: Format) -> None:
    if output is not Format.TABLE:
        emit(output, told, PrintedTable(columns=(), rows=(), empty=""))
        return
    for step in told["steps"]:
        click.echo(f"# board {step['node_id']}: {step['name']}")
        if step["message"]:
            click.echo(step["message"])
    click.echo("Nothing was done: this is the plan.", err=True)


def _follow(server: RestClient, operation: str) -> None:
    """Print what it prints; raise if it does not end well."""
    click.echo(f"operation {operation}; it goes on if you stop watching", err=True)
    with server.events("GET", f"{PREFIX}/operations/{operation}/log") as events:
        ended: dict[str, Any] | None = None
        for _mark, kind, data in events:
            told = json.loads(data)
            if kind == "end":
                ended = told
                break
            click.echo(flat(told["text"]))
    if ended is None or not ended["finished"]:
        raise CommandFailed(
            Exit.UNAVAILABLE,
            "the event stream ended before the operation was over",
            hint=f"`fleetplane boards operation log {operation}` goes on",
        )
    if ended["state"] not in GOOD:
        hint = f"`fleetplane boards operation resume {operation}` goes on there"
        raise CommandFailed(
            Exit.FAILURE, f"{ended['state']}: {ended['reason'] or 'no reason was given'}", hint=hint
        )
    click.echo(ended["state"], err=True)


@click.group()
def operation() -> None:
    """List, follow, cancel and resume provisioning operations."""


@operation.command("list")
@click.option("--board", help="Only with this board.")
@format_option
@board_options
def list_operations(board: str | None, output: Format, **where: Any) -> None:
    """Operations, newest first."""
    with client(where) as server:
        query = [] if board is None else [("node_id", str(number_of(server, board)))]
        found = list(pages(server, "/operations", query=query))
    rows = [
        [
            Cell(text=one["id"]),
            Cell(text=one["action"]),
            Cell(text=one["state"], style=STYLES.get(one["state"], "")),
            Cell(text=",".join(str(number) for number in one["node_ids"])),
            Cell(text=one["created_at"]),
            Cell(text=one["reason"]),
        ]
        for one in found
    ]
    columns = ("ID", "ACTION", "STATE", "BOARDS", "SINCE", "REASON")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no operations"))


@operation.command("show")
@click.argument("operation_id")
@format_option
@board_options
def show(operation_id: str, output: Format, **where: Any) -> None:
    """Show the steps of an operation."""
    with client(where) as server:
        found = server.call("GET", f"{PREFIX}/operations/{operation_id}")["data"]
    rows = [
        [
            Cell(text=str(step["node_id"])),
            Cell(text=step["name"]),
            Cell(text=step["state"], style=STYLES.get(step["state"], "")),
            Cell(text=step["message"]),
        ]
        for step in found["steps"]
    ]
    click.echo(f"{found['action']}: {found['state']} {found['reason']}".strip(), err=True)
    emit(
        output, found, PrintedTable(columns=("BOARD", "STEP", "STATE", "WORDS"), rows=rows, empty="no steps")
    )


@operation.command("log")
@click.argument("operation_id")
@board_options
def log(operation_id: str, **where: Any) -> None:
    """Follow the output of an operation until it ends."""
    with client(where) as server:
        _follow(server, operation_id)


@operation.command("cancel")
@click.argument("operation_id")
@board_options
def cancel(operation_id: str, **where: Any) -> None:
    """Cancel an operation; its present step is interrupted."""
    with client(where) as server:
        told = server.call("POST", f"{PREFIX}/operations/{operation_id}/cancel")
    click.echo(f"{told['state']}: {told['message']}", err=True)


@operation.command("resume")
@click.argument("operation_id")
@click.option("--detach", is_flag=True, help="Start it and exit.")
@board_options
def resume(operation_id: str, detach: bool, **where: Any) -> None:
    """Resume an operation at the failed step, and follow it."""
    with client(where) as server:
        told = server.call("POST", f"{PREFIX}/operations/{operation_id}/resume")
        if detach:
            click.echo(told["state"], err=True)
        else:
            _follow(server, operation_id)
