"""The two faces of `fleetplane gpus watch`: a live table, and lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from fleetplane.cli.clients.client import DeviceClient, GpuWatch, follow
from fleetplane.cli.output import Format, json_line, rich_table, yaml_text
from fleetplane.domains.gpus.cli import view as gpu_view

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAWS_PER_SECOND = 4
"""Ages change every second; changes are drawn at once whatever this says."""


def watch_lines(client: DeviceClient, output: Format, *, seconds: float | None) -> None:
    """One line, JSON object or YAML document for every change, written out at once."""

    def on_gap(reason: str, delay_seconds: float) -> None:
        click.echo(f"fleetplane: {reason}; trying again in {delay_seconds:.1f} s", err=True)

    for change in follow(client, GpuWatch(), seconds=seconds, on_gap=on_gap):
        event = {"type": change.kind, "object": gpu_view.gpu_dict(change.gpu)}
        match output:
            case Format.JSON:
                click.echo(json_line(event))
            case Format.YAML:
                click.echo(f"---\n{yaml_text(event)}", nl=False)
            case Format.TABLE:
                click.echo(gpu_view.change_line(change.kind, change.gpu))


def watch_live(client: DeviceClient, *, seconds: float | None) -> None:
    """A table that is always the present one, with ages that run."""
    from rich.console import Console
    from rich.live import Live

    screen = _GpuScreen(client.address)
    console = Console()
    with Live(
        console=console, get_renderable=screen.draw, refresh_per_second=REDRAWS_PER_SECOND, transient=False
    ) as live:
        for _change in follow(client, screen.watch, seconds=seconds, on_gap=screen.on_gap):
            screen.note = ""
            live.refresh()


class _GpuScreen:
    """What the terminal shows. Drawn from rich's own thread, so it reads whole values only."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.watch = GpuWatch()
        self.note = ""

    def on_gap(self, reason: str, delay_seconds: float) -> None:
        self.note = f"not connected: {reason}; trying again in {delay_seconds:.1f} s"

    def draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        present = sorted(self.watch.gpus.copy().items())
        table = gpu_view.gpu_table([gpu for _, gpu in present], time.time())
        body = rich_table(table) if present else Text(gpu_view.NO_GPUS, style="dim")
        unhealthy = sum(gpu_view.health(gpu) is gpu_view.ShownHealth.UNHEALTHY for _, gpu in present)
        clock = time.strftime("%H:%M:%S")
        summary = f"{len(present)} GPUs, {unhealthy} unhealthy · {self._address} · {clock} · Ctrl-C ends"
        return Group(body, Text(self.note or summary, style="bold yellow" if self.note else "dim"))
