"""`fleetplane boards cluster`: clusters, who belongs to them, and their kubeconfig."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.boards.cli.boards import (
    PREFIX,
    board_options,
    client,
    cluster_of,
    number_of,
    pages,
    styled,
)


@click.group()
def cluster() -> None:
    """Clusters of boards. A CLUSTER is named by its number or its name."""


@cluster.command("list")
@format_option
@board_options
def list_clusters(output: Format, **where: Any) -> None:
    """List clusters."""
    with client(where) as server:
        found = list(pages(server, "/clusters", name="clusters"))
    rows = [
        [
            Cell(text=str(one["id"])),
            Cell(text=one["name"]),
            styled(one["status"]),
            Cell(text=one["version"]),
            Cell(text=one["master_endpoint"]),
            Cell(text=one["description"]),
        ]
        for one in found
    ]
    columns = ("ID", "NAME", "STATUS", "VERSION", "ENDPOINT", "DESCRIPTION")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no clusters"))


@cluster.command("create")
@click.argument("name")
@click.option("--description", default="", help="Description of the cluster.")
@board_options
def create(name: str, description: str, **where: Any) -> None:
    """Create a cluster and print its number."""
    with client(where) as server:
        made = server.call("POST", f"{PREFIX}/clusters", body={"name": name, "description": description})
    click.echo(made["id"])


@cluster.command("show")
@click.argument("name")
@format_option
@board_options
def show(name: str, output: Format, **where: Any) -> None:
    """Show a cluster and its boards."""
    with client(where) as server:
        found = server.call("GET", f"{PREFIX}/clusters/{cluster_of(server, name)}")
    rows = [
        [Cell(text=str(one["id"])), Cell(text=one["name"]), styled(one["status"]), Cell(text=one["role"])]
        for one in found["nodes"]
    ]
    click.echo(f"{found['name']}: {found['status']} {found['version']} {found['master_endpoint']}", err=True)
    emit(output, found, PrintedTable(columns=("ID", "NAME", "STATUS", "ROLE"), rows=rows, empty="no boards"))


@cluster.command("add")
@click.argument("name")
@click.argument("boards", nargs=-1, required=True, metavar="BOARD...")
@board_options
def add(name: str, boards: tuple[str, ...], **where: Any) -> None:
    """Add boards to a cluster."""
    with client(where) as server:
        number = cluster_of(server, name)
        for board in boards:
            server.call(
                "POST", f"{PREFIX}/clusters/{number}/nodes", body={"node_id": number_of(server, board)}
            )


@cluster.command("remove")
@click.argument("name")
@click.argument("boards", nargs=-1, required=True, metavar="BOARD...")
@board_options
def remove(name: str, boards: tuple[str, ...], **where: Any) -> None:
    """Remove boards from a cluster; what runs on them goes on."""
    with client(where) as server:
        number = cluster_of(server, name)
        for board in boards:
            server.call("DELETE", f"{PREFIX}/clusters/{number}/nodes/{number_of(server, board)}")


@cluster.command("delete")
@click.argument("name")
@board_options
def delete(name: str, **where: Any) -> None:
    """Delete a cluster that has no boards."""
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/clusters/{cluster_of(server, name)}")


@cluster.command("kubeconfig")
@click.argument("name")
@board_options
def kubeconfig(name: str, **where: Any) -> None:
    """Print the kubeconfig of a cluster; that somebody did is written to the audit log."""
    with client(where) as server:
        told = server.call("POST", f"{PREFIX}/clusters/{cluster_of(server, name)}/kubeconfig")
    click.echo(told["kubeconfig"], nl=False)


@cluster.command("token")
@click.argument("name")
@board_options
def token(name: str, **where: Any) -> None:
    """Print the token with which k3s nodes join; that somebody did is written to the audit log."""
    with client(where) as server:
        told = server.call("POST", f"{PREFIX}/clusters/{cluster_of(server, name)}/cluster-token")
    click.echo(told["cluster_token"])
