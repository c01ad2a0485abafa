"""GPUs as objects of the resource API. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.kinds import GPU, PROVIDER_LABEL, REGISTRANT_LABEL, SCOPE, Gpu
from fleetplane.domains.gpus.provider_settings.delivery import SettingsApplied, SettingsAppliedStatus
from fleetplane.domains.gpus.providers import ProviderLease
from fleetplane.domains.gpus.releases import provider_figures, provider_history
from fleetplane.fleet.figures import kept_figures, kept_history
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.common import as_stored, made_up
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    ObjectState,
    ObservedPart,
    PublicResource,
    Related,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.kernel.access import Permission
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.values.times import spelled, spelled_or_null

READ = Permission("gpus.read")


class GpuProviders(Protocol):
    """What of the running domain is needed to tell its providers."""

    def leases(self) -> Iterable[tuple[ProviderLease, bool]]: ...

    def stored_gpus(self) -> Iterable[Gpu]: ...

    def applied_settings(self) -> Mapping[str, SettingsApplied]: ...


class GpuSpecView(ResourceShape, frozen=True):
    uuid: str | None
    """As the driver spells it; null if the provider gave none."""


class GpuStatusView(ResourceShape, frozen=True):
    health: str
    """`healthy`, `unhealthy` or `unknown`, by the conditions."""
    recommended_action: str
    provider: str
    """The provider that wrote last; empty if it did not name itself."""
    registered_by: str
    observed_at: str
    """When its provider last spoke for it, or somebody wrote about it."""


def view(gpu: Gpu, _reading: ViewReader) -> ResourceView[GpuSpecView, GpuStatusView]:
    """What is shown of a GPU."""
    return ResourceView(
        spec=GpuSpecView(uuid=gpu.spec.uuid),
        status=GpuStatusView(
            health=rules.health(gpu.conditions),
            recommended_action=gpu.status.recommended_action if gpu.status is not None else "",
            provider=gpu.labels.get(PROVIDER_LABEL, ""),
            registered_by=gpu.labels.get(REGISTRANT_LABEL, ""),
            observed_at=spelled(gpu.updated_at_ns),
        ),
    )


def gpu_state(gpu: Gpu) -> ObjectState:
    """The health of a GPU, with the conditions that spoil it."""
    spoilt = (f"{one.type} {one.reason}".strip() for one in gpu.conditions if one.status != "True")
    return ObjectState(rules.health(gpu.conditions), "; ".join(sorted(spoilt)))


def live_gpu(domain: GpuProviders, gpu: Gpu) -> Gpu:
    """The GPU as its provider's last heartbeat confirms it, which is not written."""
    named = {gpu.labels.get(PROVIDER_LABEL), *(one.writer for one in gpu.conditions)}
    heard_ns = [lease.heard_at_ns for lease, alive in domain.leases() if alive and lease.provider in named]
    return msgspec.structs.replace(gpu, updated_at_ns=max((gpu.updated_at_ns, *heard_ns)))


def place(_gpu: Gpu, _reading: ViewReader) -> str:
    """GPUs of this machine lie at the installation."""
    return scopes.ROOT


def worst(shown: Mapping[str, Any]) -> str:
    """The reason of the first condition that is not True."""
    for condition in shown["conditions"]:
        if condition["status"] != "True":
            return str(condition["reason"] or condition["type"])
    return ""


GPUS = PublicResource(
    name="gpu",
    plural="gpus",
    short=("g",),
    summary="A GPU of this machine, with the conditions that its providers report",
    kind=GPU,
    spec=GpuSpecView,
    status=GpuStatusView,
    view=view,
    live=live_gpu,
    state=gpu_state,
    place=place,
    permission=READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="HEALTH", value=".status.health"),
        Column(title="REASON", value=worst),
        Column(title="SEEN", value=".status.observedAt", type="age"),
        Column(title="UUID", value=".spec.uuid", wide=True),
        Column(title="PROVIDER", value=".status.provider", wide=True),
        Column(title="ACTION", value=".status.recommendedAction", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.FIGURES, ResourceVerb.HISTORY},
    figures=kept_figures,
    history=kept_history,
    relates=(Related(resource="provider", path=".status.provider"),),
    explain="gpu",
    search=(".metadata.name", ".spec.uuid"),
)


# Providers: leases in memory, and names in what they wrote.


class ProviderSpecView(ResourceShape, frozen=True):
    """Nobody writes providers: they come by themselves."""


class ProviderStatusView(ResourceShape, frozen=True):
    state: str
    """`alive`, `silent`, or `unleased`: it never sent a heartbeat, so nobody expects one."""
    heard_at: str | None
    heartbeats: int | None
    """Null where several servers hear it, none of which counts all."""
    expiries: int
    """How often its lease has run out."""
    gpus: int
    """GPUs that it wrote last."""
    settings: str
    """The version of `provider-settings` that it has; empty if it never asked for them."""
    settings_error: str
    """Why it did not take the version that it was sent last."""


PROVIDER: Kind[ProviderSpecView, ProviderStatusView] = Kind(
    "gpu-provider", ProviderSpecView, ProviderStatusView
)


def _news(status: ProviderStatusView) -> tuple[object, ...]:
    """What of a provider a watcher is told; not each heartbeat."""
    return (status.state, status.expiries, status.gpus, status.settings, status.settings_error)


def providers(domain: GpuProviders) -> Iterator[AnyResource]:
    """Every provider that holds a lease or is named by a GPU."""
    written = Counter(
        gpu.labels[PROVIDER_LABEL] for gpu in domain.stored_gpus() if PROVIDER_LABEL in gpu.labels
    )
    leases = {lease.provider: (lease, alive) for lease, alive in domain.leases()}
    applied = domain.applied_settings()
    for name in sorted({*written, *leases}):
        lease, alive = leases.get(name, (None, False))
        has = (applied[name].status if name in applied else None) or SettingsAppliedStatus()
        status = ProviderStatusView(
            state="unleased" if lease is None else "alive" if alive else "silent",
            heard_at=None if lease is None else spelled_or_null(lease.heard_at_ns or None),
            heartbeats=0 if lease is None else None if lease.is_partial else lease.heartbeats,
            expiries=0 if lease is None else lease.expiries,
            gpus=written[name],
            settings=has.version,
            settings_error=has.error,
        )
        yield made_up(PROVIDER, name, spec=ProviderSpecView(), status=status, scope=SCOPE)


PROVIDERS = PublicResource(
    name="provider",
    plural="providers",
    summary="A program that reports GPUs",
    kind=PROVIDER,
    spec=ProviderSpecView,
    status=ProviderStatusView,
    view=as_stored,
    place=place,
    permission=READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="GPUS", value=".status.gpus", type="number"),
        Column(title="HEARD", value=".status.heardAt", type="age"),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.FIGURES, ResourceVerb.HISTORY},
    figures=provider_figures,
    history=provider_history,
    explain="provider",
    computed=providers,
    observed=ObservedPart(matters=lambda made: _news(made.status)),
)
RESOURCES = (GPUS, PROVIDERS)
