"""A daemon of ours in this process: enrolled with a server, in a folder of its own, in a hurry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import yaml
from support.edge.edge_server_double import EdgeServerDouble

from fleetplane.domains.edge.agent.assembly import Assembled, DaemonParts, Reach, assemble
from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.daemon import Pace
from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.agent.tools import registry
from fleetplane.domains.edge.agent.tools.contract import Tool
from fleetplane.kernel.clock import SystemClock

PACE = Pace(steady_seconds=5.0, renewal_look_seconds=0.05, renewal_pause_seconds=0.1, wait_scale=0.05)


async def enrolled(folder: Path, server: EdgeServerDouble, **options: Any) -> StateFolder:
    state = StateFolder(folder)
    enroller = Enroller(folder=state, connect=Reach(authority=server.authority).channel, clock=SystemClock())
    await enroller.enrol(EnrolmentRequest(token=server.enrollment_token(), **options))
    return state


def configure(state: StateFolder, changes: Mapping[str, Any]) -> None:
    """Write more into the owner's configuration."""
    document = config.merge(state.load_document(), changes)
    state.store_document(yaml.safe_dump(document).encode())


def edge_section(**values: Any) -> dict[str, Any]:
    return {"spec": {"cluster": {"edge": values}}}


@asynccontextmanager
async def running(
    state: StateFolder,
    *,
    tools: Mapping[str, Tool] | None = None,
    authority: Path | None = None,
    environment: Mapping[str, str] | None = None,
    tolerate_unsigned: bool = False,
    settled_seconds: float = 30.0,
    pace: Pace = PACE,
) -> AsyncIterator[Assembled]:
    """A daemon that is killed at the end, unless it has left by itself."""
    made = assemble(
        DaemonParts(
            folder=state,
            tools=registry.load(()) if tools is None else tools,
            environment=os.environ if environment is None else environment,
            clock=SystemClock(),
            log=structlog.get_logger(),
            reach=Reach(authority=authority),
            pace=pace,
            settled_seconds=settled_seconds,
            tolerate_unsigned=tolerate_unsigned,
        )
    )
    task = asyncio.ensure_future(made.daemon.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        made.journal.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
