"""Calls of the GPU agent beside the device API: releases, and metrics of its GPUs.

Who may write at the node's socket may call them, by its provider id. The device API's messages are
NVIDIA's, so metrics have a call of their own. For providers that do not send any, and those that are
silent, the server samples the conditions of their GPUs: it knows nothing else of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.kinds import GPU, PROVIDER_LABEL, SCOPE, Gpu
from fleetplane.fleet.figures import FigureKeeper, Figures, Measure, MeasuredSeries, Stretch
from fleetplane.fleet.figures_service import SERVICE
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs, service_rows

LISTENER = "device-api"
WRITE = Permission("gpus.write")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_provider(provider_id: str, *, field: str) -> None:
    """Refuse ids that nothing can be stored under."""
    if _NAME.fullmatch(provider_id) is None:
        raise InvalidArgument(f"{provider_id[:80]!r} is not the id of a provider", field=field)


class ProviderRegister:
    """Every provider at the socket is trusted alike: the mode of the socket says who may be one."""

    def recognise(self, context: CallContext, name: str) -> str:
        """The provider's id; none is needed to fetch a file."""
        if name or context.method.endswith("/CheckIn"):
            check_provider(name, field="name")
        return name

    def card(self, agent: str) -> AgentCard | None:
        """A provider is known as long as its record is there."""
        return AgentCard(title=agent)


def _register(_domain: Any, _store: Store) -> ProviderRegister:
    return ProviderRegister()


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.SOCKET,
    permission=WRITE,
    register=_register,
    needs=Needs.WRITES,
)


PREFIX: Final = "gpus"
WRONG: Final = "unhealthyConditions"
MEASURES: Final = (
    Measure(name="gpuPercent", title="Utilisation", unit="%", most=100.0),
    Measure(name="memoryPercent", title="Memory", unit="%", most=100.0, high=95.0),
    Measure(name="temperatureCelsius", title="Temperature", unit="°C", most=200.0, least=-100.0, high=85.0),
    Measure(name="powerWatts", title="Power", unit="W", most=10_000.0),
    Measure(name=WRONG, title="Conditions that are not true", unit="", most=1e6, high=1.0),
)
PROVIDERS_PREFIX: Final = "gpu-providers"
PROVIDER_MEASURES: Final = tuple(
    Measure(name=f"{health}Gpus", title=f"GPUs: {health}", unit="", most=1e6)
    for health in ("healthy", "unhealthy", "unknown")
)
LOOK_SECONDS: Final = 30.0
"""Between two looks of the server at the GPUs that it knows."""
ROWS: Final = tuple(
    service_rows(SERVICE, WRITE, listener=LISTENER, authentication=Authentication.SOCKET, needs=Needs.WRITES)
)


class GpuFigures:
    """Takes figures of GPUs that are registered: who may write at the socket may write of any of them."""

    def __init__(self, store: Store, figures: FigureKeeper) -> None:
        self._store = store
        self._figures = figures

    def __repr__(self) -> str:
        return f"<GpuFigures {self._figures!r}>"

    def take(self, context: CallContext, name: str, objects: Mapping[str, Mapping[str, float]]) -> None:  # noqa: ARG002  # the socket says it
        """GPUs that nobody registered are passed over: they may be gone since they were measured."""
        for gpu, values in objects.items():
            found = self._store.get(GPU, SCOPE, gpu)
            if found is not None:
                self._figures.take(SCOPE, gpu, {**values, WRONG: _wrong(found)})


def look(gpus: Sequence[Gpu], of_gpus: FigureKeeper, of_providers: FigureKeeper) -> None:
    """Note how GPUs are now, and how many of each provider are well; what their provider tells is with it."""
    counted: dict[str, Counter[str]] = {}
    known = of_gpus.latest(gpus)
    for gpu in gpus:
        if gpu.name not in known or known[gpu.name].values.keys() == {WRONG}:
            of_gpus.take(gpu.scope, gpu.name, {WRONG: _wrong(gpu)})
        if provider := gpu.labels.get(PROVIDER_LABEL):
            counted.setdefault(provider, Counter())[rules.health(gpu.conditions)] += 1
    for provider, by_health in counted.items():
        values = {one.name: float(by_health[one.name.removesuffix("Gpus")]) for one in PROVIDER_MEASURES}
        of_providers.take(SCOPE, provider, values)


def _wrong(gpu: Gpu) -> float:
    return float(sum(1 for one in gpu.conditions if one.status != "True"))


async def provider_figures(domain: Any, providers: Sequence[AnyResource]) -> Mapping[str, Figures]:
    """How many GPUs of each provider are how."""
    found: Mapping[str, Figures] = domain.provider_figures.latest(providers)
    return found


async def provider_history(domain: Any, provider: AnyResource, stretch: Stretch) -> Sequence[MeasuredSeries]:
    """The same over time."""
    found: Sequence[MeasuredSeries] = await domain.provider_figures.history(provider, stretch)
    return found
