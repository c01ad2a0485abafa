"""Finding a provider by its name among the installed packages.

A package offers one as an entry point in the group `fleetplane.instance_providers`: its name is
the kind, its object is called with a `ProviderContext` and gives a `Provider`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from fleetplane.domains.instances.providers.contract import Provider, ProviderContext
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FleetplaneError, SettingsError

GROUP = "fleetplane.instance_providers"


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Looked for once: that reads a file of every installed package, and each document asks three times."""
    return tuple(entry_points(group=GROUP))


def names() -> frozenset[str]:
    """What can be asked for."""
    return frozenset(offer.name for offer in installed())


def load(
    kind: str,
    options: Mapping[str, object],
    *,
    context: ProviderContext,
    offers: Iterable[EntryPoint] | None = None,
) -> Provider:
    """The provider called `kind`, configured and validated but not started."""
    provider = _make(_choose(kind, installed() if offers is None else offers), context)
    provider.configure(options)
    problems = provider.validate()
    if problems:
        raise SettingsError(f"provider {kind!r} cannot start: {'; '.join(problems)}", field="provider")
    return provider


def options_refused(kind: str, options: Mapping[str, object]) -> SettingsError | None:
    """What the provider called `kind` has against these options, wherever it runs; nothing is started."""
    context = ProviderContext(clock=SystemClock(), state_directory=Path())
    try:
        _make(_choose(kind, installed()), context).configure(options)
    except SettingsError as error:
        return error
    return None


def _choose(kind: str, offers: Iterable[EntryPoint]) -> EntryPoint:
    by_kind: dict[str, dict[str, EntryPoint]] = {}
    for offer in offers:
        # One package may be seen twice, from its source and from its metadata: same object, no conflict.
        by_kind.setdefault(offer.name, {})[offer.value] = offer
    if kind not in by_kind:
        known = ", ".join(sorted(by_kind)) or "none; is the package installed?"
        raise SettingsError(f"no provider is called {kind!r}; known are {known}", field="provider")
    rivals = by_kind[kind]
    if len(rivals) > 1:
        names = " and ".join(sorted(rivals))
        raise SettingsError(f"two packages offer a provider {kind!r}: {names}", field="provider")
    return next(iter(rivals.values()))


def _make(offer: EntryPoint, context: ProviderContext) -> Provider:
    try:
        provider = offer.load()(context)
    except FleetplaneError:
        raise
    except Exception as error:
        # Someone else's code: whatever it raises, the reader should learn whose it was.
        raise SettingsError(
            f"provider {offer.name!r} ({offer.value}) cannot be loaded: {error!r}", field="provider"
        ) from error
    if not isinstance(provider, Provider):
        missing = sorted(
            name for name in dir(Provider) if not name.startswith("_") and not hasattr(provider, name)
        )
        raise SettingsError(
            f"provider {offer.name!r} ({offer.value}) lacks {', '.join(missing)}", field="provider"
        )
    return provider
