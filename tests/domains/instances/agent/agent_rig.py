"""A machine with the folders of an agent, and the agent on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from support.instances.instance_server_double import INSTANCE_ID, InstanceServerDouble, make_nonce

from fleetplane.domains.instances.agent.agent import InstanceAgent
from fleetplane.domains.instances.agent.root import InstanceAgentSettings, make_instance_agent
from fleetplane.domains.instances.agent.session import Pauses
from fleetplane.kernel.clock import Backoff

QUICK = Backoff(first_seconds=0.02, ceiling_seconds=0.2)
NO_PAUSES = Pauses(files_seconds=0.02, keys_seconds=0.02, reports_seconds=0.02)


class Rig:
    """The folders, the settings, and the agent that a test runs on them."""

    def __init__(self, folder: Path, server: InstanceServerDouble) -> None:
        self.identity, self.keys, self.recv = (folder / name for name in ("identity", "keys", "recv"))
        for made in (self.identity, self.keys, self.recv):
            made.mkdir(mode=0o700)
        (self.identity / "ca.crt").write_bytes(server.ca.pem)
        self.give_nonce()
        self.settings = InstanceAgentSettings(
            registration_address=server.address("registration"),
            agent_address=server.address("agent"),
            instance_id=INSTANCE_ID,
            identity_dir=self.identity,
            keys_dir=self.keys,
            recv_dir=self.recv,
            report_interval_seconds=30.0,
            hostname="testling",
        )

    def give_nonce(self, nonce: str | None = None) -> None:
        (self.identity / "nonce.jwt").write_text(nonce or make_nonce())

    def agent(self, *, interval_seconds: float | None = None, **options: Any) -> InstanceAgent:
        settings = self.settings
        if interval_seconds is not None:
            settings = replace(settings, report_interval_seconds=interval_seconds, spot_interval_seconds=0.02)
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
        return make_instance_agent(settings, log, backoff=QUICK, pauses=NO_PAUSES, **options)

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[InstanceAgent]:
        agent = self.agent(**options)
        task = asyncio.create_task(agent.run())
        try:
            yield agent
            if task.done():
                task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def read(self, name: str) -> bytes:
        return (self.identity / name).read_bytes()

    @property
    def config_hash(self) -> str:
        return self.read("config.hash").decode()
