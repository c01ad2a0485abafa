"""Settings of providers as they are stored, and which version each provider is to have.

Settings are sent in the answer to a provider's question. It takes part in rollouts from the first time
that it asks while it holds a lease: without a lease nothing could confirm a version, and it gets the
newest. What providers say is written only when it is news. Where a rollout or a policy holds the
settings, providers have the version at which they are held (`fleet/rollouts/holds.py`), whatever is
newest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from fleetplane.domains.gpus.kinds import GPU, SCOPE
from fleetplane.domains.gpus.provider_settings import rules
from fleetplane.domains.gpus.provider_settings.rules import ProviderSettingsSpec
from fleetplane.domains.gpus.providers import ProviderLeases
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.fleet.rollouts import holds
from fleetplane.fleet.rollouts.holds import HoldReader, digest
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.kernel.values.times import NS

SUBJECT = "gpus.settings"
AT = "gpus/providers"
"""Where the settings lie, what providers have of them, and their rollouts."""
NAME = "providers"
"""The one object: settings hold for every provider that asks for them."""


class SettingsAppliedSpec(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    again: bool = False
    """It is to try once more what it could not take; said here where several servers share a database."""


class SettingsAppliedStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: str = ""
    """Which settings the provider says are in force."""
    wanted: str = ""
    """Which ones it was sent last, taken or refused."""
    error: str = ""
    failures: int = 0
    failed_at_ns: int = 0
    """When the last of them was heard of."""


StoredSettings = Resource[ProviderSettingsSpec, Nothing]
SettingsApplied = Resource[SettingsAppliedSpec, SettingsAppliedStatus]

PROVIDER_SETTINGS: Kind[ProviderSettingsSpec, Nothing] = Kind(
    "gpu-provider-settings", ProviderSettingsSpec, Nothing
)
SETTINGS_APPLIED: Kind[SettingsAppliedSpec, SettingsAppliedStatus] = Kind(
    "gpu-settings-applied", SettingsAppliedSpec, SettingsAppliedStatus
)
KINDS = (PROVIDER_SETTINGS, SETTINGS_APPLIED)


ASK_SECONDS = 2.0
"""Between two questions of a provider: one small call for each of a handful."""
RETURN_SECONDS = 60.0
"""After a start of the server, how long a provider has to renew its lease."""
ERROR_LIMIT = 500
FORGET_SECONDS = 86_400.0
"""A provider that has not been heard for so long is no target any more; it comes back by asking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderHealth:
    """A provider as leases and conditions show it."""

    alive: bool
    """Its lease is alive."""
    silent: bool
    """It had the time to renew its lease, and did not."""
    gpus: int = 0
    """On which it reports."""
    unhealthy: int = 0
    """Of those, with a condition of its own that is False."""


class ProviderSettings:
    def __init__(self, store: Store, clock: Clock, providers: ProviderLeases, policy: GpuPolicy) -> None:
        self._store = store
        self._clock = clock
        self._providers = providers
        self._policy = policy
        self._holds = HoldReader(store, SUBJECT)
        self._started_at_ns = clock.now_ns()
        self._again: set[str] = set()
        """Providers that are to try once more what they could not take; stored where several servers are."""

    def __repr__(self) -> str:
        return f"<ProviderSettings of {len(self.applied())}>"

    @property
    def lease_seconds(self) -> float:
        """How long leases last; 0 if there are none."""
        return self._policy.lease_seconds

    # Reading.

    def applied(self) -> Mapping[str, SettingsApplied]:
        """What providers have, by their ids."""
        return {one.name: one for one in self._store.list(SETTINGS_APPLIED, AT)}

    def has_moved(self, provider: str) -> bool:
        """Whether a rollout wants a provider at another version than the rest."""
        held = self._holds.hold(AT).held
        return bool(held) and self._holds.wanted(AT, provider) != held

    def health(self) -> Mapping[str, ProviderHealth]:
        """Every provider that has part in the settings, as it is now."""
        leases = {lease.provider: (lease, alive) for lease, alive in self._providers.leases()}
        gpus: dict[str, list[bool]] = {}
        for gpu in self._store.list(GPU, SCOPE):
            for writer in {one.writer for one in gpu.conditions if one.writer}:
                said = (one.status for one in gpu.conditions if one.writer == writer)
                gpus.setdefault(writer, []).append("False" in said)
        found = {}
        for name in self.applied():
            lease, alive = leases.get(name, (None, False))
            own = gpus.get(name, [])
            silent = not alive if lease is not None else self._had_time_to_return()
            found[name] = ProviderHealth(alive=alive, silent=silent, gpus=len(own), unhealthy=sum(own))
        return found

    def _had_time_to_return(self) -> bool:
        limit_seconds = max(RETURN_SECONDS, self._policy.lease_seconds)
        return self._clock.now_ns() - self._started_at_ns > limit_seconds * NS

    # Asking.

    async def heard(self, request: pb.SyncSettingsRequest) -> pb.SyncSettingsResponse:
        """Take in what a provider has; what it is to have, if it was not sent that yet."""
        provider = request.provider_id
        if any(lease.provider == provider for lease, _ in self._providers.leases()):
            await self._note(provider, request)
        answer = pb.SyncSettingsResponse(lease_seconds=self._policy.lease_seconds, next_seconds=ASK_SECONDS)
        newest = content_of(self._store, AT)
        version = self._holds.wanted(AT, provider) or digest(newest)
        content = newest if version == digest(newest) else self._holds.content(AT, version)
        if content is None:  # never: what targets are steered to is kept
            version, content = digest(newest), newest
        if request.wanted != version or (request.error and await self._is_to_try_again(provider)):
            self._again.discard(provider)
            answer.settings.CopyFrom(rules.message(version, content))
        return answer

    async def again(self, providers: Collection[str]) -> None:
        """Have providers try once more what they could not take, when they ask next, whichever server."""
        if self._store.shared:
            await self._say_again(providers, again=True)
        else:
            self._again |= set(providers)

    async def _is_to_try_again(self, provider: str) -> bool:
        """Whether it is; and if so, that it was told."""
        if not self._store.shared:
            return provider in self._again
        stored = self._store.get(SETTINGS_APPLIED, AT, provider)
        return stored is not None and stored.spec.again and await self._say_again([provider], again=False)

    async def _say_again(self, providers: Collection[str], *, again: bool) -> bool:
        def change(draft: Draft) -> bool:
            said = False
            for name in providers:
                stored = draft.get(SETTINGS_APPLIED, AT, name)
                if stored is not None and stored.spec.again is not again:
                    spec = msgspec.structs.replace(stored.spec, again=again)
                    draft.put(SETTINGS_APPLIED, AT, name, spec=spec, status=stored.status)
                    said = True
            return said

        touches = [SETTINGS_APPLIED.key(AT, name) for name in providers]
        done = await self._store.transact(
            change, actor="system/gpus", action="gpus.settings_again", touches=touches
        )
        return done.value

    async def _note(self, provider: str, said: pb.SyncSettingsRequest) -> None:
        stored = self._store.get(SETTINGS_APPLIED, AT, provider)
        before = stored.status if stored is not None else None
        after = reported(said, before or SettingsAppliedStatus(), now_ns=self._clock.now_ns())
        if after == before:
            return
        gone = [] if stored is not None else self._forgettable()

        def change(draft: Draft) -> None:
            for name in gone:
                if draft.get(SETTINGS_APPLIED, AT, name) is not None:
                    draft.delete(SETTINGS_APPLIED, AT, name)
            present = draft.get(SETTINGS_APPLIED, AT, provider)
            spec = present.spec if present is not None else SettingsAppliedSpec(provider=provider)
            draft.put(SETTINGS_APPLIED, AT, provider, spec=spec, status=after)

        keys = {SETTINGS_APPLIED.key(AT, name) for name in (provider, *gone)}
        await self._store.transact(
            change, actor=f"gpus/{provider}", action="gpus.settings_applied", touches=keys
        )

    def _forgettable(self) -> list[str]:
        """Providers that nobody has heard for a day; all without a lease where there are too many."""
        applied = self.applied()
        leases = {lease.provider: lease for lease, _ in self._providers.leases()}
        if len(applied) >= self._policy.max_providers:
            return [name for name in applied if name not in leases]
        now_ns = self._clock.now_ns()
        return [
            name
            for name in applied
            if now_ns - (leases[name].heard_at_ns if name in leases else self._started_at_ns)
            > FORGET_SECONDS * NS
        ]

    # Holding.

    def commit_hook(self, _actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
        """Part of every change of the settings: holds providers at what was, where rollouts are asked for."""
        for kind, _, _ in touches:
            if kind == PROVIDER_SETTINGS.name:
                break
        else:
            return None
        return HookedChange(change=lambda draft, _made: _hold(draft), touches=holds.keys_of(SUBJECT, AT))


def _hold(draft: Draft) -> None:
    for before, after in list(draft.differences()):
        found = before or after
        if found is not None and found.kind == PROVIDER_SETTINGS.name:
            earlier = rules.encoded(before.spec if before is not None else None)
            later = rules.encoded(after.spec if after is not None else None)
            if earlier != later:
                holds.changing(draft, SUBJECT, AT, before=earlier, after=later)


def content_of(source: Store | Draft, _scope: str) -> bytes:
    """The newest version; without settings, the one that leaves everything to providers."""
    found = source.get(PROVIDER_SETTINGS, AT, NAME)
    return rules.encoded(found.spec if found is not None else None)


def reported(
    said: pb.SyncSettingsRequest, before: SettingsAppliedStatus, *, now_ns: int
) -> SettingsAppliedStatus:
    """What a provider has, after its question; the same as before if it says nothing new."""
    error = "".join(one if one.isprintable() else " " for one in said.error[:ERROR_LIMIT])
    failures = min(said.failures, 2**31)
    is_same = (before.wanted, before.error, before.failures) == (said.wanted[:64], error, failures)
    return SettingsAppliedStatus(
        version=said.applied[:64],
        wanted=said.wanted[:64],
        error=error,
        failures=failures,
        failed_at_ns=0 if not error else before.failed_at_ns if is_same else now_ns,
    )
