"""`fleetplane proxies run|runs|cancel|preview|retry`: commands on the NGINX of many agents."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.exits import CommandFailed, Exit
from fleetplane.cli.output import Format, flat, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.running.runs import POLICY, RunVerbs, policy_of, policy_options, target_of, target_option
from fleetplane.domains.proxies.cli.proxies import PREFIX, agents_of, client, proxy_options
from fleetplane.kernel.errors import FleetplaneError, NotFound

COMMANDS = ("reload", "restart", "stop", "status", "test")


def _base(workspace: str) -> str:
    return f"{PREFIX}/workspaces/{workspace}"


@click.command("run")
@policy_options
@click.option("--force", is_flag=True, help="With restart: do not wait for connections to end.")
@click.option("--now", is_flag=True, help="With stop: do not wait for connections to end.")
@click.option("--within", type=DURATION, default=30.0, show_default="30s", help="With stop: so long at most.")
@click.option("--detach", is_flag=True, help="Only start it, and print its id.")
@click.argument("command", type=click.Choice(COMMANDS))
@proxy_options
def run(
    targets: tuple[str, ...],
    force: bool,
    now: bool,
    within: float,
    detach: bool,
    command: str,
    workspace: str,
    **rest: Any,
) -> None:
    """Command the NGINX of many agents, wave by wave, and show what comes of it.

        fleetplane proxies run --target env=production --mode rolling=5 reload

    `test` tests what each agent serves and applies nothing. A restart or stop that may have happened is
    never sent again. The exit code is 7 if it failed on some agents or was halted, 3 with fewer agents than
    --require-min, 8 if none could be reached, 124 if no agent answered in time.
    """
    chosen = {name: rest.pop(name) for name in POLICY}
    body = {
        "command": command,
        "force": force,
        "graceful": not now,
        "timeout_seconds": round(within),
        "target": target_of(targets),
        "policy": policy_of(chosen),
    }
    with client(rest) as server:
        code = RunVerbs(server=server, base=_base(workspace)).start(body, detach=detach)
    raise click.exceptions.Exit(code)


@click.command("runs")
@click.argument("run_id", required=False)
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="At most so many.")
@format_option
@proxy_options
def runs(run_id: str | None, limit: int, output: Format, workspace: str, **where: Any) -> None:
    """List runs, newest first; with an id, show what became of each agent."""
    with client(where) as server:
        verbs = RunVerbs(server=server, base=_base(workspace))
        if run_id is None:
            verbs.list(limit, output)
        else:
            verbs.show(run_id, output)


@click.command("cancel")
@click.argument("run_id")
@proxy_options
def cancel(run_id: str, workspace: str, **where: Any) -> None:
    """Cancel a run. Agents that have the command finish it; the others never get it."""
    with client(where) as server:
        RunVerbs(server=server, base=_base(workspace)).cancel(run_id)


@click.command("preview")
@target_option
@click.option("--wait", is_flag=True, help="As if agents that are away were waited for.")
@format_option
@proxy_options
def preview(targets: tuple[str, ...], wait: bool, output: Format, workspace: str, **where: Any) -> None:
    """Show which agents a target means, and which are left out and why."""
    with client(where) as server:
        RunVerbs(server=server, base=_base(workspace)).preview(targets, wait=wait, output=output)


@click.command("retry")
@click.argument("agents", nargs=-1, required=True, metavar="AGENT...")
@proxy_options
def retry(agents: tuple[str, ...], workspace: str, **where: Any) -> None:
    """Have agents try again now what they could not serve, instead of when it is due."""
    with client(where) as server:
        known = agents_of(server, workspace)
        by_name = {one["name"]: one["id"] for one in known} | {one["id"]: one["id"] for one in known}
        if unknown := [name for name in agents if name not in by_name]:
            raise NotFound(
                f"the workspace has no agent {unknown[0]!r}", hint="`fleetplane proxies agents` shows them"
            )
        failed = 0
        for name in agents:
            try:
                server.call("POST", f"{PREFIX}/agents/{by_name[name]}/retry")
            except FleetplaneError as error:
                failed += 1
                click.echo(f"fleetplane: {name}: {flat(error.message)}", err=True)
    if failed:
        code = Exit.FAILURE if failed == len(agents) else Exit.PARTIAL
        raise CommandFailed(code, f"{failed} of {len(agents)} agents were not asked")
