"""What is stored of rollouts: everything. A server that takes one up needs nothing else.

A rollout lies at the scope that it is for, named by its id; its targets below it, at `SCOPE/rollout/ID`.
Every change of a target is written in one transaction with the rollout. Policies lie at the scope that they
hold for, named by their subject; the nearest one counts. Holds lie at the scope too, named by their
subject, with the contents of versions beside them. Specs are stored by field names, so fields may be
added.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.rollout.policy import Policy
from fleetplane.kernel.rollout.states import RolloutStanding, TargetRecord
from fleetplane.kernel.store import Draft, Store


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What was ordered. Never changes."""

    subject: str
    to: str
    """The version that targets are moved to."""
    policy: Policy
    actor: str
    started_at_ns: int
    reason: str = ""
    supersedes: str = ""
    """The id of the rollout that this one ended."""
    automatic: bool = False
    """Whether a policy started it, because of a new version."""
    total: int = 0
    """Targets at the start."""
    default_before: str = ""
    """The version that whoever came new was to have, for going back."""


class RolloutStatus(RolloutStanding, frozen=True, kw_only=True):
    settled: str = ""
    """The phase in which it ended, once its subject knows."""


class RolloutTargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    """Its name for people."""


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Makes every new version at and below a scope a rollout."""

    policy: Policy
    automatic: bool = True
    """Whether a new version starts its rollout by itself; else it waits until somebody starts one."""
    supersedes: bool = False
    """Whether a rollout that it starts ends one that is under way, instead of waiting for its end."""
    once: bool = False
    """Whether it is for the change that it was written with, and goes once its rollout has started."""
    actor: str = ""


class HoldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """At which versions the targets of a scope are held; see `holds`."""

    held: str = ""
    """The version of whoever is not named below; empty while everyone follows the newest."""
    moved: dict[str, tuple[str, ...]] = {}
    """Targets that are to have another version, by that version."""


class KeptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a version, for as long as somebody may go to it."""

    version: str
    content: bytes
    at_ns: int


Rollout = Resource[RolloutSpec, RolloutStatus]
RolloutTarget = Resource[RolloutTargetSpec, TargetRecord]
RolloutPolicy = Resource[PolicySpec, Nothing]

ROLLOUT: Kind[RolloutSpec, RolloutStatus] = Kind("rollout", RolloutSpec, RolloutStatus)
ROLLOUT_TARGET: Kind[RolloutTargetSpec, TargetRecord] = Kind(
    "rollout-target", RolloutTargetSpec, TargetRecord
)
ROLLOUT_POLICY: Kind[PolicySpec, Nothing] = Kind("rollout-policy", PolicySpec, Nothing)
HOLD: Kind[HoldSpec, Nothing] = Kind("rollout-hold", HoldSpec, Nothing)
KEPT: Kind[KeptSpec, Nothing] = Kind("rollout-version", KeptSpec, Nothing, is_secret=True)
KINDS = (ROLLOUT, ROLLOUT_TARGET, ROLLOUT_POLICY, HOLD, KEPT)


def targets_scope(scope: str, rollout: str) -> str:
    """Where the targets of a rollout lie."""
    return f"{scope}/rollout/{rollout}" if scope else f"rollout/{rollout}"


def policy_for(store: Store | Draft, subject: str, scope: str) -> RolloutPolicy | None:
    """The policy that holds at a scope: its own, or that of the nearest scope above."""
    for at in _upward(scope):
        found = store.get(ROLLOUT_POLICY, at, subject)
        if found is not None:
            return found
    return None


def _upward(scope: str) -> Iterator[str]:
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]
    yield ""


def status_of(rollout: Rollout) -> RolloutStatus:
    """Where a rollout stands."""
    assert rollout.status is not None
    return rollout.status


def records_of(store: Store | Draft, rollout: Rollout) -> dict[str, TargetRecord]:
    """The records of a rollout's targets, by name."""
    found = store.list(ROLLOUT_TARGET, targets_scope(rollout.scope, rollout.name))
    return {one.name: one.status for one in found if one.status is not None}
