"""`fleetplane agent board`: the agent of a single-board computer, from joining a server to its service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION, LOG_LEVELS

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def _set(name: str, *target: str, **options: Any) -> Callable[[F], F]:
    variable = "FLEETPLANE_BOARD_AGENT_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *target, envvar=variable, show_envvar=True, **options)


def _state_dir(command: F) -> F:
    return _set(
        "--state-dir",
        type=FOLDER,
        default="/var/lib/fleetplane-board",
        show_default=True,
        callback=lambda _context, _parameter, value: Path(value).expanduser().absolute(),
        help="Folder of key, certificate and audit log.",
    )(command)


def _self(command: F) -> F:
    """What decides who this board is."""
    command = _set("--config", type=FILE, help="What the board's owner allows; see the documentation.")(
        command
    )
    command = _set("--name", default="", help="Name of the board. Default: the host name.")(command)
    return _set("--simulate", is_flag=True, help="Simulate pins and buses; no hardware is needed.")(command)


@click.group()
def board() -> None:
    """Serve this board: its pins, metrics, logs and diagnostics."""


@board.command()
@click.argument("token")
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the server's board listener.")
@click.option(
    "--server-name", default="", help="Name in the server's certificate, if it differs from the address."
)
@click.option(
    "--replace", "replace_identity", is_flag=True, help="Join even though this board is a member already."
)
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    help="How long to wait for an operator's approval. Default: do not wait.",
)
@_state_dir
@_self
def join(
    *,
    token: str,
    server: str,
    server_name: str,
    replace_identity: bool,
    wait_seconds: float | None,
    **options: Any,
) -> None:
    """Become a member of a server's fleet with TOKEN (- reads it from stdin).

    The key is made here and never leaves. The token names the server's authority: another server learns
    nothing of it.
    """
    import asyncio
    import sys

    from fleetplane.domains.boards.agent.root import BoardAgentSettings, join_board

    given = sys.stdin.read() if token == "-" else token  # noqa: S105  # a dash is no secret
    membership = asyncio.run(
        join_board(
            BoardAgentSettings(**options),
            given.strip(),
            server,
            server_name=server_name,
            replace_identity=replace_identity,
            wait_seconds=wait_seconds or 0.0,
            told=lambda words: click.echo(words, err=True),
        )
    )
    click.echo(f"joined {membership.server} as board {membership.node_id} ({membership.name})")


@board.command()
@_state_dir
@_self
@_set(
    "--address",
    "addresses",
    multiple=True,
    metavar="ADDRESS",
    help="Address to listen on; repeatable. Default: all.",
)
@_set("--port", type=click.IntRange(0, 65_535), help="Port to listen on. Default: 9091; 0 picks a free one.")
@_set(
    "--plaintext-listen",
    default="",
    metavar="127.0.0.1:PORT",
    help="Also serve the original controllers' service, without TLS, on this machine.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def run(**options: Any) -> None:
    """Serve this board until stopped. Works alone while the server is away; pins are safe when it ends."""
    from fleetplane.agents.running import run_agent
    from fleetplane.domains.boards.agent.root import BoardAgentSettings, run_board_agent

    run_agent(run_board_agent, BoardAgentSettings(**options))


@board.command()
@_state_dir
@format_option
def status(*, state_dir: Path, output: Format) -> None:
    """Show who this board is, until when its certificate holds, and whether its agent runs."""
    from fleetplane.domains.boards.agent.membership import BoardIdentityFolder, overview

    found = overview(BoardIdentityFolder(state_dir))
    rows = [[Cell(text=name.replace("_", " ")), Cell(text=str(value))] for name, value in found.items()]
    emit(output, found, PrintedTable(columns=("WHAT", "IS"), rows=rows, empty="nothing is known"))


@board.command()
@_state_dir
@click.confirmation_option(prompt="Forget who this board is?")
def leave(*, state_dir: Path) -> None:
    """Forget the server: remove key and certificate. The server is not told; delete the board there."""
    from fleetplane.domains.boards.agent.membership import BoardIdentityFolder

    folder = BoardIdentityFolder(state_dir)
    with folder.alone():
        for path in folder.forget():
            click.echo(f"removed {path}")
