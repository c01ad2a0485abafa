"""`fleetplane agent board`: this board, with its pins, programs and logs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleetplane import __version__, logs
from fleetplane.agents.running import until_stopped
from fleetplane.kernel.clock import SystemClock

if TYPE_CHECKING:  # the board's agent brings a server for its own port along, which the others do without
    from fleetplane.domains.boards.agent.assembly import BoardAgentParts
    from fleetplane.domains.boards.agent.membership import Membership
    from fleetplane.node.upgrade.upgrader import Upgrader


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardAgentSettings:
    state_dir: Path
    config: Path | None = None
    simulate: bool = False
    """Pins and buses without hardware, and an identity of its own for each state directory."""
    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int | None = None
    plaintext_listen: str = ""
    log_format: str = "text"
    log_level: str = "info"


async def run_board_agent(settings: BoardAgentSettings, upgrader: Upgrader | None = None) -> None:
    """Serve this board until SIGTERM or SIGINT."""
    from fleetplane.domains.boards.agent.assembly import run_node

    logs.configure(level=settings.log_level, log_format=settings.log_format)
    parts = board_parts(settings)
    if upgrader is not None:
        parts = replace(parts, check_in=upgrader.follow)
    # Before the last of the processors, which makes a line of text of an event.
    logs.observe(parts.ring)
    parts.folder.make()
    with parts.folder.alone():
        parts.log.info("agent_started", version=parts.version, state=str(parts.folder.root))
        await until_stopped(run_node(parts), upgrader)
    parts.log.info("agent_stopped")


async def join_board(
    settings: BoardAgentSettings,
    token: str,
    server: str,
    *,
    server_name: str = "",
    replace_identity: bool = False,
    wait_seconds: float = 0.0,
    told: Callable[[str], None] = lambda _: None,
) -> Membership:
    """Make this board a member of a server's fleet; who it is is on disk when this returns."""
    from fleetplane.domains.boards.agent.assembly import introduced_now
    from fleetplane.domains.boards.agent.registration import Joiner

    parts = board_parts(settings)
    parts.folder.make()
    with parts.folder.alone():
        me = await asyncio.to_thread(introduced_now, parts, server)
        joiner = Joiner(parts.folder, parts.clock)
        return await joiner.join(
            token,
            server,
            replace(me, agent_version=parts.version),
            server_name=server_name,
            replace_identity=replace_identity,
            wait_seconds=wait_seconds,
            told=told,
        )


def board_parts(settings: BoardAgentSettings) -> BoardAgentParts:
    from fleetplane.domains.boards.agent import config as node_config
    from fleetplane.domains.boards.agent.assembly import BoardAgentParts
    from fleetplane.domains.boards.agent.logs.logs import LogRing
    from fleetplane.domains.boards.agent.membership import BoardIdentityFolder

    clock = SystemClock()
    config = node_config.load(settings.config)
    changes = {"name": settings.name} if settings.name else {}
    listen = {
        "addresses": settings.addresses,
        "port": settings.port,
        "plaintext": settings.plaintext_listen,
    }
    config = msgspec.structs.replace(
        config,
        node=msgspec.structs.replace(config.node, **changes),
        listen=msgspec.structs.replace(
            config.listen, **{key: value for key, value in listen.items() if value not in ((), None, "")}
        ),
        gpio=msgspec.structs.replace(config.gpio, driver=node_config.GpioDriverName.SIMULATED)
        if settings.simulate
        else config.gpio,
    ).check()
    return BoardAgentParts(
        folder=BoardIdentityFolder(settings.state_dir.absolute()),
        config=config,
        version=__version__,
        clock=clock,
        log=logs.logger(agent="board"),
        ring=LogRing(clock, run=clock.token_bytes(4).hex(), hostname=socket.gethostname()),
    )
