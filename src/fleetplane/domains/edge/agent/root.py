"""`fleetplane agent edge`: this machine behind NAT."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetplane import __version__, environment, logs
from fleetplane.domains.edge.agent.assembly import DaemonParts, Reach
from fleetplane.domains.edge.agent.assembly import assemble as assemble_edge
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.agent.session import Leaving
from fleetplane.domains.edge.agent.tools import registry as edge_tools
from fleetplane.kernel.clock import SystemClock
from fleetplane.node.connection import no_check_in, together
from fleetplane.node.figures import FigureReporter, HostFigures, Measured
from fleetplane.node.tasks import in_thread

if TYPE_CHECKING:
    from fleetplane.node.upgrade.upgrader import Upgrader

UPGRADE_GRACE_SECONDS: Final = 60.0
"""For running commands, before the daemon is started anew as another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAgentSettings:
    state_dir: Path
    user_config: Path | None = None
    """A configuration that other programs share; the state directory's goes before it."""
    reach: Reach = field(default_factory=Reach)
    tolerate_unsigned: bool = False
    """Obey a server that gives no proof though its key is known. A wrong proof is never obeyed."""
    figures: bool = True
    """Tell the server processor, memory, disk and load of this machine."""
    grace_seconds: float = 10.0
    """For running commands, after SIGTERM."""
    log_format: str = "text"
    log_level: str = "info"


async def run_edge_agent(settings: EdgeAgentSettings, upgrader: Upgrader | None = None) -> None:
    """Serve this machine until SIGTERM, SIGINT or the server's word; SIGHUP reads the configuration anew."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log = logs.logger(agent="edge")
    folder = StateFolder(settings.state_dir.absolute())
    host = HostFigures(folder.root)

    async def measure() -> Measured:
        node = made.node
        own = {"runningCommands": float(node.work.active), "waitingResults": float(len(node.outbox))}
        return {"": {**await in_thread(host.look), **own}}

    reporter = FigureReporter(measure, clock=SystemClock(), log=lambda: log)
    with folder.alone():
        parts = DaemonParts(
            folder=folder,
            tools=edge_tools.load(),
            environment=environment.inherited(),
            clock=SystemClock(),
            log=log,
            user_config=settings.user_config,
            tolerate_unsigned=settings.tolerate_unsigned,
            reach=settings.reach,
            check_in=together(
                upgrader.follow if upgrader is not None else no_check_in,
                reporter.follow if settings.figures else no_check_in,
            ),
            protected=(upgrader.root,) if upgrader is not None else (),
        )
        made = await asyncio.to_thread(assemble_edge, parts)

        def leave() -> None:
            if upgrader is not None:
                upgrader.stop()
            made.leaving.ask(grace_seconds=settings.grace_seconds, reason="the daemon stops")

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave)
        loop.add_signal_handler(signal.SIGHUP, made.daemon.reload)
        log.info("agent_started", version=__version__, state=str(folder.root))
        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(_leave_for(upgrader, made.leaving, settings.grace_seconds))
                await made.daemon.run()
                waiting.cancel()
        finally:
            made.journal.close()
    log.info("agent_stopped")


async def _leave_for(upgrader: Upgrader | None, leaving: Leaving, grace_seconds: float) -> None:
    """Leave once another version is to be tried."""
    if upgrader is not None:
        await upgrader.ready.wait()
        grace = max(grace_seconds, UPGRADE_GRACE_SECONDS)
        leaving.ask(grace_seconds=grace, reason="the daemon is upgraded")
