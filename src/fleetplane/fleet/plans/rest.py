"""`/apis/v1/plans` and `/apis/v1/export`.

POST   /apis/v1/plans                what many objects would come to; kept, nothing is changed
GET    /apis/v1/plans                the caller's plans
GET    /apis/v1/plans/ID             one of them
DELETE /apis/v1/plans/ID             forget it
POST   /apis/v1/plans/ID/apply       carry it out in one transaction
GET    /apis/v1/export               all desired state, as objects to plan and apply elsewhere
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from fleetplane.fleet.plans import export
from fleetplane.fleet.plans.decisions import ObjectAddress, PlannedStep, PlanOperation
from fleetplane.fleet.plans.given import GivenObject
from fleetplane.fleet.plans.plans import KnownPlan, PlanRequest, Plans
from fleetplane.fleet.plans.records import PlanResource
from fleetplane.fleet.plans.verbs import NO_CONTENT, ApiCall
from fleetplane.fleet.plans.writer import WantedObject
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.access import ApiDoor, Sight
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.fleet.resources.declaration import ResourceShape
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.rpc import Needs
from fleetplane.web.rest.routes import Answer, Query, Route

PERMISSION = Permission("fleet.view")
"""Named in the document. What counts are the permissions for each object, asked by `ObjectWriter`."""
OWNER_LIMIT = 128
_TAG = "Plans"


class PlanBody(ResourceShape, frozen=True, forbid_unknown_fields=True):
    """What should be."""

    objects: tuple[GivenObject, ...] = ()
    scope: str = scopes.ROOT
    """Where objects lie that name no scope, and at and below which is pruned."""
    owner: str = ""
    """Written to the objects as the label `fleetplane/owner`."""
    prune: bool = False
    """Delete what this owner made within the scope and does not name any more."""
    take_over: bool = False
    """Change also what belongs to another owner, and make it this one's."""
    expires_in: str = "1h"


class ShownChange(ResourceShape, frozen=True):
    """One field. `old` is missing of one that is new, `new` of one that goes."""

    field: str
    old: Any | UnsetType = UNSET
    new: Any | UnsetType = UNSET


class ShownStep(ResourceShape, frozen=True):
    operation: str
    """`create`, `change`, `nothing` or `delete`."""
    kind: str
    scope: str
    name: str
    changes: Sequence[ShownChange]
    warnings: Sequence[str]
    disturbs: Sequence[str]
    """What it interrupts: reloads, replaced machines, restarted programs."""
    pruned: bool


class ShownPlan(ResourceShape, frozen=True):
    kind: str
    id: str
    state: str
    """`open`, `applied` or `expired`."""
    scope: str
    owner: str
    prune: bool
    created_by: str
    created_at: str
    expires_at: str
    revision: int
    """That it was computed at."""
    applied_at: str | None
    applied_revision: int | None
    """Of the transaction that applied it."""
    summary: Mapping[str, int]
    """How many objects are created, changed, left and deleted."""
    steps: Sequence[ShownStep]


class PlanRow(ResourceShape, frozen=True):
    id: str
    state: str
    scope: str
    owner: str
    created_at: str
    expires_at: str
    revision: int


class ShownPlans(ResourceShape, frozen=True):
    kind: str
    items: Sequence[PlanRow]


class PlanRoutes:
    def __init__(self, store: Store, clock: Clock, catalogue: Catalogue, door: ApiDoor, plans: Plans) -> None:
        self._store = store
        self._clock = clock
        self._catalogue = catalogue
        self._door = door
        self._plans = plans

    def routes(self) -> Iterator[Route]:
        about: dict[str, Any] = {"tag": _TAG, "permission": PERMISSION}
        yield Route(
            method="POST",
            path="/plans",
            needs=Needs.WRITES,
            handler=self.make_plan,
            summary="Plan many objects at once: what would change, field by field, and what it disturbs",
            body=PlanBody,
            answer=ShownPlan,
            status=201,
            **about,
        )
        yield Route(
            method="GET",
            path="/plans",
            handler=self.list_plans,
            needs=Needs.STORE,
            summary="List the caller's plans, the newest first",
            answer=ShownPlans,
            **about,
        )
        yield Route(
            method="GET",
            path="/plans/{id}",
            handler=self.get_plan,
            needs=Needs.STORE,
            summary="Get a plan",
            answer=ShownPlan,
            **about,
        )
        yield Route(
            method="DELETE",
            path="/plans/{id}",
            needs=Needs.WRITES,
            handler=self.delete_plan,
            summary="Delete a plan; what it did stays",
            status=NO_CONTENT,
            **about,
        )
        yield Route(
            method="POST",
            path="/plans/{id}/apply",
            needs=Needs.WRITES,
            handler=self.apply_plan,
            summary="Apply a plan in one transaction, unless something it was based on has changed",
            answer=ShownPlan,
            **about,
        )
        yield Route(
            method="GET",
            path="/export",
            handler=self.export,
            needs=Needs.STORE,
            summary="Export desired state as objects that can be planned and applied elsewhere",
            answer=export.Export,
            query=(
                Query(name="scope", summary="At and below which scope; / if not given"),
                Query(name="kinds", summary="Resources, separated by commas; all if not given"),
            ),
            **about,
        )

    async def make_plan(self, call: ApiCall) -> Answer[ShownPlan]:
        body: PlanBody = call.body
        answer = call.answering(lambda made: Answer(content=self._shown(made)))
        return answer(
            await self._plans.make(
                _request(body),
                lambda: Sight(self._door, call.caller),
                caller=call.caller.name,
                actor=call.signed(call.caller.name),
            )
        )

    async def list_plans(self, call: ApiCall) -> Answer[ShownPlans]:
        found = self._plans.listed(caller=call.caller.name)
        return Answer(content=ShownPlans(kind="plan-list", items=[self._row(one) for one in found]))

    async def get_plan(self, call: ApiCall) -> Answer[ShownPlan]:
        found = await self._plans.get(
            call.path["id"], lambda: Sight(self._door, call.caller), caller=call.caller.name
        )
        return Answer(content=self._shown(found))

    async def delete_plan(self, call: ApiCall) -> Answer[None]:
        name = call.caller.name
        await self._plans.delete(call.path["id"], caller=name, actor=name)
        return Answer(content=None)

    async def apply_plan(self, call: ApiCall) -> Answer[ShownPlan]:
        answer = call.answering(lambda done: Answer(content=self._shown(done)))
        return answer(
            await self._plans.apply(
                call.path["id"],
                lambda: Sight(self._door, call.caller),
                caller=call.caller.name,
                actor=call.signed(call.caller.name),
            )
        )

    async def export(self, call: ApiCall) -> Answer[export.Export]:
        scope = scopes.parsed(call.query.get("scope", ""))
        given = call.query.get("kinds", "")
        kinds = [word.strip() for word in given.split(",") if word.strip()]
        sight = Sight(self._door, call.caller)
        sight.check_touches(scope)
        return Answer(
            content=await export.exported(
                self._catalogue, self._store, self._store.revision, sight, scope=scope, kinds=kinds
            )
        )

    # Showing.

    def _state(self, record: PlanResource) -> str:
        if record.status is not None:
            return "applied"
        return "expired" if record.spec.expires_at_ns <= self._clock.now_ns() else "open"

    def _row(self, record: PlanResource) -> PlanRow:
        spec = record.spec
        return PlanRow(
            id=record.name,
            state=self._state(record),
            scope=spec.scope,
            owner=spec.owner,
            created_at=spelled(record.created_at_ns),
            expires_at=spelled(spec.expires_at_ns),
            revision=spec.revision,
        )

    def _shown(self, known: KnownPlan) -> ShownPlan:
        record, status = known.record, known.record.status
        counted = Counter(step.operation for step in known.steps)
        return ShownPlan(
            kind="plan",
            id=record.name,
            state=self._state(record),
            scope=record.spec.scope,
            owner=record.spec.owner,
            prune=record.spec.prune,
            created_by=record.spec.created_by,
            created_at=spelled(record.created_at_ns),
            expires_at=spelled(record.spec.expires_at_ns),
            revision=record.spec.revision,
            applied_at=spelled_or_null(status.applied_at_ns if status is not None else None),
            applied_revision=status.revision if status is not None else None,
            summary={one.value: counted[one] for one in PlanOperation},
            steps=[_step(step) for step in known.steps],
        )


def _request(body: PlanBody) -> PlanRequest:
    if len(body.owner) > OWNER_LIMIT or body.owner != body.owner.strip():
        raise InvalidArgument(
            f"has at most {OWNER_LIMIT} characters, and no blanks around them", field="owner"
        )
    scope = scopes.parsed(body.scope)
    return PlanRequest(
        objects=[_wanted(one, f"objects[{number}]", scope) for number, one in enumerate(body.objects)],
        scope=scope,
        owner=body.owner,
        prune=body.prune,
        take_over=body.take_over,
        life_seconds=durations.parse(body.expires_in),
    )


def _wanted(given: GivenObject, field: str, scope: str) -> WantedObject:
    for name, value in (("kind", given.kind), ("metadata.name", given.metadata.name)):
        if not value:
            raise InvalidArgument("is required", field=f"{field}.{name}")
    said = given.metadata.scope
    where = scopes.parsed(said, field=f"{field}.metadata.scope") if said else scope
    return WantedObject(
        address=ObjectAddress(given.kind, where, given.metadata.name),
        spec=given.spec,
        labels=given.metadata.labels,
        uid=given.metadata.uid,
        field=field,
    )


def _step(step: PlannedStep) -> ShownStep:
    return ShownStep(
        operation=step.operation,
        kind=step.kind,
        scope=step.scope,
        name=step.name,
        changes=[ShownChange(field=one.field, old=one.old, new=one.new) for one in step.changes],
        warnings=step.warnings,
        disturbs=step.disturbs,
        pruned=step.pruned,
    )
