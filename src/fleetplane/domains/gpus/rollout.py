"""Rollouts of settings to providers of GPUs that ask for them.

A provider has confirmed a version when it says that the version is in force and its lease is alive. One that
loses its lease afterwards has failed, since the length of its heartbeats is what is set here; one that is
silent before its turn is waited for, like whoever is not connected. Providers that never ask take no part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleetplane.domains.gpus.provider_settings.delivery import (
    AT,
    NAME,
    PROVIDER_SETTINGS,
    SETTINGS_APPLIED,
    SUBJECT,
    ProviderHealth,
    ProviderSettings,
    SettingsApplied,
    SettingsAppliedStatus,
    content_of,
)
from fleetplane.fleet.rollouts.holds import HeldVersions
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.access import covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

HEALTHY, GPUS_HEALTHY = "healthy", "gpus_healthy"
MOST_UNHEALTHY = 0.5
"""Of a provider's GPUs: with more that are unhealthy, what it was set to is not to be trusted."""
PRESENT_SECONDS = 60.0
"""A time that ended longer ago cannot be measured: leases and conditions are known as they are now."""


class ProviderSettingsSubject:
    """The subject `gpus.settings`."""

    name = SUBJECT
    domain = "gpus"
    summary = "settings of GPU providers; confirmed when acknowledged by a provider whose lease is alive"
    measures: Mapping[str, str] = {
        HEALTHY: "share of providers whose lease is alive and most of whose GPUs are not unhealthy, 0 to 1",
        GPUS_HEALTHY: "share of the providers' GPUs without a condition of theirs that is False, 0 to 1",
    }
    watches: Sequence[AnyKind] = (SETTINGS_APPLIED,)
    """Leases are in memory and GPUs lie elsewhere: both are looked at with every pass."""
    versions: Sequence[AnyKind] = (PROVIDER_SETTINGS,)

    def __init__(self, store: Store, clock: Clock, settings: ProviderSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._held = HeldVersions(store, SUBJECT, content_of)

    def __repr__(self) -> str:
        return f"<ProviderSettingsSubject {self._held!r}>"

    # Names.

    def scope(self, text: str) -> str:
        """All providers: there is one scope."""
        if text not in (AT, NAME):
            raise NotFound(f"there are no providers at {text[:80]!r}", hint=f"write {NAME}, or {AT}")
        return AT

    def scopes(self, below: str) -> Sequence[str]:
        is_used = self._store.count(PROVIDER_SETTINGS, AT) or self._store.count(SETTINGS_APPLIED, AT)
        return [AT] if is_used and covers(below, AT) else []

    def holder(self, kind: str, _scope: str, _name: str) -> str | None:
        """All providers have the one object."""
        return AT if kind == "provider-settings" else None

    def version(self, scope: str, text: str) -> str:
        return self._held.version(scope, text)

    def newest(self, scope: str) -> str:
        return self._held.newest(scope)

    def waiting(self, scope: str) -> str:
        return self._held.waiting(scope)

    def default(self, scope: str) -> str:
        return self._held.default(scope)

    # Targets.

    def targets(self, _scope: str) -> Mapping[str, TargetFact]:
        """Providers that have asked for settings while they held a lease, by their ids."""
        health, applied = self._settings.health(), self._settings.applied()
        return {name: self._fact(applied[name], health[name]) for name in sorted(applied)}

    def _fact(self, stored: SettingsApplied, health: ProviderHealth) -> TargetFact:
        applied = stored.status or SettingsAppliedStatus()
        has_moved = self._settings.has_moved(stored.name) and applied.version == applied.wanted
        # Once it has what a rollout moved it to, silence is no absence but a failure.
        online = health.alive or (has_moved and health.silent)
        return TargetFact(
            version=applied.version if health.alive or not has_moved else "",
            online=online,
            healthy=is_healthy(health),
            labels={"provider": stored.name},
            title=stored.name,
            error=applied.error,
            error_at_ns=applied.failed_at_ns,
            error_version=applied.wanted if applied.error else "",
        )

    # Moving.

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        assert rollout
        await self._held.steer(scope, versions, default=default)

    async def again(self, _scope: str, targets: Collection[str]) -> None:
        await self._settings.again(targets)

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        assert rollout
        await self._held.settle(scope, version, held=held)

    # Gates.

    async def measure(
        self, _scope: str, query: str, targets: Collection[str], period: Period
    ) -> float | None:
        if self._clock.now_ns() - period.to_ns > PRESENT_SECONDS * NS:
            return None
        health = self._settings.health()
        found = [health[name] for name in targets if name in health]
        if query == HEALTHY:
            return sum(is_healthy(one) for one in found) / len(targets) if targets else None
        gpus = sum(one.gpus for one in found)
        return 1 - sum(one.unhealthy for one in found) / gpus if gpus else None


def is_healthy(health: ProviderHealth) -> bool:
    """Its lease is alive, and not too many of its GPUs are unhealthy."""
    return health.alive and health.unhealthy <= MOST_UNHEALTHY * health.gpus
