"""Why a GPU is not healthy, and why a provider is not heard.

Nothing acts on GPUs: what is in the way is what their conditions say, and whether whoever wrote
these is still there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetplane.domains.gpus.kinds import GPU, PROVIDER_LABEL, SCOPE
from fleetplane.domains.gpus.provider_settings.delivery import AT, SETTINGS_APPLIED
from fleetplane.domains.gpus.providers import ProviderLeases
from fleetplane.domains.gpus.rules import PROVIDER_SILENT
from fleetplane.fleet.explain import from_record, placed
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

HEALTHY = "True"


class GpuExplainer:
    """Conditions that are not True."""

    def __init__(self, store: Store, providers: ProviderLeases, clock: Clock) -> None:
        self._store = store
        self._providers = providers
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        found = self._store.get(GPU, SCOPE, name)
        return placed("gpu", name, None if found is None else SCOPE, within)

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        return from_record(self._clock, name, tuple(self._reasons(name)))

    def _reasons(self, name: str) -> Iterator[Reason]:
        gpu = self._store.get(GPU, SCOPE, name)
        if gpu is None:
            return
        if not gpu.conditions:
            yield Reason(code="NO_CONDITIONS", message="no provider has reported a condition of it")
        for condition in gpu.conditions:
            if condition.status == HEALTHY:
                continue
            words = f"{condition.type} is {condition.status}"
            if condition.message or condition.reason:
                words += f": {condition.message or condition.reason}"
            code = "PROVIDER_SILENT" if condition.reason == PROVIDER_SILENT else "CONDITION"
            yield Reason(code=code, message=words, subject=f"condition/{condition.type}")
        provider = gpu.labels.get(PROVIDER_LABEL, "")
        for reason in _silence(self._providers, provider, self._clock.now_ns()):
            yield Reason(code=reason.code, message=reason.message, subject=f"provider/{provider}")


class ProviderExplainer:
    """Providers that hold a lease, or are named by a GPU."""

    def __init__(self, store: Store, providers: ProviderLeases, clock: Clock) -> None:
        self._store = store
        self._providers = providers
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        known = any(lease.provider == name for lease, _ in self._providers.leases()) or any(
            gpu.labels.get(PROVIDER_LABEL) == name for gpu in self._store.list(GPU, SCOPE)
        )
        return placed("provider", name, SCOPE if known else None, within)

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        reasons = tuple(_silence(self._providers, name, self._clock.now_ns()))
        if not reasons and all(lease.provider != name for lease, _ in self._providers.leases()):
            reasons = (
                Reason(
                    code="NO_LEASE",
                    message="it has sent no heartbeat since the server started, so nobody expects one",
                ),
            )
        applied = self._store.get(SETTINGS_APPLIED, AT, name)
        if applied is not None and applied.status is not None and applied.status.error:
            message = f"it refused settings {applied.status.wanted[:12]}: {applied.status.error}"
            reasons = (*reasons, Reason(code="SETTINGS_REFUSED", message=message))
        return from_record(self._clock, name, reasons)


def _silence(providers: ProviderLeases, provider: str, now_ns: int) -> Iterator[Reason]:
    for lease, alive in providers.leases():
        if lease.provider == provider and not alive:
            seconds = (now_ns - lease.heard_at_ns) // NS
            yield Reason(code="LEASE_EXPIRED", message=f"its provider was last heard {seconds} s ago")
