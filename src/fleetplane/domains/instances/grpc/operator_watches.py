"""Watches of operators: groups, ended instances and errors.

Groups are told by difference. Whoever changes something rings; each watcher then compares what is
with what it has told and sends the difference, so that nothing is lost, however much happened in
between, and a slow watcher is spared what is no longer so. Instances are told from the store's
own watch, step by step. All watchers of a tenant are told everything, and all streams end
with UNAVAILABLE when the server stops: a clean end would be answered by coming back at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.grpc.operator_groups import OperatorGroups, Statuses
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, Instance, tenant_scope
from fleetplane.domains.instances.live.errors import ErrorFeed, Trouble
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.wire import EventGeneration
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Compacted, ResourceExhausted, Unavailable
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, follow
from fleetplane.kernel.watch import Event, EventType, Watch
from fleetplane.rpc import CallContext

GATHER_SECONDS = 0.05
"""How long changes of groups gather after the first: a group that grows to 500 tells of it some twenty
times a second, not of every machine, and each telling lists all machines of the group."""
WATCHES_LIMIT = 256
"""Streams open for one tenant, of all three sorts. An operator has three, and comes in twos or threes."""

DELETED = "deleted"


class OperatorWatches:
    def __init__(
        self,
        *,
        store: Store,
        shown: OperatorGroups,
        groups: Groups,
        errors: ErrorFeed,
        clock: Clock,
        event_generation: Callable[[str], str],
    ) -> None:
        self._store = store
        self._shown = shown
        self._errors = errors
        self._clock = clock
        self._generation = event_generation
        self._bells: dict[str, set[asyncio.Event]] = {}
        self._open: dict[str, int] = {}
        self._watches: set[Watch] = set()
        self._closed = False
        groups.on_change(lambda changed: self._ring({tenant for tenant, _ in changed}))

    def __repr__(self) -> str:
        return f"<OperatorWatches open={self.open_watches}>"

    @property
    def open_watches(self) -> int:
        return sum(self._open.values())

    async def run(self) -> None:
        """Ring for whatever changes in the store, until cancelled."""
        async with Boundary() as tasks:
            for kind in (GROUP, INSTANCE):
                tasks.keep(f"instances/bell/{kind.name}", partial(self._listen, kind))

    async def _listen(self, kind: AnyKind) -> None:
        # At the beginning for all: what happened before we listened.
        async for batch in follow(self._store, kind, begin=lambda _watch: self._ring(set(self._bells))):
            self._ring({event.resource.scope.removeprefix("tenant/") for event in batch.events})

    def close(self) -> None:
        """End every stream now; they tell their clients to come back later."""
        self._closed = True
        self._ring(set(self._bells))
        self._errors.close()
        for watch in list(self._watches):
            watch.close()

    # Groups.

    async def groups(self, tenant: str, context: CallContext) -> AsyncIterator[operator_pb2.GroupEvent]:
        """Every group, then every difference."""
        with self._entered(tenant):
            await context.send_initial_metadata(())
            generation = EventGeneration(self._generation(tenant))
            with self._bell(tenant) as bell:
                told: Statuses = {}
                while not self._closed:
                    current = self._shown.statuses(tenant)
                    for event in differences(tenant, told, current, generation):
                        yield event
                    told = current
                    await bell.wait()
                    if not self._closed:
                        await self._clock.sleep(GATHER_SECONDS)
                    bell.clear()  # what rings from here on was not yet looked at
        raise _stopping()

    @contextmanager
    def _bell(self, tenant: str) -> Iterator[asyncio.Event]:
        bell = asyncio.Event()
        self._bells.setdefault(tenant, set()).add(bell)
        try:
            yield bell
        finally:
            bells = self._bells[tenant]
            bells.discard(bell)
            if not bells:
                del self._bells[tenant]

    def _ring(self, tenants: Iterable[str]) -> None:
        for tenant in tenants:
            for bell in self._bells.get(tenant, ()):
                bell.set()

    # Instances.

    async def instances(self, tenant: str, context: CallContext) -> AsyncIterator[operator_pb2.InstanceEvent]:
        """Those that are going, then every step that one takes towards its end."""
        with self._entered(tenant):
            endings, scope, begun = Endings(), tenant_scope(tenant), False
            while not self._closed:
                # Before anything is waited for: who has our headers misses nothing, and `close` no watch.
                revision, present = self._store.snapshot(INSTANCE, scope)
                with self._store.watch(INSTANCE, scope, after=revision) as watch:
                    self._watches.add(watch)
                    try:
                        if not begun:
                            await context.send_initial_metadata(())
                        for event in endings.again(present) if begun else endings.begin(present):
                            yield event
                        begun = True
                        async for batch in watch:
                            for event in endings.news(batch.events):
                                yield event
                    except Compacted:  # whoever reads more slowly than history is forgotten
                        continue
                    finally:
                        self._watches.discard(watch)
        raise _stopping()

    # Errors.

    async def errors(self, tenant: str, context: CallContext) -> AsyncIterator[operator_pb2.ErrorEvent]:
        """Errors from now on."""
        with self._entered(tenant), self._errors.subscribe(tenant) as listening:
            await context.send_initial_metadata(())
            async for trouble in listening:
                yield wire.error_event(trouble)
                if lost := listening.take_lost():
                    text = f"{lost} errors were left out: they came faster than they were read"
                    yield wire.error_event(
                        Trouble(tenant=tenant, group="", instance="", text=text, at_ns=trouble.at_ns)
                    )
        raise _stopping()

    @contextmanager
    def _entered(self, tenant: str) -> Iterator[None]:
        if self._closed:
            raise _stopping()
        if self._open.get(tenant, 0) >= WATCHES_LIMIT:
            raise ResourceExhausted(
                f"{WATCHES_LIMIT} watches are open for this tenant, the most there may be"
            )
        self._open[tenant] = self._open.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


def differences(
    tenant: str, told: Statuses, current: Statuses, generation: EventGeneration
) -> Iterator[operator_pb2.GroupEvent]:
    """The changes between what a watcher was sent and the present state. Pure."""
    for key in told.keys() - current.keys():
        yield wire.group_deleted(tenant, key, generation)
    for key, status in current.items():
        before = told.get(key)
        if before is not status and before != status:
            yield wire.group_upserted(status, generation)


class Endings:
    """Which steps of which instances' ends a watcher has been told. Pure.

    An operator finds the machine by its provider's id. Without one only the very end is told: there
    is nothing to drain, and an operator takes a notice that names no machine for an error.
    """

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._last: dict[str, Instance] = {}
        """As they were when they were told of last."""

    def again(self, present: Sequence[Instance]) -> Iterator[operator_pb2.InstanceEvent]:
        """What has happened to everyone meanwhile; those who were leaving and are not there are gone."""
        for instance in present:
            yield from self._step(instance)
        here = {instance.name for instance in present}
        for name in [name for name, word in self._told.items() if name not in here]:
            word, last = self._told.pop(name), self._last.pop(name, None)
            if word != DELETED and last is not None:
                yield wire.instance_event(last, DELETED)

    def begin(self, present: Iterable[Instance]) -> Iterator[operator_pb2.InstanceEvent]:
        """What is on its way out. What is gone already is news to nobody."""
        for instance in present:
            if wire.event_word(instance) == DELETED:
                self._told[instance.name] = DELETED
            else:
                yield from self._step(instance)

    def news(self, events: Iterable[Event]) -> Iterator[operator_pb2.InstanceEvent]:
        for event in events:
            instance: Instance = event.resource
            if event.type is EventType.DELETED:
                self._last.pop(instance.name, None)
                if self._told.pop(instance.name, None) != DELETED:
                    yield wire.instance_event(instance, DELETED)
            else:
                yield from self._step(instance)

    def _step(self, instance: Instance) -> Iterator[operator_pb2.InstanceEvent]:
        word = wire.event_word(instance)
        if word is None or self._told.get(instance.name) == word:
            return
        known = instance.status is not None and bool(instance.status.provider_id)
        if known or word == DELETED:
            self._told[instance.name], self._last[instance.name] = word, instance
            yield wire.instance_event(instance, word)


def _stopping() -> Unavailable:
    return Unavailable("the server is shutting down; watch again")
