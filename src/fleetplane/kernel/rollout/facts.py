"""What a pass is told about the world. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from fleetplane.kernel.rollout.policy import Gate


class TargetFact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One target as its domain knows it now."""

    version: str
    """What it has confirmed; empty if nothing is known."""
    online: bool
    healthy: bool
    labels: Mapping[str, str] = {}
    error: str = ""
    """Why it did not take the version that it was last asked for."""
    error_at_ns: int = 0
    error_version: str = ""
    """The version that the error is about; any if empty."""
    title: str = ""
    """Its name for people, if it has another."""


class GateMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """A gate's measurement; None where there is no data."""

    value: float | None = None
    baseline: float | None = None
    """Of the same targets, before the rollout."""
    problem: str = ""
    """Why there is no data, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    targets: Mapping[str, TargetFact]
    """In the order in which they take their turns."""
    gates: Mapping[str, GateMeasurement] = field(default_factory=dict)
    frozen: str = ""
    """Who froze this and why; empty if nobody did."""
    observing_since_ns: int = 0
    """Since when this server has been looking: nobody is late for what it could not see."""


Select = Callable[[str, Mapping[str, str]], bool]
"""Whether a selector matches labels."""


def has_data(gate: Gate, reading: GateMeasurement | None) -> bool:
    """Whether a gate can be evaluated at all."""
    if reading is None or reading.value is None:
        return False
    return gate.max_increase is None or reading.baseline is not None


def breach(gate: Gate, reading: GateMeasurement | None) -> str:
    """Why a gate is not passed; empty if it is."""
    if reading is None or reading.value is None:
        why = f" ({reading.problem})" if reading is not None and reading.problem else ""
        return f"gate {gate.name}: there is no data for {gate.query[:200]}{why}"
    value = reading.value
    if gate.max is not None and value > gate.max:
        return f"gate {gate.name}: {gate.query} is {value:.4g}, more than {gate.max:g}"
    if gate.min is not None and value < gate.min:
        return f"gate {gate.name}: {gate.query} is {value:.4g}, less than {gate.min:g}"
    if gate.max_increase is not None:
        if reading.baseline is None:
            return f"gate {gate.name}: there is no data for {gate.query} of before the rollout"
        if value - reading.baseline > gate.max_increase:
            return (
                f"gate {gate.name}: {gate.query} is {value:.4g}, before it was {reading.baseline:.4g}; "
                f"it may be at most {gate.max_increase:g} more"
            )
    return ""
