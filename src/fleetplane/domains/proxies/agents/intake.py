"""Where agents' measurements and log lines go."""

from __future__ import annotations

from typing import Protocol

from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


class Intake(Protocol):
    """Takes batches of telemetry. An error is sent to the agent, which keeps the batch and sends it again."""

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None: ...

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None: ...


class DiscardReports:
    """Takes everything and keeps nothing."""

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None: ...

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None: ...
