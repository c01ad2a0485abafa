"""What a rollout would do if it started now: its waves by name, and its gates on the last hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetplane.fleet.rollouts.driver import matches
from fleetplane.fleet.rollouts.gates import PROBE, WEBHOOK, GateQuestion, GateSources, Measured
from fleetplane.fleet.rollouts.subject import Period
from fleetplane.kernel.rollout.facts import GateMeasurement, TargetFact, breach
from fleetplane.kernel.rollout.policy import Gate, Policy
from fleetplane.kernel.rollout.waves import preview
from fleetplane.kernel.values.times import NS

REHEARSED_NS = 3600 * NS
"""Over which time a dry run measures what gates ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWave:
    wave: str
    targets: Sequence[str]
    """By their names for people, in the order of their turns."""
    offline: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A gate, on the facts of the last hour."""

    gate: Gate
    reading: GateMeasurement
    message: str
    """Why it is not passed, or was not rehearsed; empty if it is passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a rollout would do if it started now."""

    to: str
    policy: Policy
    waves: Sequence[PlannedWave]
    already: int
    """Targets that have the version."""
    blockers: Sequence[str]
    """Why it would not begin at once."""
    gates: Sequence[Rehearsed] = ()


def planned_waves(policy: Policy, moving: Mapping[str, TargetFact]) -> Sequence[PlannedWave]:
    """Who would be in which wave, of those that have another version."""
    found = preview(policy.waves, {name: fact.labels for name, fact in moving.items()}, select=matches)
    return [
        PlannedWave(
            wave=wave,
            targets=[moving[name].title or name for name in names],
            offline=[moving[name].title or name for name in names if not moving[name].online],
        )
        for wave, names in zip(policy.waves, found, strict=True)
    ]


async def rehearsed(sources: GateSources, gate: Gate, asked: GateQuestion) -> Rehearsed:
    """A gate on the last hour, against the hour before it. What acts on others is left out."""
    if gate.query.startswith((WEBHOOK, PROBE)):
        message = f"gate {gate.name}: webhooks and probes are not rehearsed"
        return Rehearsed(gate=gate, reading=GateMeasurement(), message=message)
    now_ns = asked.period.to_ns
    current = Period(from_ns=now_ns - REHEARSED_NS, to_ns=now_ns)
    asked = replace(asked, gate=gate.name, query=gate.query, period=current)
    value, before = await sources.measure(asked), Measured()
    if gate.max_increase is not None:
        earlier = Period(from_ns=now_ns - 2 * REHEARSED_NS, to_ns=now_ns - REHEARSED_NS)
        before = await sources.measure(replace(asked, period=earlier))
    reading = GateMeasurement(
        value=value.value, baseline=before.value, problem=value.problem or before.problem
    )
    return Rehearsed(gate=gate, reading=reading, message=breach(gate, reading))
