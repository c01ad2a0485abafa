"""Choosing the worker that runs an execution, passing the execution on, and its events back.

A worker says itself where it is reached, so only what the operators allowed is dialled: a host and a port,
and never another kind of address. The request goes on as it came: its envelope is the proof that the worker
checks for itself. One hop is allowed, so that two servers that hold each other for workers do not pass a
call round in circles.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
import msgspec

from fleetplane.domains.edge.kinds import NodeResources, Worker, WorkerRole, WorkerState
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.gen.aegis.runtime.v1 import runtime_pb2
from fleetplane.kernel.errors import FailedPrecondition, SettingsError

RUNS_EXECUTIONS = frozenset({WorkerRole.WORKER, WorkerRole.HYBRID})


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last heartbeat."""

    at_ns: int
    state: WorkerState
    active_executions: int = 0
    memory_gb: int = 0
    cpu_percent: float = 0.0


def state_of(
    worker: Worker, report: WorkerReport | None, *, now_ns: int, stale_seconds: float
) -> WorkerState:
    """By what it says of itself, unless it has not said anything for too long."""
    if report is None or now_ns - report.at_ns >= stale_seconds * 1e9:
        return WorkerState.UNHEALTHY
    return WorkerState.DRAINING if worker.spec.draining else report.state


def suffices(offered: NodeResources, needed: NodeResources) -> bool:
    return (
        offered.gpu_count >= needed.gpu_count
        and offered.vram_gb >= needed.vram_gb
        and offered.cpu_cores >= needed.cpu_cores
        and offered.memory_gb >= needed.memory_gb
        and set(needed.runtimes) <= set(offered.runtimes)
    )


def preferred(workers: Iterable[Worker], tags: Iterable[str]) -> Sequence[Worker]:
    """Those that have all of the tags; everyone, if nobody has."""
    everyone, wanted = list(workers), set(tags)
    return [worker for worker in everyone if wanted <= set(worker.spec.tags)] or everyone


HOP_FIELD = "x-fleetplane-forwarded"
EXECUTION_SECONDS = 3600.0
"""For one execution, unless its caller says less."""
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
TLS_PORT = 443
_ADDRESS: Final = re.compile(
    r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::(\d{1,5}))?/?"
)
_ENTRY: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]+\](?:/\d+)?|(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9./-]*[A-Za-z0-9])?)(?::(\d{1,5}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parsed(text: str) -> WorkerAddress | None:
    """A worker's address; None if it is not a host with a port. `https://` and port 443 mean TLS. Pure."""
    matched = _ADDRESS.fullmatch(text.strip())
    if matched is None:
        return None
    scheme, host, written = matched.groups()
    port = int(written) if written else TLS_PORT
    if not 0 < port < 65536:
        return None
    tls = scheme == "https" or (scheme is None and port == TLS_PORT)
    return WorkerAddress(host=host.strip("[]").lower(), port=port, tls=tls)


def check_entry(entry: str) -> str:
    """An entry of `edge.forward_to`, if it is one. Pure."""
    if _ENTRY.fullmatch(entry) is None:
        raise SettingsError(f"edge.forward_to: {entry!r} is no host, *.domain or network, with a port or not")
    return entry


def permitted(address: str, allowed: Iterable[str]) -> WorkerAddress:
    """Where a worker is reached, if operators allowed to dial that. Pure."""
    found = parsed(address)
    if found is None or not any(_covers(entry, found) for entry in allowed):
        raise FailedPrecondition(
            f"executions are not forwarded to {address[:200]!r}", hint="add it to edge.forward_to"
        )
    return found


def _covers(entry: str, address: WorkerAddress) -> bool:
    matched = _ENTRY.fullmatch(entry)
    if matched is None:
        return False
    host, port = matched[1].replace("[", "").replace("]", "").lower(), matched[2]
    if port is not None and int(port) != address.port:
        return False
    try:
        network = ipaddress.ip_network(host, strict=False)
    except ValueError:
        if host.startswith("*."):
            return address.host.endswith(host[1:])
        return address.host == host
    try:
        return ipaddress.ip_address(address.host) in network
    except ValueError:
        return False  # a name, which may lead anywhere


async def forward(
    request: pb.ForwardExecutionRequest, address: WorkerAddress, *, seconds: float | None
) -> AsyncIterator[runtime_pb2.ExecutionEvent]:
    """The events of an execution, as its worker tells them; raises the worker's own status."""
    timeout = min(seconds, EXECUTION_SECONDS) if seconds is not None else EXECUTION_SECONDS
    async with _channel(address) as channel:
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        call = stub.ForwardExecution(request, timeout=timeout, metadata=((HOP_FIELD, "1"),))
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()


def refuse_second_hop(hop: bytes | None) -> None:
    if hop is not None:
        raise FailedPrecondition("the execution was forwarded here, and nothing here runs it")


@asynccontextmanager
async def _channel(address: WorkerAddress) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES), ("grpc.enable_http_proxy", 0)]
    if address.tls:
        made = grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(), options=options)
    else:
        made = grpc.aio.insecure_channel(address.target, options=options)
    async with made as channel:
        yield channel
