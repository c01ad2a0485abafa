"""Which worker gets an execution, and in which state workers are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fleetplane.domains.edge.kinds import NodeResources, Worker, WorkerRole, WorkerState

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
