"""What the services ask of parts that are built elsewhere, and what stands in where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from fleetplane.domains.boards.kinds import BoardRole


class ProvisioningAction(StrEnum):
    PROVISION = "provision"
    DEPROVISION = "deprovision"
    CHECK = "check"
    CANCEL = "cancel"


class ProvisioningState(StrEnum):
    QUEUED = "queued"
    PREFLIGHT = "preflight"
    PREPARING = "preparing"
    REBOOTING = "rebooting"
    INSTALLING = "installing"
    JOINING = "joining"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningOrder:
    """What somebody wants done to a board, or to a cluster of them."""

    action: ProvisioningAction
    board_id: int | None = None
    """The board; for a cluster, its first master. None if only the cluster was named."""
    cluster_id: int | None = None
    role: BoardRole | None = None
    worker_ids: tuple[int, ...] = ()
    k3s_version: str = ""
    k3s_channel: str = ""
    k3s_config: Mapping[str, str] = field(default_factory=dict)
    credential_ref: str = ""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """By board, the SSH address that the caller confirms."""
    request_id: str = ""
    """Asking again with the same one asks for the same operation."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningStep:
    name: str
    state: ProvisioningState
    message: str = ""
    started_at_ns: int | None = None
    finished_at_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningAnswer:
    """How an operation stands when it is asked about."""

    success: bool
    """That it was accepted, or is what was asked for; not that it has ended."""
    message: str
    operation_id: str = ""
    state: ProvisioningState = ProvisioningState.QUEUED
    steps: Sequence[ProvisioningStep] = ()
    reason: str = ""


class Provisioner(Protocol):
    async def request(self, order: ProvisioningOrder, *, actor: str) -> ProvisioningAnswer:
        """Begin, find or cancel an operation; raises `NotFound` for a board or cluster that is not there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardMeasurements:
    """One sample of a board's metrics."""

    at_ns: int
    gauges: Mapping[str, float]
    counters: Mapping[str, float]


class MetricsIntake(Protocol):
    def metrics(self, board: int, sample: BoardMeasurements) -> bool:
        """Take a sample, or say that there is no room for it. Never waits."""
        ...


class DiscardMeasurements:
    def metrics(self, _board: int, _sample: BoardMeasurements) -> bool:
        return True
