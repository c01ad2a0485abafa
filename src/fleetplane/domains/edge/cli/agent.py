"""`fleetplane agent edge`: the daemon of a machine behind NAT, from enrolment to its service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION, LOG_LEVELS, Label

if TYPE_CHECKING:
    from fleetplane.domains.edge.agent.assembly import Reach
    from fleetplane.domains.edge.agent.identity.rotation import Rotator
    from fleetplane.domains.edge.agent.service_unit import SystemUnit

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def _set(name: str, *target: str, **options: Any) -> Callable[[F], F]:
    variable = "FLEETPLANE_EDGE_AGENT_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *target, envvar=variable, show_envvar=True, **options)


def _state_dir(command: F) -> F:
    return _set(
        "--state-dir",
        type=FOLDER,
        default="~/.aegis/edge",
        show_default=True,
        callback=lambda _context, _parameter, value: Path(value).expanduser().absolute(),
        help="Key, token and configuration.",
    )(command)


def _reach(command: F) -> F:
    command = _set(
        "--authority", type=FILE, help="CA certificates to verify the server against. Default: the system's."
    )(command)
    return _set(
        "--plaintext/--tls",
        "plaintext",
        default=None,
        help="Turn TLS off or on. Default without a scheme: on for port 443 or none, else off.",
    )(command)


@click.group()
def edge() -> None:
    """Serve this machine from behind NAT: run tools as its owner allows."""


@edge.command()
@click.argument("token")
@_state_dir
@_reach
@click.option("--force", is_flag=True, help="Replace the key and the configuration that are there.")
@click.option("--keep-existing", is_flag=True, help="Use the key and the configuration that are there.")
@click.option(
    "--dry-run", is_flag=True, help="Print what would be done; write nothing and contact no server."
)
@click.option("--minimal", is_flag=True, help="Write the shortest configuration, with one security context.")
@click.option("--label", "labels", type=Label(), multiple=True, metavar="KEY=VALUE", help="Repeat it.")
def enroll(
    *,
    token: str,
    state_dir: Path,
    authority: Path | None,
    plaintext: bool | None,
    force: bool,
    keep_existing: bool,
    dry_run: bool,
    minimal: bool,
    labels: tuple[tuple[str, str], ...],
) -> None:
    """Enrol this machine with TOKEN (- reads it from stdin).

    The token says where the server is, and for which tenant the machine comes. The server's key is
    kept, and from then on only commands that it signed are obeyed.
    """
    import asyncio
    import sys

    from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest, Existing, plan
    from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
    from fleetplane.kernel.clock import SystemClock

    if force and keep_existing:
        raise click.UsageError("--force and --keep-existing contradict each other")
    existing = Existing.FORCE if force else Existing.KEEP if keep_existing else Existing.REFUSE
    folder, clock = StateFolder(state_dir), SystemClock()
    given = sys.stdin.read() if token == "-" else token  # noqa: S105  # a dash is no secret
    request = EnrolmentRequest(
        token=given.strip(),
        existing=existing,
        minimal=minimal,
        labels=dict(labels),
    )
    if dry_run:
        for step in plan(folder, request, now=clock.now_ns() / 1e9).steps(folder):
            click.echo(f"would {step}")
        return
    enroller = Enroller(folder=folder, connect=_made_reach(authority, plaintext).channel, clock=clock)
    done = asyncio.run(enroller.enrol(request))
    if done.already:
        click.echo(f"already enrolled: node {done.node_id}, in {state_dir}")
        return
    click.echo(f"enrolled node {done.node_id} of tenant {done.said.tid} at {done.said.cep}")


@click.command()
@_state_dir
@_reach
@_set(
    "--user-config",
    type=FILE,
    default="~/.aegis/config.yaml",
    show_default=True,
    help="Configuration file that programs of this user share.",
)
@_set(
    "--tolerate-unsigned",
    is_flag=True,
    help="Accept commands without the server's signature; a wrong signature is always refused.",
)
@_set(
    "--no-figures",
    is_flag=True,
    help="Do not tell the server processor, memory, disk and load of this machine.",
)
@_set(
    "--grace",
    "grace_seconds",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long running commands may take after SIGTERM.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def run(
    *, user_config: Path, authority: Path | None, plaintext: bool | None, no_figures: bool, **options: Any
) -> None:
    """Keep a stream to the server and run what comes, until stopped.

    SIGHUP reads the configuration anew. Ends with 0 when it was told to shut down.
    """
    from fleetplane.agents.running import run_agent
    from fleetplane.domains.edge.agent.root import EdgeAgentSettings, run_edge_agent

    settings = EdgeAgentSettings(
        user_config=user_config.expanduser(),
        reach=_made_reach(authority, plaintext),
        figures=not no_figures,
        **options,
    )
    run_agent(run_edge_agent, settings)


edge.add_command(run, "run")
edge.add_command(run, "daemon")


@edge.command()
@_state_dir
@format_option
def status(*, state_dir: Path, output: Format) -> None:
    """Show who this machine is, until when its token holds, and whether its daemon runs."""
    from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
    from fleetplane.domains.edge.agent.status import overview

    found = overview(StateFolder(state_dir))
    rows = [[Cell(text=name.replace("_", " ")), Cell(text=str(value))] for name, value in found.items()]
    emit(output, found, PrintedTable(columns=("WHAT", "IS"), rows=rows, empty="nothing is known"))


@edge.command()
@_state_dir
@click.option("--purge", is_flag=True, help="Remove the key and the configuration as well.")
@click.option("--force", is_flag=True, help="Log out even while the daemon runs.")
def logout(*, state_dir: Path, purge: bool, force: bool) -> None:
    """Forget the server: remove the token and everything that came with it.

    The server is not told; revoke the node there.
    """
    from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
    from fleetplane.domains.edge.agent.status import forget

    for path in forget(StateFolder(state_dir), purge=purge, force=force):
        click.echo(f"removed {path}")


@edge.command()
@_state_dir
@_reach
@click.option(
    "--keep-old",
    "keep_old_seconds",
    type=DURATION,
    default="24h",
    show_default=True,
    help="Keep the old key in archive/.",
)
def rotate(
    *, state_dir: Path, authority: Path | None, plaintext: bool | None, keep_old_seconds: float
) -> None:
    """Replace this machine's key. A running daemon takes the new one over by itself."""
    import asyncio

    rotator = _rotator(state_dir, authority, plaintext)
    done = asyncio.run(rotator.rotate(keep_old_seconds=keep_old_seconds))
    click.echo(f"rotated the key of node {done.identity.node_id}; the former is in {done.archived}")


@edge.command()
@_state_dir
@_reach
def refresh(*, state_dir: Path, authority: Path | None, plaintext: bool | None) -> None:
    """Renew this machine's token; also works with one that has expired."""
    import asyncio
    from datetime import UTC, datetime

    done = asyncio.run(_rotator(state_dir, authority, plaintext).refresh())
    expires = done.identity.expires_at
    until = f" until {datetime.fromtimestamp(expires, tz=UTC):%F %T} UTC" if expires is not None else ""
    click.echo(f"node {done.identity.node_id} has a new token{until}")


@edge.group()
def service() -> None:
    """Run the daemon as a systemd unit of this user."""


@service.command()
@_state_dir
@_reach
@click.option("--force", is_flag=True, help="Replace a unit that is there.")
@click.option("--no-start", is_flag=True, help="Write the unit; start nothing.")
@click.option("--print", "show", is_flag=True, help="Print the unit; write nothing.")
def install(
    *,
    state_dir: Path,
    authority: Path | None,
    plaintext: bool | None,
    force: bool,
    no_start: bool,
    show: bool,
) -> None:
    """Install the unit, start the daemon now and at every boot."""
    from fleetplane.domains.edge.agent.service_unit import unit

    options = ["--authority", str(authority.absolute())] if authority is not None else []
    options += [] if plaintext is None else ["--plaintext" if plaintext else "--tls"]
    if show:
        click.echo(unit(state=state_dir, options=options), nl=False)
        return
    found = _service()
    for warning in found.install(state=state_dir, options=options, force=force, start=not no_start):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"installed {found.path}")


@service.command()
def uninstall() -> None:
    """Stop the daemon and remove the unit."""
    found = _service()
    click.echo(f"removed {found.path}" if found.uninstall() else f"there is no {found.path}")


@service.command("status")
def service_status() -> None:
    """Show whether the unit is installed and running."""
    click.echo(_service().status())


def _made_reach(authority: Path | None, plaintext: bool | None) -> Reach:
    from fleetplane.domains.edge.agent.assembly import Reach

    return Reach(authority=authority, plaintext=plaintext)


def _rotator(state_dir: Path, authority: Path | None, plaintext: bool | None) -> Rotator:
    import structlog

    from fleetplane.domains.edge.agent.config import document as config
    from fleetplane.domains.edge.agent.identity.rotation import Rotator
    from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
    from fleetplane.kernel.clock import SystemClock

    folder = StateFolder(state_dir)
    found = config.decode(folder.load_document(), str(folder.config))
    folder.use(found)
    return Rotator(
        folder=folder,
        config=lambda: found,
        connect=lambda: _made_reach(authority, plaintext).channel(found.endpoint),
        clock=SystemClock(),
        log=structlog.get_logger(),
    )


def _service() -> SystemUnit:
    import subprocess

    from fleetplane.domains.edge.agent.service_unit import SystemUnit, default_folder

    def call(words: Any) -> int:
        try:
            return subprocess.run(words, check=False, timeout=60, capture_output=True).returncode  # noqa: S603
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return 127

    return SystemUnit(folder=default_folder(), run=call)
