"""Plans: computed, kept, and applied in one transaction, or refused with what has moved.

A plan is rehearsed twice: when it is made, which shows what it would do and what that depends on, and when
it is applied, by the rights of whoever applies it then. It is applied only if everything that it was based on
is as it was and it would do the very same; changes of several domains and the mark that it was applied are
one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fleetplane.fleet.plans import records
from fleetplane.fleet.plans.decisions import (
    ObjectAddress,
    PlannedStep,
    check_unique,
    owned_labels,
    ownership_warning,
    prunable,
)
from fleetplane.fleet.plans.records import (
    PLAN,
    SCOPE,
    PlanDocument,
    PlanList,
    PlannedObject,
    PlanRead,
    PlanResource,
    PlanSpec,
    PlanStatus,
)
from fleetplane.fleet.plans.rehearsal import Rehearsal, Written, carried_out, rehearsed
from fleetplane.fleet.plans.writer import ObjectPlace, ObjectWriter, WantedObject
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem

OBJECTS_LIMIT = 1000
"""Of one plan, pruned ones included: at about a millisecond each to decide, a second in small steps."""
PLANS_LIMIT = 100
"""Of one caller that have not expired; each has at most 1 MiB."""
READS_LIMIT = 5000
"""Resources and lists that a plan notes as its base: 100 bytes each, half of what a resource may take."""
LIFE_SECONDS = 3600.0
LIFE_LIMIT_SECONDS = 86_400.0
ACTOR = "system/plans"


class PlanOutdated(ConflictBlocker):
    """Something that the plan was based on has changed; it names what."""

    reason = "PLAN_OUTDATED"
    hint = "plan again, and look at the new plan before you apply it"


class PlanExpired(FailedPrecondition):
    reason = "PLAN_EXPIRED"
    hint = "plan again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for."""

    objects: Sequence[WantedObject]
    scope: str = scopes.ROOT
    owner: str = ""
    prune: bool = False
    take_over: bool = False
    life_seconds: float = LIFE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A plan with its sealed part."""

    record: PlanResource
    steps: Sequence[PlannedStep]


class Plans:
    def __init__(self, store: Store, clock: Clock, master: MasterKey, catalogue: Catalogue) -> None:
        self._store = store
        self._clock = clock
        self._master = master
        self._catalogue = catalogue

    def __repr__(self) -> str:
        return f"<Plans {len(self._store.list(PLAN))}>"

    # Making.

    async def make(
        self, request: PlanRequest, sight: Callable[[], Sight], *, caller: str, actor: str
    ) -> KnownPlan:
        """Compute a plan and keep it; nothing that it is about is changed."""
        _check(request)
        check_unique([self._canonical(one.address) for one in request.objects])
        identity = new_uuid(self._clock)

        async def trial(rehearsal: Rehearsal) -> tuple[list[PlannedStep], PlanSpec]:
            steps = await self._steps(rehearsal, request, sight(), actor=caller)
            spec = PlanSpec(
                created_by=caller,
                expires_at_ns=self._clock.now_ns() + int(request.life_seconds * NS),
                revision=rehearsal.revision,
                scope=request.scope,
                owner=request.owner,
                prune=request.prune,
                **self._base(rehearsal),
            )
            return steps, spec

        steps, spec = await rehearsed(self._store, self._clock, trial)
        document = PlanDocument(
            objects=tuple(_kept(one) for one in request.objects),
            steps=tuple(steps),
            take_over=request.take_over,
        )
        blob = records.sealed(document, identity, self._master)

        def change(draft: Draft) -> KnownPlan:
            self._check_room(draft, caller)
            draft.put_secret(records.secret_name(identity), blob)
            return KnownPlan(record=draft.put(PLAN, SCOPE, identity, spec=spec), steps=steps)

        done = await self._store.transact(
            change, actor=actor, action="plan.make", touches=[PLAN.key(SCOPE, identity)]
        )
        return done.value

    def _check_room(self, draft: Draft, caller: str) -> None:
        now_ns = self._clock.now_ns()
        mine = [one for one in draft.list(PLAN, SCOPE) if one.spec.created_by == caller]
        if sum(one.spec.expires_at_ns > now_ns for one in mine) >= PLANS_LIMIT:
            raise ResourceExhausted(
                f"{caller} has {PLANS_LIMIT} plans that have not expired, the most there may be",
                hint="delete some, or let them expire",
            )

    def _canonical(self, address: ObjectAddress) -> ObjectAddress:
        return ObjectAddress(self._catalogue.named(address.kind).resource.name, address.scope, address.name)

    # What it does.

    async def _steps(
        self, rehearsal: Rehearsal, request: PlanRequest, sight: Sight, *, actor: str
    ) -> list[PlannedStep]:
        """Write everything to the rehearsal's draft; what was done, in the order of doing."""
        writer = ObjectWriter(
            self._catalogue,
            rehearsal.draft,
            sight,
            actor=actor,
            clock=self._clock,
            elsewhere=self._store.elsewhere,
        )
        places = [writer.place(one.address, field=one.field) for one in request.objects]
        doomed = self._doomed(writer, request, [place.address for place in places])
        if len(places) + len(doomed) > OBJECTS_LIMIT:
            raise InvalidArgument(
                f"{len(places)} objects and {len(doomed)} to prune, more than {OBJECTS_LIMIT} in one plan",
                field="objects",
                hint="plan a narrower scope",
            )
        steps: list[PlannedStep] = []
        for place in doomed:
            if not place.write.referred_to:
                steps.append(_deleted(writer, place))
                await rehearsal.breathe()
        pairs = sorted(zip(request.objects, places, strict=True), key=lambda pair: pair[1].write.rank)
        for wanted, place in pairs:
            steps.append(_put(writer, request, wanted, place))
            await rehearsal.breathe()
        for place in reversed(doomed):
            if place.write.referred_to:
                steps.append(_deleted(writer, place))
                await rehearsal.breathe()
        writer.finish()
        return steps

    def _doomed(
        self, writer: ObjectWriter, request: PlanRequest, named: list[ObjectAddress]
    ) -> list[ObjectPlace]:
        """What is pruned, by rank."""
        if not request.prune:
            return []
        found = (
            (ObjectAddress(entry.resource.name, one.called.scope, one.called.name), one.stored.labels)
            for entry in self._catalogue.entries
            if any(member.resource.write is not None for member in entry.members)
            for one in entry.all(self._store)
            # Anybody may write any owner's name on what is theirs: another tenant's is not even looked at.
            if writer.sight.may(one.member.resource.permission, one.called.scope)
        )
        doomed = prunable(found, owner=request.owner, scope=request.scope, named=frozenset(named))
        places = [writer.place(address) for address in doomed]
        return sorted(
            (place for place in places if place.stored is not None), key=lambda place: place.write.rank
        )

    # What it is based on.

    def _base(self, trial: Rehearsal) -> dict[str, Any]:
        """Tags of everything public that was read, but for what the plan itself creates."""
        created = {after.key for before, after in trial.draft.differences() if before is None and after}
        reads = tuple(
            PlanRead(*key, records.tag(found), self._called(key, found))
            for key, found in trial.reads.resources.items()
            if key.kind in self._catalogue.written_as and key not in created
        )
        lists = tuple(
            PlanList(kind, scope, records.list_tag(found), self._listed(kind, scope))
            for (kind, scope), found in trial.reads.lists.items()
            if kind in self._catalogue.written_as
        )
        if len(reads) + len(lists) > READS_LIMIT:
            raise InvalidArgument(
                f"the plan depends on {len(reads) + len(lists)} things, more than {READS_LIMIT}",
                field="objects",
                hint="plan fewer objects at once",
            )
        return {"reads": reads, "lists": lists}

    def _called(self, key: Key, found: AnyResource | None) -> str:
        entry, member = self._catalogue.written_as[key.kind]
        if found is None:
            return f"{entry.resource.name}/{key.name}"
        called = member.resource.named(found, self._store)
        return f"{entry.resource.name}/{called} in {member.resource.place(found, self._store)}"

    def _listed(self, kind: str, scope: str) -> str:
        return f"{self._catalogue.written_as[kind][0].resource.plural} at {scope or 'any scope'}"

    def _kind(self, name: str) -> AnyKind:
        resource = self._catalogue.written_as[name][1].resource
        return resource.write.kind or resource.kind if resource.write is not None else resource.kind

    def _moved(self, spec: PlanSpec, draft: Draft) -> Iterator[str]:
        for read in spec.reads:
            kind = self._kind(read.kind)
            now = draft.get(kind, read.scope, read.name)
            if records.tag(now) != read.tag:
                yield f"{read.called} was {_fate(read.tag, now)}"
        for listed in spec.lists:
            kind = self._kind(listed.kind)
            if records.list_tag(draft.list(kind, listed.scope)) != listed.tag:
                yield f"{listed.called} are others or were changed"

    # Applying.

    async def apply(self, identity: str, sight: Callable[[], Sight], *, caller: str, actor: str) -> KnownPlan:
        """Carry a plan out in one transaction; one that was applied answers what it did then."""
        known, document = await self._opened(identity, caller=caller)
        self._check_seen(identity, document, sight())
        if known.status is not None:
            return KnownPlan(record=known, steps=document.steps)

        async def change(rehearsal: Rehearsal) -> Callable[[Written], KnownPlan]:
            draft = rehearsal.draft
            record = draft.get(PLAN, SCOPE, identity)
            if record is None:
                raise NotFound(f"there is no plan {identity!r}")
            if record.status is not None:  # somebody else was first
                return lambda _: KnownPlan(record=record, steps=document.steps)
            if record.spec.expires_at_ns <= draft.now_ns:
                raise PlanExpired("the plan has expired")
            self._refuse_moved(self._moved(record.spec, draft))
            steps = await self._steps(rehearsal, _request(record.spec, document), sight(), actor=caller)
            self._refuse_moved(_differing(document.steps, steps))
            status = PlanStatus(applied_at_ns=draft.now_ns, revision=draft.revision)
            made = draft.put(PLAN, SCOPE, identity, spec=record.spec, status=status)
            return lambda written: KnownPlan(record=written[made.key], steps=document.steps)

        done = await carried_out(self._store, self._clock, change, actor=actor, action="plan.apply")
        return done.value

    def _refuse_moved(self, moved: Iterable[str]) -> None:
        problems = [Problem(field="", message=text, code=Code.INCOMPATIBLE) for text in moved]
        if problems:
            raise PlanOutdated(
                f"what the plan was based on has changed since, in {len(problems)} places", problems
            )

    # Looking.

    async def get(self, identity: str, sight: Callable[[], Sight], *, caller: str) -> KnownPlan:
        """A plan of the caller's, who still may see what it is about; another's is not there."""
        record, document = await self._opened(identity, caller=caller)
        self._check_seen(identity, document, sight())
        return KnownPlan(record=record, steps=document.steps)

    def _check_seen(self, identity: str, document: PlanDocument, sight: Sight) -> None:
        """A plan tells what objects were: not to one who lost the right, or only has its maker's name."""
        for step in document.steps:
            permissions = self._catalogue.named(step.kind).permissions
            if not any(sight.may(one, step.scope) for one in permissions):
                raise NotFound(f"there is no plan {identity[:64]!r}")

    def listed(self, *, caller: str) -> list[PlanResource]:
        """The caller's plans, the newest first."""
        mine = [one for one in self._store.list(PLAN, SCOPE) if one.spec.created_by == caller]
        return sorted(mine, key=lambda one: one.created_revision, reverse=True)

    async def delete(self, identity: str, *, caller: str, actor: str) -> None:
        """Forget a plan of the caller's; what it did stays."""
        record = await self._record(identity, caller=caller)
        await self._forget([record.name], actor=actor)

    async def sweep(self) -> int:
        """Forget plans that have expired; how many."""
        now_ns = self._clock.now_ns()
        old = [one.name for one in self._store.list(PLAN, SCOPE) if one.spec.expires_at_ns <= now_ns]
        for at in range(0, len(old), OBJECTS_LIMIT):
            await self._forget(old[at : at + OBJECTS_LIMIT], actor=ACTOR)
        return len(old)

    async def _forget(self, names: Sequence[str], *, actor: str) -> None:
        def change(draft: Draft) -> None:
            for name in names:
                if draft.get(PLAN, SCOPE, name) is not None:
                    draft.delete(PLAN, SCOPE, name)
                    draft.delete_secret(records.secret_name(name))

        touches = [PLAN.key(SCOPE, name) for name in names]
        await self._store.transact(change, actor=actor, action="plan.delete", touches=touches)

    async def _record(self, identity: str, *, caller: str) -> PlanResource:
        await self._store.settled(PLAN)
        found = self._store.get(PLAN, SCOPE, identity)
        if found is None or found.spec.created_by != caller:
            raise NotFound(f"there is no plan {identity[:64]!r}")
        return found

    async def _opened(self, identity: str, *, caller: str) -> tuple[PlanResource, PlanDocument]:
        record = await self._record(identity, caller=caller)
        blob = await self._store.get_secret(records.secret_name(identity))
        if blob is None:
            raise NotFound(f"there is no plan {identity[:64]!r}")
        return record, records.opened(blob, identity, self._master)


def _check(request: PlanRequest) -> None:
    if not request.objects and not request.prune:
        raise InvalidArgument("name at least one object, or prune", field="objects")
    if len(request.objects) > OBJECTS_LIMIT:
        raise InvalidArgument(f"a plan has at most {OBJECTS_LIMIT} objects", field="objects")
    if request.prune and not request.owner:
        raise InvalidArgument("is required to prune: only what it made is deleted", field="owner")
    if not 0 < request.life_seconds <= LIFE_LIMIT_SECONDS:
        raise InvalidArgument("a plan lasts at most 24h", field="expiresIn")


def _kept(wanted: WantedObject) -> PlannedObject:
    return PlannedObject(
        kind=wanted.address.kind,
        scope=wanted.address.scope,
        name=wanted.address.name,
        spec=msgspec.Raw(msgspec.json.encode(wanted.spec)),
        labels=None if wanted.labels is None else dict(wanted.labels),
        uid=wanted.uid,
    )


def _request(spec: PlanSpec, document: PlanDocument) -> PlanRequest:
    """What the plan was asked for, again."""
    return PlanRequest(
        objects=[
            WantedObject(
                address=ObjectAddress(one.kind, one.scope, one.name),
                spec=msgspec.json.decode(one.spec),
                labels=one.labels,
                uid=one.uid,
                field=f"objects[{number}]",
            )
            for number, one in enumerate(document.objects)
        ],
        scope=spec.scope,
        owner=spec.owner,
        prune=spec.prune,
        take_over=document.take_over,
    )


def _put(writer: ObjectWriter, request: PlanRequest, wanted: WantedObject, place: ObjectPlace) -> PlannedStep:
    # Looked at again: an object before this one may have changed it.
    place = writer.place(place.address)
    before = writer.shown(place, place.stored)
    present = place.stored.labels if place.stored is not None else {}
    warning = (
        ownership_warning(place.address, present, owner=request.owner, take_over=request.take_over)
        if place.stored is not None
        else ""
    )
    labels = owned_labels(wanted.labels, present, owner=request.owner)
    made = writer.put(replace(wanted, labels=labels), place)
    return writer.step(place, before, made, warnings=(warning,) if warning else ())


def _deleted(writer: ObjectWriter, place: ObjectPlace) -> PlannedStep:
    before = writer.shown(place, place.stored)
    writer.delete(place)
    return writer.step(place, before, None, pruned=True)


def _fate(tag: str, now: AnyResource | None) -> str:
    if now is None:
        return "deleted"
    return "changed" if tag else "created"


def _differing(planned: Sequence[PlannedStep], now: Sequence[PlannedStep]) -> Iterator[str]:
    """Objects to which something else would be done now than was planned."""
    before = {step.address: (step.operation, step.changes) for step in planned}
    after = {step.address: (step.operation, step.changes) for step in now}
    for address in sorted(before.keys() | after.keys()):
        if before.get(address) != after.get(address):
            yield f"what would be done to {address} is no longer what was planned"
