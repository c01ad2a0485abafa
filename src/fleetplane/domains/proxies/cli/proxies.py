"""`fleetplane proxies`: agents of NGINX, and commands on many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane import environment
from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.client.places import Place, completed, context_of

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "/v1"
HERE = "http://127.0.0.1:8080"
PAGE = 100
STYLES = {"online": "green", "offline": "red", "degraded": "yellow", "pending": "cyan"}


def proxy_options(command: F) -> F:
    """Which server, as whom, and in which workspace; a command takes them as `where`."""
    return rest_options(
        click.option(
            "--workspace",
            required=True,
            metavar="ID",
            envvar="FLEETPLANE_PROXY_WORKSPACE",
            show_envvar=True,
            help="In which workspace.",
        )(command)
    )


def client(where: Mapping[str, Any]) -> RestClient:
    """As whoever the token is of; without one, on the server's own machine, as its owner at its socket.

    A token without an address is for the server on this machine.
    """
    from fleetplane.kernel.errors import InvalidArgument

    place = completed(Place(**where), environment.current())
    context = context_of(place, environment.current())
    has_token = bool(place.token) or place.token_file is not None
    if place.server and not has_token:
        raise InvalidArgument(
            "a token is required",
            hint="set FLEETPLANE_TOKEN or give --token-file; `POST /v1/api-tokens` makes a token",
        )
    if has_token and (context is None or context.is_local):
        place = replace(place, server=place.server or HERE, context="", data_dir=None)
    return connect(place)


def agents_of(server: RestClient, workspace: str, **query: str) -> list[dict[str, Any]]:
    """Every agent of a workspace, page by page."""
    found: list[dict[str, Any]] = []
    page, total = 1, 1
    while (page - 1) * PAGE < total:
        asked = {**query, "page": str(page), "per_page": str(PAGE)}
        told = server.call("GET", f"{PREFIX}/workspaces/{workspace}/agents", query=asked)
        found += told["data"]
        page, total = page + 1, told["meta"]["total"]
    return found


class ProxyVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "import": LazyEntry(
            target="fleetplane.domains.proxies.cli.importing:import_config",
            help="Bring an existing NGINX configuration in.",
        ),
        "rendered": LazyEntry(
            target="fleetplane.domains.proxies.cli.observing:rendered",
            help="Show or compare the NGINX text of a version.",
        ),
        "observed": LazyEntry(
            target="fleetplane.domains.proxies.cli.observing:observed",
            help="Show the NGINX that an agent observes.",
        ),
        "take-over": LazyEntry(
            target="fleetplane.domains.proxies.cli.observing:take_over",
            help="Take over the NGINX that an agent observes.",
        ),
        "give-back": LazyEntry(
            target="fleetplane.domains.proxies.cli.observing:give_back",
            help="Give an NGINX back that was taken over.",
        ),
        "traffic": LazyEntry(
            target="fleetplane.domains.proxies.cli.observing:traffic",
            help="What requests came to, by virtual host.",
        ),
    } | {
        name: LazyEntry(target=f"fleetplane.domains.proxies.cli.runs:{name}", help=words)
        for name, words in (
            ("run", "Command the NGINX of many agents, in waves."),
            ("runs", "Runs so far, or one in detail."),
            ("cancel", "Cancel a run."),
            ("preview", "Which agents a target means."),
            ("retry", "Try again what failed at agents."),
        )
    }


@click.group(cls=ProxyVerbs)
def proxies() -> None:
    """NGINX fleets: agents, and commands on many of them.

    Acts with the rights of a token (an API token, or what a login gives) or of the context; without either,
    on the server's own machine, as its owner. An AGENT is named by its id or its name.
    """


@proxies.command("agents")
@click.option("--selector", default="", help="Only those that it means, such as 'env=production,!canary'.")
@click.option("--state", default="all", show_default=True, help="Only in this state.")
@format_option
@proxy_options
def agents(selector: str, state: str, output: Format, workspace: str, **where: Any) -> None:
    """List the agents of a workspace."""
    query = {"state": state} | ({"label_selector": selector} if selector else {})
    with client(where) as server:
        found = agents_of(server, workspace, **query)
    rows = [
        [
            Cell(text=one["id"]),
            Cell(text=one["name"]),
            Cell(text=one["state"], style=STYLES.get(one["state"], "")),
            Cell(text=",".join(f"{key}={value}" for key, value in sorted(one["labels"].items()))),
            Cell(text=one.get("last_seen_at") or "never"),
        ]
        for one in found
    ]
    emit(
        output,
        found,
        PrintedTable(columns=("ID", "NAME", "STATE", "LABELS", "SEEN"), rows=rows, empty="no agents"),
    )
