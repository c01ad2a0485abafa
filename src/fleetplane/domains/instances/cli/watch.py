"""The two faces of `fleetplane instances watch`: a live table, and lines."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
import grpc

from fleetplane.cli.clients.client import PASSING_CODES, RECONNECT
from fleetplane.cli.output import Format, drawing, json_line, rich_table, yaml_text
from fleetplane.domains.instances.cli import view as instances_view
from fleetplane.domains.instances.cli.client import Operator, OperatorTarget
from fleetplane.gen.nstance.v1 import operator_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAWS_PER_SECOND = 4
RECENT_LINES = 8
"""Of what happened to instances, below the table of groups."""

METHODS = {"groups": "WatchGroups", "instances": "WatchInstances", "errors": "WatchErrors"}


class Known:
    """The groups a watcher knows of, so that a new connection tells only what is new. Pure."""

    def __init__(self) -> None:
        self.groups: dict[str, operator_pb2.GroupStatus] = {}

    def missing(self, present: list[operator_pb2.GroupStatus]) -> Iterator[operator_pb2.GroupEvent]:
        """Groups that went while nobody watched."""
        for key in sorted(self.groups.keys() - {group.key for group in present}):
            gone = self.groups.pop(key)
            yield operator_pb2.GroupEvent(
                group=operator_pb2.GroupStatus(key=key, tenant=gone.tenant),
                type=operator_pb2.GroupEvent.TYPE_DELETE,
            )

    def is_news(self, event: Any) -> bool:
        if not isinstance(event, operator_pb2.GroupEvent):
            return True
        group = event.group
        if instances_view.group_word(event) == "DELETE":
            return self.groups.pop(group.key, None) is not None
        known = self.groups.get(group.key)
        self.groups[group.key] = group
        return known != group


def follow(
    target: OperatorTarget,
    known: Known,
    what: list[str],
    *,
    seconds: float | None,
    on_gap: Callable[[str, float], None],
    on_open: Callable[[Operator], None] = lambda _client: None,
) -> Iterator[Any]:
    """Every event, over any number of connections, until the time is up.

    The first connection must succeed: a wrong address is an error, not something to wait for.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    attempt, ever = 0, False
    while deadline is None or time.monotonic() < deadline:
        try:
            with target.operator() as client:
                present = client.groups()
                ever = True
                on_open(client)
                yield from known.missing(present)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                for event in client.streams(*(METHODS[name] for name in what), seconds=left):
                    attempt = 0
                    if known.is_news(event):
                        yield event
            reason = "the server ended the stream"
        except grpc.RpcError as error:
            if not ever or error.code() not in PASSING_CODES:
                raise
            reason = error.details() or error.code().name
        except Exception as error:
            # The server's socket is gone too while it restarts.
            if not ever or getattr(error, "reason", "") != "UNAVAILABLE":
                raise
            reason = str(error)
        delay = RECONNECT.delay_seconds(attempt, jitter=random.random())  # noqa: S311  # jitter
        attempt += 1
        if deadline is None or time.monotonic() + delay < deadline:
            on_gap(reason, delay)
        time.sleep(delay if deadline is None else min(delay, max(0.0, deadline - time.monotonic())))


def watch_lines(target: OperatorTarget, what: list[str], output: Format, *, seconds: float | None) -> None:
    """One line, JSON object or YAML document for every event, written out at once."""

    def on_gap(reason: str, delay_seconds: float) -> None:
        click.echo(f"fleetplane: {reason}; trying again in {delay_seconds:.1f} s", err=True)

    for event in follow(target, Known(), what, seconds=seconds, on_gap=on_gap):
        match output:
            case Format.JSON:
                click.echo(json_line(instances_view.event_dict(event)))
            case Format.YAML:
                click.echo(f"---\n{yaml_text(instances_view.event_dict(event))}", nl=False)
            case Format.TABLE:
                click.echo(instances_view.event_line(event))


def watch_live(target: OperatorTarget, what: list[str], *, seconds: float | None) -> None:
    """The groups as they are, and below them what happened last."""
    from rich.console import Console
    from rich.live import Live

    screen = _InstanceScreen()
    shown = Live(
        console=Console(), get_renderable=screen.draw, refresh_per_second=REDRAWS_PER_SECOND, transient=False
    )
    with drawing(), shown as live:
        for event in follow(
            target, screen.known, what, seconds=seconds, on_gap=screen.on_gap, on_open=screen.on_open
        ):
            if not isinstance(event, operator_pb2.GroupEvent):
                screen.recent.append(f"{time.strftime('%H:%M:%S')}  {instances_view.event_line(event)}")
            screen.note = ""
            live.refresh()


class _InstanceScreen:
    """What the terminal shows. Drawn from rich's own thread, so it reads whole values only."""

    def __init__(self) -> None:
        self.known = Known()
        self.recent: deque[str] = deque(maxlen=RECENT_LINES)
        self.note = ""
        self._address = ""

    def on_open(self, client: Operator) -> None:
        self._address = client.address

    def on_gap(self, reason: str, delay_seconds: float) -> None:
        self.note = f"not connected: {reason}; trying again in {delay_seconds:.1f} s"

    def draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        present = [group for _, group in sorted(self.known.groups.copy().items())]
        body = rich_table(instances_view.group_table(present)) if present else Text(instances_view.NO_GROUPS)
        wanted, actual = sum(group.size for group in present), sum(group.actual_size for group in present)
        clock = time.strftime("%H:%M:%S")
        summary = f"{actual} of {wanted} instances · {self._address} · {clock} · Ctrl-C ends"
        note = Text(self.note or summary, style="bold yellow" if self.note else "dim")
        return Group(body, *(Text(line, style="dim") for line in list(self.recent)), note)
