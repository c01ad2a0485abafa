"""`fleetplane agent edge`: this machine behind NAT."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog

from fleetplane import logs
from fleetplane.domains.edge.agent.assembly import Parts, Reach
from fleetplane.domains.edge.agent.assembly import assemble as assemble_edge
from fleetplane.domains.edge.agent.state import StateFolder
from fleetplane.domains.edge.agent.tools import registry as edge_tools
from fleetplane.kernel.clock import SystemClock
from fleetplane.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAgentSettings:
    state_dir: Path
    user_config: Path | None = None
    """A configuration that other programs share; the state directory's goes before it."""
    reach: Reach = field(default_factory=Reach)
    tolerate_unsigned: bool = False
    """Obey a server that gives no proof though its key is known. A wrong proof is never obeyed."""
    grace_seconds: float = 10.0
    """For running commands, after SIGTERM."""
    log_format: str = "text"
    log_level: str = "info"


async def run_edge_agent(settings: EdgeAgentSettings) -> None:
    """Serve this machine until SIGTERM, SIGINT or the server's word; SIGHUP reads the configuration anew."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(agent="edge")
    folder = StateFolder(settings.state_dir.absolute())
    with folder.alone():
        parts = Parts(
            folder=folder,
            tools=edge_tools.load(),
            environment=Settings().inherited,
            clock=SystemClock(),
            log=log,
            user_config=settings.user_config,
            tolerate_unsigned=settings.tolerate_unsigned,
            reach=settings.reach,
        )
        made = await asyncio.to_thread(assemble_edge, parts)
        leave = partial(made.leaving.ask, grace_seconds=settings.grace_seconds, reason="the daemon stops")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave)
        loop.add_signal_handler(signal.SIGHUP, made.daemon.reload)
        log.info("agent_started", version=version("fleetplane"), state=str(folder.root))
        try:
            await made.daemon.run()
        finally:
            made.journal.close()
    log.info("agent_stopped")
