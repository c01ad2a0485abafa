"""How a run goes through its targets: what may start next, and when it is over for the rest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from fleetplane.kernel.errors import InvalidArgument

DEADLINE_LIMIT_SECONDS = 12 * 3600.0
DELIVER_LIMIT_SECONDS = 30 * 86_400.0


class Mode(StrEnum):
    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    ROLLING = "rolling"


class OnFailure(StrEnum):
    FAIL_FAST = "fail-fast"
    CONTINUE = "continue"
    STOP_AFTER = "stop-after"


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode = Mode.SEQUENTIAL
    batch: int = 1
    """Targets in one wave of a rolling run."""
    max_concurrency: int | None = None
    """At once; no bound of its own when None."""
    on_failure: OnFailure = OnFailure.FAIL_FAST
    stop_after: int = 1
    """Failures after which nothing more is started."""
    require_min: int = 0
    """Targets without which nothing is started at all."""
    deadline_seconds: float = 60.0
    """For one target, from when it has the command."""
    wait: bool = False
    """Whether targets that are away are waited for."""
    deliver_within_seconds: float = 3600.0
    """How long they are."""

    def check(self, spelled: Mapping[str, str] = MappingProxyType({})) -> None:
        """Refuse what cannot be meant. `spelled` has the names of fields that clients know by another one."""
        bounds = (
            ("batch", self.batch, 1, 100_000),
            ("max_concurrency", self.max_concurrency or 1, 1, 100_000),
            ("stop_after", self.stop_after, 1, 100_000),
            ("require_min", self.require_min, 0, 100_000),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise InvalidArgument(
                    f"must be between {low} and {high}, not {value}", field=spelled.get(name, name)
                )
        if self.max_concurrency == 0:
            raise InvalidArgument(
                "must be at least 1", field=spelled.get("max_concurrency", "max_concurrency")
            )
        seconds = (
            ("deadline_seconds", self.deadline_seconds, DEADLINE_LIMIT_SECONDS),
            ("deliver_within_seconds", self.deliver_within_seconds, DELIVER_LIMIT_SECONDS),
        )
        for name, number, most in seconds:
            if not 0 < number <= most:
                raise InvalidArgument(
                    f"must be above 0 and at most {most:g} seconds", field=spelled.get(name, name)
                )

    @property
    def most_failures(self) -> int | None:
        """How many end the run; None if none do."""
        match self.on_failure:
            case OnFailure.FAIL_FAST:
                return 1
            case OnFailure.STOP_AFTER:
                return self.stop_after
            case OnFailure.CONTINUE:
                return None


class ResultCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come."""

    held: int
    """Targets whose turn has not come."""
    under_way: int
    """Let go, and without an outcome."""
    failures: int


def halts(policy: RunPolicy, progress: ResultCounts) -> bool:
    """Whether so much has failed that the rest is not to happen."""
    most = policy.most_failures
    return most is not None and progress.failures >= most


def may_start(policy: RunPolicy, progress: ResultCounts) -> int:
    """How many of those held may go now."""
    if halts(policy, progress):
        return 0
    cap = policy.max_concurrency or progress.held + progress.under_way
    match policy.mode:
        case Mode.SEQUENTIAL:
            room = 1 - progress.under_way
        case Mode.PARALLEL:
            room = cap - progress.under_way
        case Mode.ROLLING:
            room = 0 if progress.under_way else min(policy.batch, cap)
    return max(0, min(room, progress.held))
