"""The kinds that the kernel itself keeps: every store is opened with them, whatever its domains."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity.bindings import BINDING, ENDED_PLACE
from fleetplane.kernel.identity.revocation import REVOCATION
from fleetplane.kernel.presence import PRESENCE
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.resources import AnyKind

KERNEL_KINDS: Sequence[AnyKind] = (
    BINDING,
    COMMAND,
    COMMAND_TARGET,
    ENDED_PLACE,
    FREEZE,
    LEASE,
    PRESENCE,
    REVOCATION,
)
