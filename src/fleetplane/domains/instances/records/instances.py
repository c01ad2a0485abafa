"""The instances of this shard and what has happened to them, as records in the store.

Every step of an instance's life is one transaction on one record, so a crash leaves it between
two steps and never inside one. Knows the store; knows no provider, no protobuf and no rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from fleetplane.domains.instances.kinds import (
    GROUP,
    INSTANCE,
    PUBLIC_KEY,
    REPORT,
    TENANT,
    DrainState,
    GroupOverride,
    Instance,
    InstanceSpec,
    InstanceStatus,
    PublicKeyFile,
    TenantSleep,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.instances.records import reports
from fleetplane.kernel.errors import NotFound, ResourceExhausted
from fleetplane.kernel.resources import Key, Nothing, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store

SERVER = "system/instances"
"""The actor of what the server does by itself."""
KEYS_LIMIT = 64
"""Public keys kept of one instance."""
ERROR_LIMIT = 256
"""Characters kept of what went wrong with one."""

GroupKey = tuple[str, str]
"""Tenant and group."""

Step = Callable[[InstanceStatus, int], InstanceStatus]
"""From what has happened so far and the time, what has happened now."""


class Instances:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._index: tuple[int, Mapping[GroupKey, Sequence[Instance]]] | None = None

    # Reading.

    def get(self, tenant: str, name: str) -> Instance:
        instance = self.find(tenant, name)
        if instance is None:
            raise NotFound(f"instance {name!r} is not known", details={"instance_id": name})
        return instance

    def find(self, tenant: str, name: str) -> Instance | None:
        return self._store.get(INSTANCE, tenant_scope(tenant), name)

    def tenant_of(self, name: str) -> str | None:
        """Whose an instance is, by its id alone."""
        return self._store.claimed_by(INSTANCE, "", "id", name)

    def all(self, tenant: str | None = None) -> Sequence[Instance]:
        return self._store.list(INSTANCE, "" if tenant is None else tenant_scope(tenant))

    def of_group(self, tenant: str, group: str) -> Sequence[Instance]:
        return self._by_group().get((tenant, group), ())

    def groups(self) -> set[GroupKey]:
        """Every group that has instances."""
        return set(self._by_group())

    def _by_group(self) -> Mapping[GroupKey, Sequence[Instance]]:
        """Put together once after a change, however many groups are then looked at."""
        revision = self._store.kind_revision(INSTANCE)
        if self._index is None or self._index[0] != revision:
            index: dict[GroupKey, list[Instance]] = {}
            for instance in self.all():
                index.setdefault((tenant_of(instance), instance.spec.group), []).append(instance)
            self._index = (revision, index)
        return self._index[1]

    # Steps.

    async def record(
        self,
        tenant: str,
        name: str,
        spec: InstanceSpec,
        status: InstanceStatus,
        *,
        actor: str = SERVER,
        check: Callable[[Draft], None] = lambda _draft: None,
    ) -> Instance:
        """The first step: write down that it shall exist, before anyone is asked to make it.

        What is made on demand wakes its tenant. `check` may refuse it in the same transaction.
        """
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> Instance:
            check(draft)
            # Providers know instances by their id alone, so an id is unique across tenants.
            draft.claim(INSTANCE, "", "id", name, tenant)
            sleep = draft.get(TENANT, scope, tenant) if spec.on_demand else None
            if sleep is not None and sleep.spec.asleep:
                draft.put(TENANT, scope, tenant, spec=TenantSleep())
            return draft.put(INSTANCE, scope, name, spec=spec, status=status, expect=ABSENT)

        touches = [_key(tenant, name), *([TENANT.key(scope, tenant)] if spec.on_demand else ())]
        done = await self._store.transact(change, actor=actor, action="instances.record", touches=touches)
        return done.value

    async def put_in_subnet(self, tenant: str, name: str, subnet: str) -> Instance:
        """Write down where one shall be made, before the provider is asked; what was written stays."""

        def change(draft: Draft) -> Instance:
            found = draft.get(INSTANCE, tenant_scope(tenant), name)
            if found is None:
                raise NotFound(f"instance {name!r} is not known", details={"instance_id": name})
            if found.spec.subnet or found.status is None or found.status.provider_id:
                return found
            spec = msgspec.structs.replace(found.spec, subnet=subnet)
            return draft.put(
                INSTANCE, found.scope, name, spec=spec, status=found.status, conditions=found.conditions
            )

        done = await self._store.transact(
            change, actor=SERVER, action="instances.subnet", touches=[_key(tenant, name)]
        )
        return done.value

    async def step(
        self,
        tenant: str,
        name: str,
        step: Step,
        *,
        action: str,
        actor: str = SERVER,
        check: Callable[[Instance], None] = lambda _instance: None,
    ) -> Instance | None:
        """Take one step of an instance's life; None if it is gone. `check` may refuse it as it is then."""

        def change(draft: Draft) -> Instance | None:
            instance = draft.get(INSTANCE, tenant_scope(tenant), name)
            if instance is None:
                return None
            check(instance)
            return put_status(draft, instance, step(instance.status or InstanceStatus(), draft.now_ns))

        done = await self._store.transact(
            change, actor=actor, action=f"instances.{action}", touches=[_key(tenant, name)]
        )
        return done.value

    async def drain(
        self,
        tenant: str,
        name: str,
        drain: DrainState,
        *,
        actor: str = SERVER,
        check: Callable[[Instance], None] = lambda _instance: None,
    ) -> Instance | None:
        """Begin to drain; a drain that has begun already is left as it is."""

        def begin(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return status if status.drain is not None else msgspec.structs.replace(status, drain=drain)

        return await self.step(tenant, name, begin, action="drain", actor=actor, check=check)

    async def acknowledge(self, tenant: str, name: str, *, actor: str) -> Instance:
        """The operator has emptied it. Trusted also when no drain was begun."""

        def acked(status: InstanceStatus, now_ns: int) -> InstanceStatus:
            drain = status.drain or DrainState(
                reason="requested", started_at_ns=now_ns, delete_at_ns=now_ns, replace=False
            )
            if drain.acked_at_ns is not None:
                return status
            return msgspec.structs.replace(status, drain=msgspec.structs.replace(drain, acked_at_ns=now_ns))

        done = await self.step(tenant, name, acked, action="acknowledge", actor=actor)
        if done is None:
            raise NotFound(f"instance {name!r} is not known", details={"instance_id": name})
        return done

    async def note_error(self, tenant: str, name: str, text: str) -> None:
        """Leave in the record what went wrong; an error that stays the same is written once."""
        text = text[:ERROR_LIMIT]
        known = self.find(tenant, name)
        if known is None or (known.status is not None and known.status.last_error == text):
            return

        def noted(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, last_error=text)

        await self.step(tenant, name, noted, action="error")

    async def purge(self, tenant: str, name: str) -> None:
        """Forget the record, and the keys its agent had handed in."""
        scope = tenant_scope(tenant)
        keys = [
            Key(PUBLIC_KEY.name, scope, key) for key in _key_names(self._store.list(PUBLIC_KEY, scope), name)
        ]

        report = REPORT.key(reports.SCOPE, name)

        def change(draft: Draft) -> None:
            draft.release(INSTANCE, "", "id", name, tenant)
            doomed = ((INSTANCE, _key(tenant, name)), (REPORT, report), *((PUBLIC_KEY, key) for key in keys))
            for kind, key in doomed:
                if draft.get(kind, key.scope, key.name) is not None:  # type: ignore[arg-type]
                    draft.delete(kind, key.scope, key.name)  # type: ignore[arg-type]

        await self._store.transact(
            change, actor=SERVER, action="instances.purge", touches=[_key(tenant, name), report, *keys]
        )

    # Keys that agents made.

    def keys(self, tenant: str, instance: str, wanted: Iterable[str]) -> dict[str, str]:
        """The wanted key pairs that the agent has made, with their public keys.

        Looked up one by one: this is asked at every report of every agent.
        """
        scope = tenant_scope(tenant)
        found = {
            filename: self._store.get(PUBLIC_KEY, scope, f"{instance}/{filename}") for filename in wanted
        }
        return {filename: key.spec.pem for filename, key in found.items() if key is not None}

    async def keep_keys(self, tenant: str, instance: str, pems: dict[str, str], *, actor: str) -> None:
        """Keep public keys of an instance that exists; not of one that is gone, or more than it may have."""
        scope = tenant_scope(tenant)
        names = {filename: f"{instance}/{filename}" for filename in pems}

        def change(draft: Draft) -> None:
            owner = draft.get(INSTANCE, scope, instance)
            if owner is None or owner.status is None or owner.status.deleted_at_ns is not None:
                raise NotFound(f"instance {instance!r} is not known", details={"instance_id": instance})
            kept = _key_names(draft.list(PUBLIC_KEY, scope), instance)
            if len({*kept, *names.values()}) > KEYS_LIMIT:
                raise ResourceExhausted(f"an instance has at most {KEYS_LIMIT} keys", field="keys")
            for filename, pem in pems.items():
                spec = PublicKeyFile(instance=instance, filename=filename, pem=pem)
                draft.put(PUBLIC_KEY, scope, names[filename], spec=spec)

        await self._store.transact(
            change,
            actor=actor,
            action="instances.keys",
            touches=[Key(PUBLIC_KEY.name, scope, name) for name in names.values()],
        )

    # Groups and tenants as operators set them.

    def overrides(self) -> Iterator[tuple[str, str, GroupOverride]]:
        for found in self._store.list(GROUP):
            yield found.scope.removeprefix("tenant/"), found.name, found.spec

    def override(self, tenant: str, key: str) -> GroupOverride | None:
        found = self._store.get(GROUP, tenant_scope(tenant), key)
        return found.spec if found is not None else None

    def sleep(self, tenant: str) -> TenantSleep:
        found = self._store.get(TENANT, tenant_scope(tenant), tenant)
        return found.spec if found is not None else TenantSleep()

    async def wake_if_due(self, tenant: str, now_ns: int) -> None:
        """End a sleep whose time has come, unless somebody has prolonged it by now."""
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> None:
            found = draft.get(TENANT, scope, tenant)
            if found is not None and _is_due(found.spec, draft.now_ns):
                draft.put(TENANT, scope, tenant, spec=TenantSleep())

        if _is_due(self.sleep(tenant), now_ns):
            await self._store.transact(
                change, actor=SERVER, action="instances.wake", touches=[Key(TENANT.name, scope, tenant)]
            )


def _key_names(kept: Sequence[Resource[PublicKeyFile, Nothing]], instance: str) -> list[str]:
    """Those of one instance among the keys of its tenant, which are sorted by name."""
    prefix = f"{instance}/"
    first = bisect_left(kept, prefix, key=lambda key: key.name)
    return [key.name for key in kept[first : first + KEYS_LIMIT] if key.name.startswith(prefix)]


def _is_due(sleep: TenantSleep, now_ns: int) -> bool:
    return sleep.asleep and sleep.wake_at_ns is not None and now_ns >= sleep.wake_at_ns


def put_status(draft: Draft, instance: Instance, status: InstanceStatus) -> Instance:
    return draft.put(
        INSTANCE,
        instance.scope,
        instance.name,
        spec=instance.spec,
        status=status,
        conditions=instance.conditions,
    )


def _key(tenant: str, name: str) -> Key:
    return Key(INSTANCE.name, tenant_scope(tenant), name)
