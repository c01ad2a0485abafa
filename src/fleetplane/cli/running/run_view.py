"""A run while it goes on: a grid of its targets in a terminal, plain lines anywhere else.

Domains translate the events of their routes into the classes below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import click

from fleetplane.cli.output import Cell, flat
from fleetplane.kernel.errors import Unavailable

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

TRIES = 5
"""At following a run whose connection breaks, in a row."""
ROWS_LIMIT = 40
"""Targets drawn at once: those at work first, then the failed ones."""
MARKS = {"ok": "✓", "err": "✗", "timed_out": "⏱", "cancelled": "⊘", "not_started": "-"}
STYLES = {"ok": "green", "err": "red", "timed_out": "red", "cancelled": "yellow", "not_started": "dim"}
STATE_STYLES = {"complete": "green", "failed": "red", "partly_failed": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBegan:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPrinted:
    name: str
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDone:
    name: str
    outcome: str
    words: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotice:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDone:
    state: str
    summary: dict[str, int]


ShownEvent = TargetBegan | TargetPrinted | TargetDone | RunNotice | RunDone
Translate = Callable[[str, dict[str, Any]], Iterator[ShownEvent]]
"""From an event's kind and data to what is shown of it."""


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, event: ShownEvent) -> None: ...

    def close(self) -> None: ...


def watch(
    server: RestClient, path: str, translate: Translate, *, title: str, fancy: bool, name_width: int = 0
) -> RunDone:
    """Show a run until it is over; how it ended. Goes on where it was if the connection breaks."""
    screen: Screen = Grid(title) if fancy else Lines(name_width)
    try:
        for event in _followed(server, path, translate):
            screen.show(event)
            if isinstance(event, RunDone):
                return event
    finally:
        screen.close()
    raise AssertionError("a run that is followed ends")  # `_followed` raises where it cannot go on


def _followed(server: RestClient, path: str, translate: Translate) -> Iterator[ShownEvent]:
    mark, tries = "", 0
    while True:
        headers = {"last-event-id": mark} if mark else {}
        try:
            with server.events("GET", path, headers=headers) as events:
                for marked, kind, data in events:
                    mark, tries = marked, 0
                    for event in translate(kind, json.loads(data)):
                        yield event
                        if isinstance(event, RunDone):
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
    """One line for each thing that happens; a target's output with its name before it."""

    def __init__(self, name_width: int = 0) -> None:
        """With a width, names are cut to it."""
        self._width = name_width or None

    def show(self, event: ShownEvent) -> None:
        match event:
            case TargetPrinted():
                name = event.name[: self._width]
                for text, is_error in ((event.stdout, False), (event.stderr, True)):
                    for line in text.splitlines():
                        click.echo(f"{name}  {flat(line)}", err=is_error)
            case TargetDone():
                code = "" if event.exit_code is None else f" exit={event.exit_code}"
                name = event.name[: self._width]
                click.echo(f"{name}  {event.outcome}{code} {flat(event.words)}".rstrip())
            case RunDone():
                click.echo(_ending(event), err=True)
            case RunNotice():
                click.echo(event.message, err=True)
            case TargetBegan():
                pass

    def close(self) -> None:
        pass


class Grid:
    """A table that is redrawn while the run goes on."""

    def __init__(self, title: str) -> None:
        from rich.live import Live

        self._title = title
        self._targets: dict[str, tuple[str, str]] = {}
        """Each target's outcome, or `running`, and the last it said."""
        self._summary = ""
        self._live = Live(get_renderable=self._draw, refresh_per_second=8, transient=False)
        self._live.start()

    def show(self, event: ShownEvent) -> None:
        match event:
            case TargetBegan():
                self._targets[event.name] = ("running", "")
            case TargetPrinted():
                lines = (event.stdout + event.stderr).strip().splitlines()
                self._targets[event.name] = ("running", flat(lines[-1]) if lines else "")
            case TargetDone():
                words = event.words or self._targets.get(event.name, ("", ""))[1]
                self._targets[event.name] = (event.outcome, flat(words))
            case RunDone():
                self._summary = _ending(event)
            case RunNotice():
                pass

    def _draw(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, title=self._title, title_justify="left")
        for column in ("NODE", "", "LAST WORDS"):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        order = {"running": 0, "err": 1, "timed_out": 1}
        shown = sorted(self._targets.items(), key=lambda item: order.get(item[1][0], 2))
        for name, (outcome, words) in shown[:ROWS_LIMIT]:
            mark = Text(f"{MARKS.get(outcome, '…')} {outcome}", style=STYLES.get(outcome, "cyan"))
            table.add_row(name, mark, words)
        if len(shown) > ROWS_LIMIT:
            table.caption = f"and {len(shown) - ROWS_LIMIT} more   {self._summary}"
        else:
            table.caption = self._summary
        return table

    def close(self) -> None:
        self._live.stop()


def _ending(event: RunDone) -> str:
    counts = " ".join(f"{name}={number}" for name, number in event.summary.items())
    return f"{shown_state(event.state, event.summary)}: {counts}"


def shown_state(state: str, summary: dict[str, int]) -> str:
    """The state of a run as `/apis/v1` shows it: `complete` only if every target is ok."""
    if state != "complete" or not any(number for name, number in summary.items() if name != "ok"):
        return state
    return "partly_failed" if summary["ok"] else "failed"


def state_cell(state: str, summary: dict[str, int]) -> Cell:
    """A run's state in a list, in its colour."""
    shown = shown_state(state, summary)
    return Cell(text=shown, style=STATE_STYLES.get(shown, ""))
