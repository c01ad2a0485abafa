"""The truth about one GPU, decided from what the driver said.

Pure: facts and `now` go in, a `HealthVerdict` comes out. Nothing here knows NVML, threads or gRPC,
and nothing here recovers a GPU by the passing of time: after an error only a new enumeration
that finds the driver answering and no page retirement pending makes a GPU ready again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType

from fleetplane.domains.gpus import xids

GpuUuid = NewType("GpuUuid", str)

CONDITION_TYPE = "NVMLReady"
"""The one condition this provider owns. Others belong to other providers and are left alone."""


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class HealthReason(StrEnum):
    INITIALIZED = "Initialized"
    RECOVERED = "Recovered"
    XID_ERROR = "XidError"
    GPU_LOST = "GPULost"
    NOT_ANSWERING = "NotAnswering"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSighting:
    """What one enumeration saw of one GPU."""

    uuid: GpuUuid
    product: str
    memory_bytes: int | None
    """None where the GPU has no memory of its own to speak of, or did not say."""
    answering: bool = True
    """The driver answered when asked for the GPU's memory."""
    lost: bool = False
    retirement_pending: bool = False
    """Memory pages wait for a reset to be taken out of use."""
    parent: GpuUuid | None = None
    """The GPU that this one is a MIG device of."""
    instance: int | None = None
    """Its GPU instance there, which events name."""

    @property
    def sound(self) -> bool:
        """Good enough to take back an earlier complaint."""
        return self.answering and not self.lost and not self.retirement_pending


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    status: ConditionStatus
    reason: str
    message: str
    since_ns: int
    """When `status` last changed, in nanoseconds since the Unix epoch."""
    action: str = ""
    """What a person or a controller should do about it, in the words of NVIDIA's XID catalogue."""


def format_size(size_bytes: int | None) -> str:
    """Sizes as people say them, by powers of 1024: `40.0 GB`."""
    if size_bytes is None:
        return "memory size unknown"
    for unit, power in (("GB", 3), ("MB", 2), ("KB", 1)):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.1f} {unit}"
    return f"{size_bytes} B"


def on_enumeration(sighting: GpuSighting, *, now_ns: int) -> HealthVerdict:
    """The verdict on a GPU of which nothing was known before."""
    if sighting.lost:
        return _lost(now_ns)
    if not sighting.answering:
        return HealthVerdict(
            status=ConditionStatus.UNKNOWN,
            reason=HealthReason.NOT_ANSWERING,
            message="The driver lists the GPU but does not answer for it",
            since_ns=now_ns,
        )
    return HealthVerdict(
        status=ConditionStatus.TRUE,
        reason=HealthReason.INITIALIZED,
        message=f"GPU enumerated via NVML: {sighting.product} ({format_size(sighting.memory_bytes)})"
        + (f", part of {sighting.parent}" if sighting.parent else ""),
        since_ns=now_ns,
    )


def reconcile(own: HealthVerdict, sighting: GpuSighting, earlier: HealthVerdict | None) -> HealthVerdict:
    """Join what we see now with what was said of the GPU before this enumeration.

    A complaint of ours stands whatever was said earlier. A ready GPU that was called otherwise
    is `Recovered` if it is sound, and stays condemned in the earlier words if it is not.
    """
    if earlier is None:
        return own
    if earlier.status == own.status:
        return replace(own, since_ns=min(own.since_ns, earlier.since_ns))
    if own.status is not ConditionStatus.TRUE:
        return own
    if not sighting.sound:
        return earlier
    return replace(
        own,
        reason=HealthReason.RECOVERED,
        message=f"GPU answers again after {earlier.reason or earlier.status}: "
        f"{sighting.product} ({format_size(sighting.memory_bytes)})",
    )


def on_xid(verdict: HealthVerdict, xid: int, *, ignored: frozenset[int], now_ns: int) -> HealthVerdict:
    if not xids.condemns(xid, ignored) or verdict.reason == HealthReason.GPU_LOST:
        return verdict  # a lost GPU is worse off than any XID says
    message = f"Critical XID error {xid} ({xids.describe(xid)}) detected"
    action = xids.graver(verdict.action, xids.action(xid))
    return replace(_unready(verdict, HealthReason.XID_ERROR, message, now_ns), action=action)


def on_lost(verdict: HealthVerdict, *, now_ns: int) -> HealthVerdict:
    if verdict.reason == HealthReason.GPU_LOST and verdict.status is ConditionStatus.FALSE:
        return verdict
    lost = _lost(now_ns)
    return replace(_unready(verdict, HealthReason.GPU_LOST, lost.message, now_ns), action=lost.action)


def on_vanished(verdict: HealthVerdict, *, now_ns: int) -> HealthVerdict:
    """The verdict on a GPU that an earlier enumeration saw and this one does not."""
    gone = _unready(verdict, HealthReason.GPU_LOST, "GPU is no longer visible to NVML", now_ns)
    return replace(gone, action=_lost(now_ns).action)


def lost_among(answering: Mapping[GpuUuid, bool]) -> Collection[GpuUuid]:
    """Which of our GPUs are meant when the driver says that *a* GPU is lost.

    The driver does not name it. Those that stopped answering are the lost ones; when all still
    answer nobody can tell, and none of them may be called healthy.
    """
    silent = [uuid for uuid, answers in answering.items() if not answers]
    return silent or list(answering)


def _lost(now_ns: int) -> HealthVerdict:
    return HealthVerdict(
        status=ConditionStatus.FALSE,
        reason=HealthReason.GPU_LOST,
        message="GPU is lost error detected",
        since_ns=now_ns,
        action=xids.action(xids.FALLEN_OFF_THE_BUS),
    )


def _unready(verdict: HealthVerdict, reason: HealthReason, message: str, now_ns: int) -> HealthVerdict:
    since_ns = verdict.since_ns if verdict.status is ConditionStatus.FALSE else now_ns
    return HealthVerdict(status=ConditionStatus.FALSE, reason=reason, message=message, since_ns=since_ns)
