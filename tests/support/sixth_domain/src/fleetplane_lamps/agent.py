"""The node side: one lamp of this machine. Loads nothing of the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import grpc

from fleetplane import logs
from fleetplane.agents.running import until_stopped
from fleetplane.kernel.clock import Backoff, SystemClock
from fleetplane.node import link
from fleetplane.node.connection import ConnectionAttempt, ConnectionRetries, KeepConnected
from fleetplane.node.link import LinkLost, LinkOptions
from fleetplane_lamps import contract

CALL_SECONDS = 10.0
OPTIONS = LinkOptions(
    refusals=frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})
)
"""These answers end the agent; after all others, and without any, it tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LampAgentSettings:
    address: str
    name: str
    lit: bool
    interval_seconds: float = 10.0


async def run_lamp_agent(settings: LampAgentSettings) -> None:
    """Report until SIGTERM or SIGINT."""
    logs.configure(level="info", log_format="text")
    log = logs.logger(agent="lamp", lamp=settings.name)

    def lost(why: Exception, seconds: float) -> None:
        log.warning("server_lost", error=str(why), retry_in_seconds=round(seconds, 2))

    connection = KeepConnected(
        endings=(LinkLost,), waits=ConnectionRetries(backoff=Backoff()), lost=lost, clock=SystemClock()
    )
    await until_stopped(connection.run(partial(_report, settings)))


async def _report(settings: LampAgentSettings, attempt: ConnectionAttempt) -> None:
    async with link.channel(settings.address, link.PLAINTEXT, OPTIONS) as channel:
        call = channel.unary_unary(
            f"/{contract.SERVICE.full_name}/Report",
            request_serializer=contract.ReportRequest.SerializeToString,
            response_deserializer=contract.ReportResponse.FromString,
        )
        request = contract.ReportRequest(name=settings.name, lit=settings.lit)
        while True:
            try:
                await call(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise link.translated(error, OPTIONS) from error
            attempt.established()
            await asyncio.sleep(settings.interval_seconds)
