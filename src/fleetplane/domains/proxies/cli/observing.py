"""`fleetplane proxies observed`, `take-over`, `give-back`: an NGINX that an agent found on its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.proxies.cli.proxies import PREFIX, agents_of, client, proxy_options
from fleetplane.kernel.errors import FailedPrecondition, NotFound

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

WAIT_SECONDS = 150.0
"""Longer than an agent has for a take-over with its way back."""


def agent_named(server: RestClient, workspace: str, name: str) -> dict[str, Any]:
    """An agent by its id or its name."""
    for one in agents_of(server, workspace):
        if name in (one["id"], one["name"]):
            return one
    raise NotFound(f"{name} is no agent of this workspace", hint="`fleetplane proxies agents` lists them")


@click.command()
@click.argument("agent")
@click.option("--file", "file", default="", metavar="PATH", help="Print this file of its configuration.")
@click.option("--log", "log", default="", metavar="PATH", help="Print the last lines of this log.")
@click.option("--lines", type=click.IntRange(1, 1000), default=100, show_default=True, help="With --log.")
@format_option
@proxy_options
def observed(
    agent: str, file: str, log: str, lines: int, output: Format, workspace: str, **where: Any
) -> None:
    """Show the NGINX that an agent observes: its figures, its files, its logs.

    Without --file and --log, what the agent reports and which files and logs there are.
    """
    with client(where) as server:
        one = agent_named(server, workspace, agent)
        base = f"{PREFIX}/agents/{one['id']}"
        if log:
            told = server.call("GET", f"{base}/observed/log", query={"name": log, "lines": str(lines)})
            click.echo("\n".join(told["lines"]))
            return
        if file:
            shown = server.call("GET", f"{base}/observed")
            found = [each["text"] for each in shown["files"] if each["path"] == file]
            if not found:
                raise NotFound(f"{file} is not shown", hint="without --file the files are listed")
            click.echo(found[0], nl=False)
            return
        summary = server.call("GET", base).get("observed")
        if summary is None:
            raise FailedPrecondition(
                f"{agent} observes no NGINX", hint="start the agent with --observe beside one"
            )
        shown = server.call("GET", f"{base}/observed")
    paths = [each["path"] for each in shown["files"]]
    rows = [
        [Cell(text=name), Cell(text=_words(value))]
        for name, value in (
            ("state", summary["state"]),
            ("nginx", summary["nginx_version"]),
            ("workers", summary["workers"]),
            ("listening", summary["listening"]),
            ("modules", summary["modules"]),
            *(("file", path) for path in paths),
            *(("log", path) for path in summary["logs"]),
            *(("not shown", problem) for problem in summary["problems"]),
            *((("service", summary["unit"]),) if summary["unit"] else ()),
            *((("last failure", summary["error"]),) if summary["error"] else ()),
        )
    ]
    emit(
        output,
        {**summary, "files": paths},
        PrintedTable(columns=("WHAT", "VALUE"), rows=rows, empty="nothing"),
    )


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@click.command("take-over")
@click.argument("agent")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@proxy_options
def take_over(agent: str, only_plan: bool, yes: bool, output: Format, workspace: str, **where: Any) -> None:
    """Serve the workspace's version in the place of the NGINX that an agent observes.

    Shows the plan and asks. The NGINX that was found is stopped, none of its files is changed; if the version
    cannot be served in full, it is started again as it was. `give-back` does the same at any time later.
    """
    with client(where) as server:
        path = f"{PREFIX}/agents/{agent_named(server, workspace, agent)['id']}/takeover"
        plan = server.call("GET", path)
        rows = [[Cell(text=what), Cell(text=value)] for what, value in _plan_rows(plan)]
        if only_plan or output is Format.TABLE:
            emit(output, plan, PrintedTable(columns=("WHAT", "VALUE"), rows=rows, empty="nothing"))
        if only_plan:
            return
        if not plan["valid"]:
            raise FailedPrecondition(f"the agent's NGINX refuses the version: {plan['error']}")
        if not yes:
            click.confirm(f"Take over the NGINX of {agent}?", abort=True, err=True)
        _finish(server.call("POST", path, body={"plan": plan["id"]}, timeout_seconds=WAIT_SECONDS))


def _plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("version", str(plan["version"]))]
    rows += [("host", f"{one['server_name']} on {_words(one['ports'])}") for one in plan["hosts"]]
    rows += [("stream", one) for one in plan["streams"]]
    for name in ("kept", "added", "lost"):
        rows.append((f"ports {name}", _words(plan[f"ports_{name}"]) or "none"))
    rows += [("warning", one) for one in plan["warnings"]]
    rows.append(("test", "passed" if plan["valid"] else plan["error"]))
    return rows


@click.command("give-back")
@click.argument("agent")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@proxy_options
def give_back(agent: str, yes: bool, workspace: str, **where: Any) -> None:
    """Stop what an agent serves and start the NGINX again that it took over, as it was started before."""
    if not yes:
        click.confirm(f"Give the NGINX of {agent} back?", abort=True, err=True)
    with client(where) as server:
        path = f"{PREFIX}/agents/{agent_named(server, workspace, agent)['id']}/give-back"
        _finish(server.call("POST", path, timeout_seconds=WAIT_SECONDS))


def _finish(told: dict[str, Any]) -> None:
    if not told["success"]:
        raise FailedPrecondition(told["message"])
    click.echo(told["message"])
