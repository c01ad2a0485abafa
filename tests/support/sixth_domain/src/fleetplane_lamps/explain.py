"""Why a lamp is dark, for `fleetplane explain lamps lamp NAME`."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.fleet.explain import from_record, placed
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store
from fleetplane_lamps.kinds import LAMP, SCOPE


class LampExplainer:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        found = self._store.get(LAMP, SCOPE, name)
        return placed("lamp", name, None if found is None else found.scope, within)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        lamp = self._store.get(LAMP, scope, name)
        if lamp is None or lamp.status is None or lamp.status.lit:
            return ()
        dark = Reason(code="DARK", message="its agent reported that it is not lit")
        return from_record(self._clock, name, (dark,))
