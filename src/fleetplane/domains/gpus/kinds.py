"""What a GPU is to the store.

The wire keeps "no spec" apart from "a spec without a UUID", and "no status" apart from "an
empty status"; both differences survive here. Conditions live in the resource itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleetplane.kernel.resources import Condition, Kind, Resource

SCOPE = "tenant/default"
"""One device API serves one node: its GPUs share a scope."""

PROVIDER_LABEL = "provider"
"""The last provider that named itself in a write to the GPU."""


REGISTRANT_LABEL = "registered-by"
"""The provider that registered the GPU, if it named itself."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str | None = None
    """None when the provider gave no spec at all."""
    parent: str = ""
    """The name of the GPU that this one is a MIG device of."""


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    recommended_action: str = ""
    recommended_by: str = ""
    """The provider that gave it, if it named itself."""
    silenced: tuple[Condition, ...] = ()
    """Conditions as their provider wrote them, while the provider is silent and they read Unknown."""


Gpu = Resource[GpuSpec, GpuStatus]
GPU: Kind[GpuSpec, GpuStatus] = Kind(name="gpu", spec=GpuSpec, status=GpuStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """A whole status as a provider reports it."""

    conditions: tuple[Condition, ...]
    recommended_action: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A new spec, or a new status if there is a report, of the GPU that has that uid and version."""

    uid: str = ""
    """Empty if any will do."""
    version: int | None = None
    uuid: str | None = None
    report: StatusReport | None = None
