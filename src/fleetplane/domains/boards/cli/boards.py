"""`fleetplane boards`: small boards with pins, near and far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.client.places import Place
from fleetplane.kernel.errors import NotFound

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "/api/v1"
PAGE = 500
STYLES = {
    "ready": "green",
    "active": "green",
    "not_ready": "red",
    "unknown": "red",
    "failed": "red",
    "error": "red",
    "maintenance": "yellow",
    "provisioning": "yellow",
    "degraded": "yellow",
    "discovered": "cyan",
    "pending": "cyan",
    "inactive": "dim",
}


def board_options(command: F) -> F:
    """Which server, and as whom."""
    return rest_options(command)


def client(where: Mapping[str, Any]) -> RestClient:
    return connect(Place(**where))


def styled(word: str) -> Cell:
    return Cell(text=word, style=STYLES.get(word, ""))


def pages(
    server: RestClient, path: str, *, name: str = "data", query: Sequence[tuple[str, str]] = ()
) -> Iterator[dict[str, Any]]:
    """All rows of a list, page by page."""
    offset, total = 0, 1
    while offset < total:
        asked = [*query, ("limit", str(PAGE)), ("offset", str(offset))]
        answer = server.call("GET", f"{PREFIX}{path}", query=asked)
        yield from answer[name]
        offset, total = offset + PAGE, answer["total"]


def number_of(server: RestClient, board: str) -> int:
    """The number of a board that somebody names, by number or name."""
    if board.isascii() and board.isdecimal():
        return int(board)
    found = server.call("GET", f"{PREFIX}/nodes", query={"name": board})["data"]
    if not found:
        raise NotFound(f"no board is named {board!r}", hint="`fleetplane boards list` shows them")
    return int(found[0]["id"])


def cluster_of(server: RestClient, cluster: str) -> int:
    if cluster.isascii() and cluster.isdecimal():
        return int(cluster)
    for found in pages(server, "/clusters", name="clusters"):
        if found["name"] == cluster:
            return int(found["id"])
    raise NotFound(f"no cluster is named {cluster!r}", hint="`fleetplane boards cluster list` shows them")


def _entries() -> dict[str, LazyEntry]:
    table = (
        ("gpio", "pins:gpio", "Pins: read, write, reserve."),
        ("exec", "commands:execute", "Run an allowed program on boards."),
        ("run", "commands:run", "Run an allowed program on many boards, in waves."),
        ("runs", "commands:runs", "Runs so far, or one in detail."),
        ("cancel", "commands:cancel", "Cancel a run."),
        ("preview", "commands:preview", "Which boards a target means."),
        ("logs", "logs:logs", "Read and follow a board's logs."),
        ("metrics", "logs:metrics", "How boards are, now or over time."),
        ("provision", "provisioning:provision", "Make a board, or several, a k3s cluster."),
        ("operation", "provisioning:operation", "Provisioning under way and over."),
        ("join-token", "admin:join_token", "Tokens with which boards join."),
        ("approve", "admin:approve", "Keys that ask to take a known board's place."),
        ("credential", "admin:credential", "How boards are logged in to, for provisioning."),
        ("certificate", "certificate:certificate", "An operator's own certificate, for a day."),
        ("user", "admin:user", "People who log in with a password."),
        ("cluster", "clusters:cluster", "Clusters of boards."),
    )
    return {
        name: LazyEntry(target=f"fleetplane.domains.boards.cli.{target}", help=words)
        for name, target, words in table
    }


class BoardVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = _entries()


@click.group(cls=BoardVerbs)
def boards() -> None:
    """Raspberry-Pi-class boards: metrics, GPIO, commands, logs, provisioning.

    A BOARD is named by its number or its name.
    """


@boards.command("list")
@click.option("--status", help="Only in this state, such as ready or not_ready.")
@click.option("--role", type=click.Choice(["master", "worker"]), help="Only with this role.")
@click.option("--cluster", metavar="CLUSTER", help="Only of this cluster.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@format_option
@board_options
def list_boards(
    status: str | None,
    role: str | None,
    cluster: str | None,
    labels: tuple[str, ...],
    output: Format,
    **where: Any,
) -> None:
    """List boards."""
    with client(where) as server:
        query = [("label", label) for label in labels]
        query += [(name, value) for name, value in (("status", status), ("role", role)) if value is not None]
        if cluster is not None:
            query.append(("cluster_id", str(cluster_of(server, cluster))))
        found = list(pages(server, "/nodes", query=query))
    rows = [
        [
            Cell(text=str(board["id"])),
            Cell(text=board["name"]),
            styled(board["status"]),
            Cell(text=board["role"]),
            Cell(text=str(board["cluster_id"] or "")),
            Cell(text=board["ip_address"]),
            Cell(text=board["model"]),
            Cell(text=board["last_seen"] or "never"),
        ]
        for board in found
    ]
    columns = ("ID", "NAME", "STATUS", "ROLE", "CLUSTER", "ADDRESS", "MODEL", "SEEN")
    empty = "no boards; `fleetplane boards join-token create` lets one join"
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty=empty))


def _labels(board: dict[str, Any]) -> set[str]:
    return {f"{key}={value}" for key, value in board["labels"].items()}


@boards.command("show")
@click.argument("board")
@format_option
@board_options
def show(board: str, output: Format, **where: Any) -> None:
    """Show a board with its pins and health checks."""
    with client(where) as server:
        found = server.call("GET", f"{PREFIX}/nodes/{number_of(server, board)}")["data"]
    agent = found["agent"]
    facts = {
        "id": found["id"],
        "name": found["name"],
        "status": found["status"],
        "role": found["role"],
        "cluster": found["cluster_id"],
        "address": found["ip_address"],
        "mac": found["mac_address"],
        "model": found["model"],
        "serial": found["serial_number"],
        "architecture": found["architecture"],
        "cores": found["cpu_cores"],
        "memory": _bytes(found["memory"]),
        "system": found["os_version"],
        "kernel": found["kernel_version"],
        "kubernetes": found["kube_version"],
        "seen": found["last_seen"],
        "agent": agent["version"],
        "agent at": f"{agent['address']}:{agent['port']}" if agent["port"] else "",
        "certificate until": agent["certificate_expires_at"],
        "labels": ",".join(sorted(_labels(found))),
        "can": ",".join(agent["capabilities"]),
    }
    rows = [
        [Cell(text=name), styled(str(value)) if name == "status" else Cell(text=str(value))]
        for name, value in facts.items()
        if value not in (None, "", 0)
    ]
    for condition in found["conditions"]:
        words = f"{condition['status']} {condition['message']}".strip()
        rows.append([Cell(text=condition["type"]), Cell(text=words)])
    for device in found["gpio_devices"]:
        words = f"{device['direction']} {device['name']} = {device['value']} ({device['status']})"
        rows.append([Cell(text=f"pin {device['pin_number']}"), Cell(text=words)])
    emit(output, found, PrintedTable(columns=("WHAT", "IS"), rows=rows, empty=""))


def _bytes(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count else ""


@boards.command("add")
@click.argument("name")
@click.option("--address", default="", help="SSH address of the board, for provisioning.")
@click.option("--role", type=click.Choice(["master", "worker"]), help="Role of the board in its cluster.")
@board_options
def add(name: str, address: str, role: str | None, **where: Any) -> None:
    """Register a board before it joins, or one that never runs our agent."""
    with client(where) as server:
        body = {"name": name, "ip_address": address, "role": role}
        made = server.call("POST", f"{PREFIX}/nodes", body=body)["data"]
    click.echo(made["id"])


@boards.command("delete")
@click.argument("board")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@board_options
def delete(board: str, yes: bool, **where: Any) -> None:
    """Delete a board and revoke its certificate."""
    if not yes:
        click.confirm(f"Forget board {board}? It has to join anew to come back", abort=True, err=True)
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/nodes/{number_of(server, board)}")
