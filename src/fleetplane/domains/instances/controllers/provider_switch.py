"""The provider that the document names, and the machinery that stands on it.

A new document may name another provider, or the same with other options: then the machinery is taken down
and put up again on the new one, while agents and operators notice nothing. What instances there are must
stay within reach, so a document that would leave some behind at a provider, region or zone that nobody asks
any more is refused as a whole, and says which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.schema import Infra
from fleetplane.domains.instances.controllers.assembly import Machinery, ProviderStarts
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers import registry as providers
from fleetplane.domains.instances.providers.contract import Provider, ProviderContext
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.reconcile import Explanations

log = structlog.get_logger(__name__)

FIELD = "shard.infra"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPlace:
    """What a provider gets beside the document's words."""

    state_directory: Path
    environment: Mapping[str, str]
    kind: str = ""
    """Overrides the document's; empty: the document's."""
    command: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()


class Infrastructure:
    def __init__(
        self,
        groups: Groups,
        instances: Instances,
        explanations: Explanations,
        place: ProviderPlace,
        *,
        make: Callable[[Provider], Machinery],
        clock: Clock,
        brought: Provider | None = None,
    ) -> None:
        """`brought` is a provider that someone holds already: it stays, whatever documents say."""
        self._groups = groups
        self._instances = instances
        self._explanations = explanations
        self._place = place
        self._make = make
        self._clock = clock
        self._starts = ProviderStarts(clock)
        explanations.register(self._starts)
        self._brought = brought
        self._infra: Infra | None = None
        """What the machinery was put up for."""
        self._durable: tuple[Infra, bool] | None = None
        """Whether instances outlive a change of the provider in force; where another server uses it."""
        self._changed = asyncio.Event()
        self.machinery: Machinery | None = None
        groups.admit(self._admit, self._guard)
        groups.on_change(lambda _changed: self._notice())

    def __repr__(self) -> str:
        return f"<Infrastructure {self.machinery!r}>"

    def _notice(self) -> None:
        if self._brought is None and self._groups.required().shard.infra != self._infra:
            self._changed.set()

    # Whether a new document may come into force.

    def _admit(self, configuration: InstancesDocument) -> None:
        if self._brought is not None:
            return
        wanted = configuration.shard.infra
        self._guard(configuration, self._instances.all())
        if (self.machinery is not None or self._groups.stands_by) and wanted != self._current():
            try:
                self._load(wanted)  # what works is not given up for what cannot be had
            except FleetplaneError as error:
                raise InvalidArgument(error.message, field=FIELD) from error

    def _guard(self, configuration: InstancesDocument, instances: Sequence[Instance]) -> None:
        if self._brought is not None:
            return
        wanted, current = configuration.shard.infra, self._current()
        live = [one for one in instances if rules.state(one) is not rules.State.DELETED]
        if left := refusal(live, self._kind(wanted), wanted, current, durable=self._is_durable(current)):
            raise InvalidArgument(f"{left}; scale their groups to 0 first", field=FIELD)

    def _current(self) -> Infra | None:
        """What instances are made with now; on a server that stands by, as the document in force says."""
        if self._infra is None and self._groups.loaded is not None:
            return self._groups.required().shard.infra
        return self._infra

    def _is_durable(self, current: Infra | None) -> bool:
        if self.machinery is not None:
            return self.machinery.provider.describe().durable
        if current is None or not self._groups.stands_by:
            return True
        if self._durable is None or self._durable[0] != current:  # once, and not while transactions wait
            try:
                self._durable = current, self._load(current).describe().durable
            except FleetplaneError:  # it is not usable anywhere
                self._durable = current, True
        return self._durable[1]

    def kind_of(self, configuration: InstancesDocument) -> str:
        """The kind of provider that instances are asked of."""
        return self._brought.kind if self._brought is not None else self._kind(configuration.shard.infra)

    def _kind(self, infra: Infra) -> str:
        return self._place.kind or infra.provider

    # Standing on the one in force.

    async def run(self) -> None:
        """Until cancelled; a document must be in force."""
        while True:
            provider = await self._usable()
            self._changed.clear()
            self._notice()
            self.machinery = self._make(provider)
            for reconciler in self.machinery.reconcilers:
                self._explanations.register(reconciler)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(self.machinery.run(self._starts))
                    await self._changed.wait()
                    running.cancel()
            finally:
                for reconciler in self.machinery.reconcilers:
                    self._explanations.unregister(reconciler)
                self.machinery = None
            log.info("instances.provider_changed", provider=self._groups.required().shard.infra.provider)

    async def _usable(self) -> Provider:
        """The provider of the document in force, once there is one that can be had.

        A server that cannot make instances still serves everyone else: it says what is wrong, and tries
        again until a document is right.
        """
        while True:
            self._infra = self._groups.required().shard.infra
            if self._brought is not None:
                return self._brought
            try:
                return self._load(self._infra)
            except FleetplaneError as error:
                await self._starts.failed(error)

    def _load(self, infra: Infra) -> Provider:
        """Configured and validated; nothing outside is touched yet."""
        context = ProviderContext(
            clock=self._clock,
            state_directory=self._place.state_directory,
            environment=self._place.environment,
            region=infra.region,
            zone=infra.zone,
            command=self._place.command,
            variables=self._place.variables,
        )
        return providers.load(self._kind(infra), infra.options, context=context)


def refusal(live: list[Instance], kind: str, wanted: Infra, current: Infra | None, *, durable: bool) -> str:
    """Why a document may not move the shard to `kind` and `wanted`; empty if it may."""
    elsewhere = sorted({one.spec.provider for one in live} - {"", kind})
    if elsewhere:
        count = sum(one.spec.provider == elsewhere[0] for one in live)
        return f"{count} instances exist at provider {elsewhere[0]!r}; with {kind!r} nobody could reach them"
    if not live or current is None or wanted == current:
        return ""
    for name in ("region", "zone"):
        before, after = getattr(current, name), getattr(wanted, name)
        if before != after:
            return f"{len(live)} instances exist in {name} {before!r}; from {after!r} nobody could reach them"
    if not durable:
        return f"{len(live)} instances end with provider {kind!r} as it is set up now"
    return ""
