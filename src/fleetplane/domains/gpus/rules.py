"""The GPU domain's decisions, pure: facts and the time in, new facts out.

A condition tells what its provider last said. When the provider falls silent, what it said
last is no longer known to be true: its conditions then read `Unknown`, reason
`ProviderSilent`, and what it had said is kept aside until it is heard again. The same
happens to everything at a restart, because the server cannot know what it missed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from fleetplane.domains.gpus.domain import OPERATOR_PROVIDER
from fleetplane.domains.gpus.kinds import GpuStatus, StatusReport
from fleetplane.kernel.errors import PermissionDenied, ResourceExhausted
from fleetplane.kernel.resources import Condition

PROVIDER_SILENT = "ProviderSilent"
NOT_HEARD_SINCE_LEASE = "its provider has not been heard from for longer than its lease"
NOT_HEARD_SINCE_START = "its provider has not been heard from since the server started"


class TransitionTimes(StrEnum):
    """What happens to a condition's time when the caller leaves it unset."""

    STRICT = "strict"  # it moves only when the status does
    EVERY_WRITE = "every-write"  # it moves with each write, as the original server does


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPolicy:
    lease_seconds: float = 30.0  # three missed heartbeats of 10 s; 0 turns leases off
    transition_times: TransitionTimes = TransitionTimes.STRICT
    max_gpus: int = 4096  # seven times the largest node known, 576
    max_condition_types: int = 32  # per GPU
    max_condition_bytes: int = 65_536  # of a GPU's conditions together: 4,096 GPUs then stay under 300 MB
    max_providers: int = 256  # leases held at a time
    shared_writes: bool = False  # whether a provider may overwrite and remove what another said


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a GPU that reports change: what it reads now, and what was put aside."""

    conditions: tuple[Condition, ...] = ()
    status: GpuStatus | None = None

    @property
    def silenced(self) -> tuple[Condition, ...]:
        return self.status.silenced if self.status is not None else ()

    def with_conditions(self, conditions: Iterable[Condition], silenced: Iterable[Condition]) -> GpuState:
        status = msgspec.structs.replace(self.status or GpuStatus(), silenced=tuple(silenced))
        return GpuState(conditions=tuple(conditions), status=status)


NewState = Callable[[GpuState, int], GpuState]
"""From the state a GPU is in and the time, the state it should be in."""


def stamp(
    condition: Condition, before: Condition | None, *, now_ns: int, times: TransitionTimes
) -> Condition:
    """Fill in when the condition's status changed, unless its writer said so."""
    if condition.changed_at_ns is not None:
        return condition
    unchanged = before is not None and before.status == condition.status
    if (
        unchanged
        and times is TransitionTimes.STRICT
        and before is not None
        and before.changed_at_ns is not None
    ):
        return msgspec.structs.replace(condition, changed_at_ns=before.changed_at_ns)
    return msgspec.structs.replace(condition, changed_at_ns=now_ns)


def set_condition(state: GpuState, condition: Condition, *, now_ns: int, policy: GpuPolicy) -> GpuState:
    """One condition replaced in its place, or added at the end; all others as they were."""
    conditions = list(state.conditions)
    types = [present.type for present in conditions]
    before = conditions[types.index(condition.type)] if condition.type in types else None
    if before is None and len(set(types)) >= policy.max_condition_types:
        raise ResourceExhausted(
            f"the GPU has {policy.max_condition_types} condition types already, without {condition.type!r}",
            field="condition.type",
            hint="report under an existing type, or raise gpus.max_condition_types",
        )
    new = stamp(condition, before, now_ns=now_ns, times=policy.transition_times)
    if before is None:
        conditions.append(new)
    else:
        check_writer((before,), condition.writer, policy)
        conditions[types.index(condition.type)] = new
    size = _size_bytes(conditions)
    if size > policy.max_condition_bytes and size > _size_bytes(state.conditions):
        raise ResourceExhausted(
            f"the GPU's conditions would take {size} bytes, more than {policy.max_condition_bytes}",
            field="condition.message",
            hint="send shorter messages",
        )
    if state.status is not None and not state.status.silenced:  # nearly always
        return GpuState(conditions=tuple(conditions), status=state.status)
    return state.with_conditions(
        conditions, (aside for aside in state.silenced if aside.type != condition.type)
    )


def check_writer(conditions: Iterable[Condition], provider: str, policy: GpuPolicy) -> None:
    """Refuse a provider that names itself to replace what another said. Who names nobody may, as ever."""
    if not provider or policy.shared_writes:
        return
    for other in conditions:
        if other.writer not in ("", provider):
            raise PermissionDenied(
                f"condition {other.type!r} was written by provider {other.writer!r}, not by {provider!r}",
                field="provider_id",
                hint="report under a type of your own, or set gpus.shared_writes = true",
            )


def _size_bytes(conditions: Iterable[Condition]) -> int:
    texts = [text for entry in conditions for text in (entry.type, entry.reason, entry.message)]
    return len("".join(texts).encode())


def recommend(state: GpuState, action: str | None, provider: str) -> GpuState:
    """What a provider says should be done about the GPU. None says nothing, empty takes back its own."""
    status = state.status or GpuStatus()
    if action is None or (not action and status.recommended_by != provider):
        return state
    by = provider if action else ""
    status = msgspec.structs.replace(status, recommended_action=action, recommended_by=by)
    return GpuState(conditions=state.conditions, status=status)


def set_status(report: StatusReport | None, provider: str = "") -> GpuState:
    """The whole status replaced, verbatim: times are not filled in, None clears it."""
    if report is None:
        return GpuState()
    state = GpuState(conditions=report.conditions, status=GpuStatus())
    return recommend(state, report.recommended_action, provider)


def stamped(report: StatusReport | None, *, now_ns: int) -> StatusReport | None:
    """With the time of now wherever the writer gave none."""
    if report is None:
        return None
    times = TransitionTimes.EVERY_WRITE
    conditions = tuple(stamp(one, None, now_ns=now_ns, times=times) for one in report.conditions)
    return replace(report, conditions=conditions)


def is_silenced(condition: Condition) -> bool:
    return condition.reason == PROVIDER_SILENT and condition.status == "Unknown"


def silence(state: GpuState, *, provider: str | None, message: str, now_ns: int) -> GpuState:
    """What `provider` wrote reads Unknown and is put aside; None means every provider.

    What an operator set by hand stays: nobody renews it, so that it would never be heard again.
    """
    aside = list(state.silenced)
    conditions = []
    for condition in state.conditions:
        spoken_for = condition.writer != OPERATOR_PROVIDER and provider in (None, condition.writer)
        if is_silenced(condition) or not spoken_for:
            conditions.append(condition)
            continue
        aside.append(condition)
        unknown = Condition(
            type=condition.type,
            status="Unknown",
            reason=PROVIDER_SILENT,
            message=message,
            writer=condition.writer,
        )
        conditions.append(stamp(unknown, condition, now_ns=now_ns, times=TransitionTimes.STRICT))
    return state.with_conditions(conditions, aside) if len(aside) > len(state.silenced) else state


def restore(state: GpuState, *, provider: str, now_ns: int) -> GpuState:
    """What `provider` had said before its silence reads as it said it again."""
    aside = list(state.silenced)
    conditions = []
    for condition in state.conditions:
        said = None
        if is_silenced(condition) and condition.writer == provider:
            # By type and in order: a whole status may name one type twice.
            said = next((c for c in aside if c.writer == provider and c.type == condition.type), None)
        if said is None:
            conditions.append(condition)
            continue
        aside.remove(said)
        changed = said.status != condition.status
        conditions.append(msgspec.structs.replace(said, changed_at_ns=now_ns) if changed else said)
    kept = [condition for condition in aside if condition.writer != provider]
    return state.with_conditions(conditions, kept) if len(kept) < len(state.silenced) else state


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease, as far as it decides who gets another one's."""

    provider: str
    alive: bool
    spoken: bool
    """Its holder has registered a GPU or written a condition."""
    heard_at_ns: int


def giving_way(held: Sequence[HeldLease], *, spoken: bool, policy: GpuPolicy) -> str:
    """Whose lease a new provider gets; empty if there is room for one more.

    Names cost nothing, so those that have said nothing about any GPU share half of the leases: whoever
    makes names up cannot keep a provider out that reports.
    """
    mute = [lease for lease in held if not lease.spoken]
    if not spoken and len(mute) >= max(1, policy.max_providers // 2):
        return _taken_back(
            mute,
            f"{len(mute)} providers that have reported nothing hold leases already",
            "register a GPU or report a condition first, then send heartbeats",
        )
    if len(held) >= policy.max_providers:
        return _taken_back(
            mute or held,
            f"{policy.max_providers} providers hold leases already",
            "give each provider one stable provider_id, or raise gpus.max_providers",
            living=bool(mute),
        )
    return ""


def _taken_back(leases: Sequence[HeldLease], full: str, hint: str, *, living: bool = False) -> str:
    """A silent one of these; if there is none and `living`, the one heard longest ago."""
    candidates = [lease for lease in leases if not lease.alive] or (leases if living else ())
    if not candidates:
        raise ResourceExhausted(full, field="provider_id", hint=hint)
    return min(candidates, key=lambda lease: lease.heard_at_ns).provider


class GpuHealth(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


def health(conditions: Collection[Condition]) -> GpuHealth:
    """False anywhere is unhealthy; otherwise anything but True, or nothing said, is unknown."""
    if any(condition.status == "False" for condition in conditions):
        return GpuHealth.UNHEALTHY
    if not conditions or any(condition.status != "True" for condition in conditions):
        return GpuHealth.UNKNOWN
    return GpuHealth.HEALTHY
