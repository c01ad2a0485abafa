"""`fleetplane revocations`: which agents know who may no longer come in, and which do not yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.owner_options import owner_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import CALL_SECONDS

if TYPE_CHECKING:
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

ASK_SECONDS = 1.0
STYLES = {"current": "green", "behind": "yellow", "unheard": "yellow", "unable": "red"}


@click.command()
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    help="Until every agent that can has the list, this long at most; exit code 3 if some have not.",
)
@format_option
@owner_options
def revocations(wait_seconds: float | None, output: Format, data_dir: Path) -> None:
    """Show which agents that accept callers have the list of revocations that holds now.

    The list goes out with heartbeats. `current` has it; `behind` was heard and has an older one;
    `unheard` said nothing since the server started; `unable` takes none: an agent without TLS.
    """
    import time

    from fleetplane.cli.clients.operators_client import OperatorsClient
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    until = time.monotonic() + (wait_seconds or 0.0)
    with OperatorsClient(data_dir, call_seconds=CALL_SECONDS) as owner:
        while True:
            answer = owner.call("GetRevocationUptake", pb.GetRevocationUptakeRequest())
            missing = [agent for agent in answer.agents if agent.state in ("behind", "unheard")]
            if not missing or time.monotonic() >= until:
                break
            time.sleep(ASK_SECONDS)
    _show(answer, output)
    if missing and wait_seconds is not None:
        names = ", ".join(agent.agent for agent in missing[:5])
        raise CommandFailed(Exit.CONDITION_NOT_MET, f"{len(missing)} agents do not have the list: {names}")


def _show(answer: pb.GetRevocationUptakeResponse, output: Format) -> None:
    agents = [_told(agent) for agent in answer.agents]
    data: dict[str, Any] = {
        "number": answer.number,
        "issued": answer.issued_at.ToJsonString(),
        "entries": answer.entries,
        "agents": agents,
    }
    click.echo(f"list {answer.number} of {data['issued']}, {answer.entries} entries", err=True)
    rows = [
        [
            Cell(text=one["agent"]),
            Cell(text=one["name"]),
            Cell(text=one["state"], style=STYLES.get(one["state"], "")),
            Cell(text=str(one["number"] or "")),
            Cell(text=one["heard"] or ""),
        ]
        for one in agents
    ]
    columns = ("AGENT", "NAME", "STATE", "LIST", "HEARD")
    emit(output, data, PrintedTable(columns=columns, rows=rows, empty="no agent accepts callers"))


def _told(agent: pb.AgentUptake) -> dict[str, Any]:
    return {
        "agent": agent.agent,
        "name": agent.name,
        "state": agent.state,
        "number": agent.number,
        "heard": agent.heard_at.ToJsonString() if agent.HasField("heard_at") else None,
    }
