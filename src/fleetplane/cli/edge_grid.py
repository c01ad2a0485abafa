"""A run while it goes on: a grid of daemons in a terminal, plain lines anywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import click

from fleetplane.cli.edge import PREFIX
from fleetplane.cli.output import flat
from fleetplane.kernel.errors import Unavailable

if TYPE_CHECKING:
    from fleetplane.cli.rest_client import RestClient

TRIES = 5
"""At following a run whose connection breaks, in a row."""
ROWS_LIMIT = 40
"""Daemons drawn at once: those at work first, then the failed ones."""
MARKS = {"ok": "✓", "err": "✗", "timed_out": "⏱", "cancelled": "⊘", "not_started": "-"}
STYLES = {"ok": "green", "err": "red", "timed_out": "red", "cancelled": "yellow", "not_started": "dim"}


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, kind: str, data: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def watch(server: RestClient, run_id: str, *, fancy: bool) -> dict[str, Any]:
    """Show a run until it is over; how it ended. Goes on where it was if the connection breaks."""
    screen: Screen = Grid(run_id) if fancy else Lines()
    try:
        for kind, data in _followed(server, run_id):
            screen.show(kind, data)
            if kind == "fleet_result":
                return data
    finally:
        screen.close()
    raise AssertionError("a run that is followed ends")  # `_followed` raises where it cannot go on


def _followed(server: RestClient, run_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    mark, tries = "", 0
    while True:
        headers = {"last-event-id": mark} if mark else {}
        try:
            with server.events("GET", f"{PREFIX}/fleet/runs/{run_id}/events", headers=headers) as events:
                for marked, kind, data in events:
                    mark, tries = marked, 0
                    yield kind, json.loads(data)
                    if kind == "fleet_result":
                        return
        except Unavailable:
            tries += 1
            if tries >= TRIES:
                raise
            continue
        tries += 1
        if tries >= TRIES:
            raise Unavailable("the server ends the stream of events again and again")


class Lines:
    """One line for each thing that happens; a daemon's output with its name before it."""

    def show(self, kind: str, data: dict[str, Any]) -> None:
        node = data.get("node_id", "")[:8]
        match kind:
            case "command_progress":
                for stream in ("stdout", "stderr"):
                    for line in str(data["chunk"].get(stream, "")).splitlines():
                        click.echo(f"{node}  {flat(line)}", err=stream == "stderr")
            case "command_result":
                ((outcome, about),) = data["result"].items()
                words = about.get("message") or about.get("reason") or ""
                code = "" if about.get("exit_code") is None else f" exit={about['exit_code']}"
                click.echo(f"{node}  {outcome}{code} {flat(words)}".rstrip())
            case "fleet_result":
                counts = " ".join(f"{name}={number}" for name, number in data["summary"].items())
                click.echo(f"{data['outcome']}: {counts}", err=True)
            case "error":
                click.echo(data["message"], err=True)

    def close(self) -> None:
        pass


class Grid:
    """A table that is redrawn while the run goes on."""

    def __init__(self, run_id: str) -> None:
        from rich.live import Live

        self._run_id = run_id
        self._nodes: dict[str, tuple[str, str]] = {}
        """Each daemon's outcome, or `running`, and the last it said."""
        self._summary = ""
        self._live = Live(get_renderable=self._draw, refresh_per_second=8, transient=False)
        self._live.start()

    def show(self, kind: str, data: dict[str, Any]) -> None:
        node = data.get("node_id", "")
        match kind:
            case "command_started":
                self._nodes[node] = ("running", "")
            case "command_progress":
                said = "".join(str(data["chunk"].get(stream, "")) for stream in ("stdout", "stderr"))
                lines = said.strip().splitlines()
                self._nodes[node] = ("running", flat(lines[-1]) if lines else "")
            case "command_result":
                ((outcome, about),) = data["result"].items()
                words = about.get("message") or about.get("reason") or self._nodes.get(node, ("", ""))[1]
                self._nodes[node] = (outcome, flat(words))
            case "fleet_result":
                counts = " ".join(f"{name}={number}" for name, number in data["summary"].items())
                self._summary = f"{data['outcome']}: {counts}"

    def _draw(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, title=f"run {self._run_id}", title_justify="left")
        for column in ("NODE", "", "LAST WORDS"):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        order = {"running": 0, "err": 1, "timed_out": 1}
        shown = sorted(self._nodes.items(), key=lambda item: order.get(item[1][0], 2))
        for node, (outcome, words) in shown[:ROWS_LIMIT]:
            mark = Text(f"{MARKS.get(outcome, '…')} {outcome}", style=STYLES.get(outcome, "cyan"))
            table.add_row(node, mark, words)
        if len(shown) > ROWS_LIMIT:
            table.caption = f"and {len(shown) - ROWS_LIMIT} more   {self._summary}"
        else:
            table.caption = self._summary
        return table

    def close(self) -> None:
        self._live.stop()
