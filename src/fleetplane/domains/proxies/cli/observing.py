"""`fleetplane proxies observed`, `take-over`, `give-back`, `rendered` and `traffic`."""

from __future__ import annotations

import datetime as dt
import re
import time
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.proxies.cli.proxies import PREFIX, agents_of, client, proxy_options
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

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


@click.command()
@click.argument("agent")
@click.argument("version", type=click.IntRange(min=1))
@click.option("--against", type=click.IntRange(min=1), help="Show what is different from this version.")
@click.option("--host", "host", default="", metavar="ID", help="Only the file of this virtual host.")
@click.option("--file", "file", default="", metavar="NAME", help="Only this file, such as nginx.conf.")
@format_option
@proxy_options
def rendered(
    agent: str,
    version: int,
    against: int | None,
    host: str,
    file: str,
    output: Format,
    workspace: str,
    **where: Any,
) -> None:
    """Show the NGINX configuration that an AGENT writes for a VERSION, or compare it with another version's.

    Without certificates and the files of users. Needs an administrator, since raw text is in it.
    """
    asked = {
        name: str(value)
        for name, value in (("against", against), ("virtual_host_id", host), ("file", file))
        if value
    }
    with client(where) as server:
        one = agent_named(server, workspace, agent)
        told = server.call("GET", f"{PREFIX}/agents/{one['id']}/configs/{version}/rendered", query=asked)
    if output is not Format.TABLE:
        emit(output, told, PrintedTable(columns=(), rows=[], empty=""))
        return
    for name, text in told["files"].items():
        if len(told["files"]) > 1 and against is None:
            click.echo(f"# {name}")
        click.echo(text, nl=not text.endswith("\n"))


WATCH_SECONDS = 5.0
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_COLUMNS = (
    "REQUESTS",
    "DAY-BEFORE",
    "4XX",
    "5XX",
    "P50-MS",
    "P99-MS",
    "IN",
    "OUT",
    "CACHED",
    "FAILED",
)
_GROUPS = ("host", "location", "upstream", "agent")


@click.command("traffic")
@click.option("--since", default="1h", show_default=True, help="How far back, such as 15m, 6h or 30d.")
@click.option("--host", default="", metavar="ID", help="Only of this virtual host.")
@click.option("--agent", default="", metavar="ID", help="Only of this agent.")
@click.option("--location", default="", metavar="PATH", help="Only of locations with this path.")
@click.option("--upstream", default="", metavar="ID", help="Only of this upstream.")
@click.option("--by", type=click.Choice(_GROUPS), default="host", show_default=True, help="What rows are of.")
@click.option("--top", is_flag=True, help="The most frequent paths, clients, referrers and user agents.")
@click.option("--watch", "-w", is_flag=True, help="Show it again every 5 seconds, until interrupted.")
@format_option
@proxy_options
def traffic(
    since: str,
    host: str,
    agent: str,
    location: str,
    upstream: str,
    by: str,
    top: bool,
    watch: bool,
    output: Format,
    workspace: str,
    **where: Any,
) -> None:
    """Show the requests of a workspace, busiest first.

        fleetplane proxies traffic --since 24h

    Counts are exact; percentiles are within 1 %. The first row is all of it, compared with the same hours of
    the day before.
    """
    seconds = _seconds(since)
    with client(where) as server:
        while True:
            query = {
                "from": _moment(seconds),
                "virtual_host_id": host,
                "agent_id": agent,
                "location": location,
                "upstream_id": upstream,
                "by": "location" if by in ("location", "upstream") else "",
            }
            told = server.call(
                "GET",
                f"{PREFIX}/workspaces/{workspace}/traffic",
                query={name: value for name, value in query.items() if value},
            )
            if watch and output is Format.TABLE:
                click.clear()
            emit(output, told, _frequent(told) if top else _rows(told, by))
            if not watch:
                return
            time.sleep(WATCH_SECONDS)


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if found is None or not int(found[1]):
        raise InvalidArgument(f"{text!r} is no length of time", field="--since", hint="write 15m, 6h or 30d")
    return int(found[1]) * _UNITS[found[2]]


def _moment(seconds: int) -> str:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
    return past.strftime("%Y-%m-%dT%H:%M:%SZ")


def _rows(told: dict[str, Any], by: str) -> PrintedTable:
    rows = [_row("all", told["total"], before=str(told["day_before"]["requests"]))]
    rows += [_row(name, said) for name, said in _grouped(told, by)]
    return PrintedTable(columns=(by.upper(), *_COLUMNS), rows=rows, empty="no requests")


def _grouped(told: dict[str, Any], by: str) -> list[tuple[str, dict[str, Any]]]:
    match by:
        case "location":
            return [
                (f"{one['virtual_host'] or one['virtual_host_id']} {one['location']}", one["figures"])
                for one in told["locations"]
            ]
        case "upstream":
            return [(one["name"] or one["upstream_id"], one["figures"]) for one in told["upstreams"]]
        case "agent":
            return [(one["name"] or one["agent_id"], one["figures"]) for one in told["agents"]]
    return [
        (one["name"] or one["virtual_host_id"] or "no host", one["figures"]) for one in told["virtual_hosts"]
    ]


def _row(name: str, said: dict[str, Any], before: str = "") -> list[Cell]:
    failed = said["status_codes"]["5xx"]
    return [
        Cell(text=name),
        Cell(text=str(said["requests"])),
        Cell(text=before),
        Cell(text=str(said["status_codes"]["4xx"])),
        Cell(text=str(failed), style="red" if failed else ""),
        Cell(text=f"{said['latency_ms']['p50']:g}"),
        Cell(text=f"{said['latency_ms']['p99']:g}"),
        Cell(text=str(said["in_bytes"])),
        Cell(text=str(said["out_bytes"])),
        Cell(text=f"{said['cache_hits']}/{said['cache_lookups']}"),
        Cell(text=str(said["upstream_failures"])),
    ]


def _frequent(told: dict[str, Any]) -> PrintedTable:
    rows = [
        [Cell(text=kind), Cell(text=one["value"]), Cell(text=str(one["requests"]))]
        for kind, many in told["top"].items()
        for one in many["values"]
    ]
    return PrintedTable(columns=("KIND", "VALUE", "REQUESTS"), rows=rows, empty="no requests")
