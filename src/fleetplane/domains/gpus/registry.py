"""The GPUs of this node and what their providers say about them.

One writer at a time changes a GPU, and a reader that comes while a change is being written
waits for it: nobody is told "healthy" once "unhealthy" has been accepted. Knows the store
and the rules; knows no protobuf and no transport.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.kinds import (
    GPU,
    PROVIDER_LABEL,
    REGISTRANT_LABEL,
    SCOPE,
    Gpu,
    GpuSpec,
    Replacement,
    StatusReport,
)
from fleetplane.domains.gpus.leases import PROVIDER_LEASE, expire, is_silent, lease_key, revive
from fleetplane.domains.gpus.rules import GpuPolicy, GpuState
from fleetplane.kernel.errors import Conflict, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted
from fleetplane.kernel.resources import Condition, Key
from fleetplane.kernel.store import Draft, Store

SPOKEN_KEPT = 4
"""Providers remembered to have said something, for each that may hold a lease."""
NOBODY: Final[frozenset[str]] = frozenset()
SERVER = "system/gpus"
"""The actor of what the server does by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredGpu:
    created: bool
    version: int


class SilencedGpus:
    """On which GPUs each provider's conditions are put aside, as the view has it."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<SilencedGpus providers={len(self._names)}>"

    def of(self, provider: str) -> tuple[str, ...]:
        return tuple(self._names.get(provider, ()))

    def moved(self, before: Gpu | None, after: Gpu | None) -> None:
        was, now = _put_aside(before), _put_aside(after)
        if was is now:  # nearly always: nobody's
            return
        for provider in was - now:
            assert before is not None
            names = self._names[provider]
            del names[before.name]
            if not names:
                del self._names[provider]
        for provider in now - was:
            assert after is not None
            self._names.setdefault(provider, {})[after.name] = None


def _put_aside(gpu: Gpu | None) -> frozenset[str]:
    if gpu is None or gpu.status is None or not gpu.status.silenced:  # nearly always
        return NOBODY
    return frozenset(said.writer for said in gpu.status.silenced)


class Gpus:
    def __init__(self, store: Store, policy: GpuPolicy) -> None:
        self._store = store
        self._policy = policy
        self._aside = SilencedGpus()
        store.feed(GPU, self._aside)
        self._silencing: Counter[str] = Counter()
        """Providers whose `ProviderSilent` is being written by this process."""
        self._spoken: OrderedDict[str, None] = OrderedDict()
        for gpu in store.list(GPU, SCOPE):
            for writer in (gpu.labels.get(PROVIDER_LABEL, ""), *(one.writer for one in gpu.conditions)):
                self._note_spoken(writer)
        self.peek = store.peeker(GPU, SCOPE)
        """The GPU of a name, if there is one and no change to it is being written: then nobody need wait."""
        self.writes: Counter[str] = Counter()
        """Acknowledged writes by operation, for the metrics."""

    # Reading.

    async def get(self, name: str) -> Gpu:
        if (change := self._store.unsettled(GPU, SCOPE, name)) is not None:
            await change
        gpu = self._store.get(GPU, SCOPE, name)
        if gpu is None:
            raise _not_found(name)
        return gpu

    async def settled(self) -> None:
        """Return once every change accepted so far can be read."""
        if (change := self._store.unsettled(GPU)) is not None:
            await change

    @property
    def is_settled(self) -> bool:
        """Whether every change accepted so far can be read now."""
        return not self._store.pending(GPU)

    def all(self) -> Sequence[Gpu]:
        return self._store.list(GPU, SCOPE)

    @property
    def count(self) -> int:
        return self._store.count(GPU, SCOPE)

    def has_spoken(self, provider: str) -> bool:
        """Whether this provider has registered a GPU or written a condition, as far as is remembered."""
        return provider in self._spoken

    def writers(self) -> frozenset[str]:
        """Every provider that a GPU names; looks at all of them."""
        return frozenset(
            writer
            for gpu in self.all()
            for writer in (gpu.labels.get(PROVIDER_LABEL, ""), *(one.writer for one in gpu.conditions))
            if writer
        )

    def _note_spoken(self, provider: str) -> None:
        if provider:
            self._spoken[provider] = None
            self._spoken.move_to_end(provider)
            while len(self._spoken) > SPOKEN_KEPT * self._policy.max_providers:
                self._spoken.popitem(last=False)

    @property
    def version(self) -> int:
        """The version of the last change to any GPU."""
        return self._store.kind_revision(GPU)

    # Writing.

    async def register(
        self,
        name: str,
        *,
        uuid: str | None,
        report: StatusReport | None,
        provider: str,
        actor: str,
        parent: str = "",
    ) -> RegisteredGpu:
        """Add the GPU, or leave the present one exactly as it is."""
        returning, resting = await self._returning(provider), self._resting(provider)

        def change(draft: Draft) -> RegisteredGpu:
            present = draft.get(GPU, SCOPE, name)
            self._restore(draft, provider, returning)
            if resting:
                revive(draft, provider)
            if present is not None:
                return RegisteredGpu(created=False, version=present.revision)
            self._require_room(draft)
            state = rules.set_status(report, provider)
            added = draft.put(
                GPU,
                SCOPE,
                name,
                spec=GpuSpec(uuid=uuid, parent=parent),
                status=state.status,
                conditions=state.conditions,
                labels={PROVIDER_LABEL: provider, REGISTRANT_LABEL: provider} if provider else {},
            )
            return RegisteredGpu(created=True, version=added.revision)

        done = await self._store.transact(
            change, actor=actor, action="gpus.register", touches=[*_keys(name, *returning), *resting]
        )
        if done.value.created:
            self._note_spoken(provider)
            self.writes["register"] += 1
        return done.value

    async def create(
        self, name: str, *, uuid: str | None, report: StatusReport | None, actor: str
    ) -> tuple[Gpu, bool]:
        """The GPU, and whether it was made now; a present one is left as it is."""

        def change(draft: Draft) -> tuple[Gpu, bool]:
            present = draft.get(GPU, SCOPE, name)
            if present is not None:
                return present, False
            self._require_room(draft)
            state = rules.set_status(rules.stamped(report, now_ns=draft.now_ns))
            made = draft.put(
                GPU, SCOPE, name, spec=GpuSpec(uuid=uuid), status=state.status, conditions=state.conditions
            )
            return made, True

        done = await self._store.transact(change, actor=actor, action="gpus.create", touches=_keys(name))
        if done.value[1]:
            self.writes["register"] += 1
        return done.value

    async def replace(
        self, name: str, wanted: Replacement | Callable[[Gpu], Replacement], *, actor: str, operation: str
    ) -> Gpu:
        """Replace the spec, or the status if there is a report, as is given or made of the present GPU."""

        def change(draft: Draft) -> Gpu:
            present = draft.get(GPU, SCOPE, name)
            if present is None:
                raise _not_found(name)
            new = wanted(present) if callable(wanted) else wanted
            _require(present, uid=new.uid, version=new.version)
            if new.report is not None:
                state = rules.set_status(rules.stamped(new.report, now_ns=draft.now_ns))
                return _put(draft, present, state, renew=True)
            return draft.put(
                GPU,
                SCOPE,
                name,
                spec=GpuSpec(uuid=new.uuid, parent=present.spec.parent),
                status=present.status,
                conditions=present.conditions,
                labels=present.labels,
            )

        done = await self._store.transact(
            change, actor=actor, action=f"gpus.{operation}", touches=_keys(name)
        )
        self.writes[operation] += 1
        return done.value

    def _require_room(self, draft: Draft) -> None:
        if draft.count(GPU, SCOPE) >= self._policy.max_gpus:
            raise ResourceExhausted(
                f"{self._policy.max_gpus} GPUs are registered already",
                field="name",
                hint="unregister GPUs that are gone, or raise gpus.max_gpus",
            )

    async def unregister(
        self, name: str, *, provider: str = "", uid: str = "", version: int | None = None, actor: str
    ) -> bool:
        def change(draft: Draft) -> bool:
            present = draft.get(GPU, SCOPE, name)
            if present is None:
                return False
            if uid and uid != present.uid:
                raise Conflict(f"GPU {name!r} has the uid {present.uid}, not {uid[:64]}", field="opts.uid")
            _require(present, version=version)
            owner = present.labels.get(REGISTRANT_LABEL, "")
            if provider and owner not in ("", provider) and not self._policy.shared_writes:
                raise PermissionDenied(
                    f"GPU {name!r} was registered by provider {owner!r}, not by {provider!r}",
                    field="provider_id",
                    hint="leave it to that provider, or set gpus.shared_writes = true",
                )
            draft.delete(GPU, SCOPE, name)
            return True

        done = await self._store.transact(change, actor=actor, action="gpus.unregister", touches=_keys(name))
        if done.value:
            self.writes["unregister"] += 1
        return done.value

    async def set_status(self, name: str, report: StatusReport | None, *, provider: str, actor: str) -> int:
        def replace(state: GpuState, _now_ns: int) -> GpuState:
            rules.check_writer(state.conditions, provider, self._policy)
            return rules.set_status(report, provider)

        return await self._update(name, replace, "update_status", provider, actor)

    def set_condition(
        self, name: str, condition: Condition, *, actor: str, action: str | None = None
    ) -> Coroutine[Any, Any, int]:
        def merge(state: GpuState, now_ns: int) -> GpuState:
            state = rules.set_condition(state, condition, now_ns=now_ns, policy=self._policy)
            return rules.recommend(state, action, condition.writer)

        return self._update(name, merge, "update_condition", condition.writer, actor)

    async def _update(
        self, name: str, new_state: rules.NewState, operation: str, provider: str, actor: str
    ) -> int:
        returning, resting = await self._returning(provider), self._resting(provider)

        def change(draft: Draft) -> int:
            gpu = draft.get(GPU, SCOPE, name)
            if gpu is None:
                raise _not_found(name)
            if returning or (gpu.status is not None and gpu.status.silenced):
                self._restore(draft, provider, (*returning, name))
                gpu = draft.get(GPU, SCOPE, name)
                assert gpu is not None
            if resting:
                revive(draft, provider)
            # Every report is news to a watcher, also one that repeats the last.
            after = new_state(_state(gpu), draft.now_ns)
            return _put(draft, gpu, after, provider=provider, renew=True).revision

        done = await self._store.transact(
            change, actor=actor, action=f"gpus.{operation}", touches=[*_keys(name, *returning), *resting]
        )
        self._note_spoken(provider)
        self.writes[operation] += 1
        return done.value

    # Silence.

    async def provider_heard(
        self,
        provider: str,
        names: Collection[str],
        *,
        actor: str,
        beside: Callable[[Draft], None] | None = None,
        touches: Sequence[Key] = (),
    ) -> None:
        """Let what the provider had said be read again, on the named GPUs or on all of them.

        `beside` is done in the same transaction; `touches` names what it changes.
        """
        returning = [name for name in await self._returning(provider) if not names or name in names]
        if not returning and beside is None:
            return

        def change(draft: Draft) -> None:
            if beside is not None:
                beside(draft)
            self._restore(draft, provider, returning)

        await self._store.transact(
            change, actor=actor, action="gpus.provider_returned", touches=[*_keys(*returning), *touches]
        )
        self.writes["restore"] += bool(returning)

    async def silence(self, provider: str | None, *, message: str, lease: int | None = None) -> int:
        """Make what the provider said (None: what anyone said) read Unknown; tell on how many GPUs.

        `lease` is the revision of the stored lease that was found to have run out: if it is another one by
        now, its holder was heard, and nothing is changed.
        """
        affected = [
            gpu.name
            for gpu in self.all()
            if any(provider in (None, condition.writer) for condition in gpu.conditions)
        ]

        def change(draft: Draft) -> int:
            changed = 0
            if provider is not None and lease is not None and not expire(draft, provider, judged=lease):
                return 0
            for gpu in filter(None, (draft.get(GPU, SCOPE, name) for name in affected)):
                before = _state(gpu)
                after = rules.silence(before, provider=provider, message=message, now_ns=draft.now_ns)
                if after is not before:
                    _put(draft, gpu, after)
                    changed += 1
            return changed

        touches = _keys(*affected)
        if provider is not None and lease is not None:
            touches.append(lease_key(provider))
        if provider is not None:  # it may be heard again while this is being written
            self._silencing[provider] += 1
        try:
            done = await self._store.transact(
                change, actor=SERVER, action="gpus.provider_silent", touches=touches
            )
        finally:
            if provider is not None:
                self._silencing[provider] -= 1
        self.writes["silence"] += done.value > 0
        return done.value

    async def _returning(self, provider: str) -> tuple[str, ...]:
        """The GPUs on which this provider's conditions are put aside by `ProviderSilent`.

        Known once that is written: whoever put them aside, and on whichever server.
        """
        if self._silencing.get(provider):
            await self.settled()
        return self._aside.of(provider) if provider else ()

    def _resting(self, provider: str) -> Sequence[Key]:
        """The provider's stored lease, if that has run out: hearing the provider lets it hold again."""
        if provider and self._store.shared and is_silent(self._store.get(PROVIDER_LEASE, SCOPE, provider)):
            return (lease_key(provider),)
        return ()

    def _restore(self, draft: Draft, provider: str, names: Iterable[str]) -> None:
        for gpu in filter(None, (draft.get(GPU, SCOPE, name) for name in names)):
            if gpu.status is None or not gpu.status.silenced:  # nearly always: nothing was put aside
                continue
            before = _state(gpu)
            after = rules.restore(before, provider=provider, now_ns=draft.now_ns)
            if after is not before:
                _put(draft, gpu, after)


def _not_found(name: str) -> NotFound:
    return NotFound("gpu not found", field="name", details={"name": name})


def _require(gpu: Gpu, *, uid: str = "", version: int | None) -> None:
    """Refuse a write that is meant for another GPU of that name, or for another version of it."""
    if uid and uid != gpu.uid:
        raise InvalidArgument(f"uid is {gpu.uid}, and cannot be changed", field="gpu.metadata.uid")
    if version is not None and version != gpu.revision:
        raise Conflict(
            f"GPU {gpu.name!r} is at resource_version {gpu.revision}, not {version}",
            field="resource_version",
            hint="read it again and decide anew",
        )


def _keys(*names: str) -> list[Key]:
    return [Key(GPU.name, SCOPE, name) for name in names]


def _state(gpu: Gpu) -> GpuState:
    return GpuState(conditions=gpu.conditions, status=gpu.status)


def _put(draft: Draft, gpu: Gpu, state: GpuState, *, provider: str = "", renew: bool = False) -> Gpu:
    labels = gpu.labels
    if provider and labels.get(PROVIDER_LABEL) != provider:
        labels = {**labels, PROVIDER_LABEL: provider}
    return draft.put(
        GPU,
        SCOPE,
        gpu.name,
        spec=gpu.spec,
        status=state.status,
        conditions=state.conditions,
        labels=labels,
        renew=renew,
    )
