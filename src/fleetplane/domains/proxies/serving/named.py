"""Objects of a workspace that have a unique name: access lists, streams and upstreams.

`NamedObjects` creates, changes and deletes them, alone or in a batch. A kind adds how a spec is accepted and
sealed, and what keeps an object from being deleted.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Generic

import msgspec
from msgspec import UNSET

from fleetplane.domains.proxies.kinds.passwords import list_sealed, list_with_known_passwords
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    AccessListSpec,
    StreamSpec,
    UpstreamSpec,
)
from fleetplane.domains.proxies.kinds.unique import (
    check_match,
    claim_unique,
    hold,
    holders,
    move_unique,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.rules.access import list_problems
from fleetplane.domains.proxies.rules.configuration import lists_of, upstreams_of
from fleetplane.domains.proxies.rules.streams import STREAMS_PER_WORKSPACE, accept_stream, stream_upstreams
from fleetplane.domains.proxies.rules.validation import UPSTREAMS_PER_WORKSPACE, accept_upstream
from fleetplane.domains.proxies.serving.basis import ServedReader, decided_again
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspaceBatch, WorkspacePlan, Workspaces
from fleetplane.domains.proxies.typed_options import UPSTREAM_GROUPS
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind, Kind, Nothing, Resource, SpecT
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

NAME = "name"
LISTS_PER_WORKSPACE = 200


class NamedObjects(Generic[SpecT]):
    kind: Kind[SpecT, Nothing]
    word: ClassVar[str]
    """In messages, and in the causes of versions."""
    limit: ClassVar[int]
    """Objects of one workspace."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Fields that a change may take away by null."""

    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    def _accept(self, spec: SpecT, scope: str, identity: str, at: ServedReader | None) -> None:
        """Refuse a spec that no agent could serve."""
        raise NotImplementedError

    async def _sealed(self, spec: SpecT) -> SpecT:
        """The spec as it is stored."""
        return spec

    def _completed(self, spec: SpecT, _before: SpecT) -> SpecT:
        """A changed spec with secrets that the caller left as they are."""
        return spec

    def _require_unused(self, found: Resource[SpecT, Nothing], at: ServedReader) -> None:
        """Refuse to delete what something else refers to."""

    def get(self, scope: str, identity: str) -> Resource[SpecT, Nothing]:
        found = self._store.get(self.kind, scope, identity)
        if found is None:
            raise NotFound(f"{self.word} not found")
        return found

    @decided_again
    async def create(self, scope: str, spec: SpecT, *, actor: str) -> Resource[SpecT, Nothing]:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            identity = new_uuid(self._clock)
            self._accept(spec, scope, identity, None)
            plan = self._workspaces.plan(scope, cause=self._cause("create"), subject=identity, actor=actor)
            self._put(plan, scope, identity, await self._sealed(spec), before=None, at=self._store)
            made: Resource[SpecT, Nothing] = await self._workspaces.commit(scope, plan)
            return made

    @decided_again
    async def update(
        self, scope: str, identity: str, given: dict[str, Any], *, if_match: str | None, actor: str
    ) -> Resource[SpecT, Nothing]:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            spec = self._completed(changed(before.spec, given, self.optional), before.spec)
            self._accept(spec, scope, identity, None)
            plan = self._workspaces.plan(scope, cause=self._cause("update"), subject=identity, actor=actor)
            self._put(plan, scope, identity, await self._sealed(spec), before=before, at=self._store)
            written: Resource[SpecT, Nothing] = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            found = self.get(scope, identity)
            check_match(if_match, found)
            plan = self._workspaces.plan(scope, cause=self._cause("delete"), subject=identity, actor=actor)
            self._delete(plan, found, at=self._store)
            await self._workspaces.commit(scope, plan)

    def put_in(
        self, batch: WorkspaceBatch, scope: str, identity: str, spec: SpecT
    ) -> Resource[SpecT, Nothing]:
        """Create or replace an object in a batch's draft; passwords are hashed already."""
        self._workspaces.require(scope, at=batch.draft)
        self._accept(spec, scope, identity, batch.draft)
        before = batch.draft.get(self.kind, scope, identity)
        cause = self._cause("create" if before is None else "update")
        plan = batch.plan(scope, cause=cause, subject=identity)
        self._put(plan, scope, identity, spec, before=before, at=batch.draft)
        written: Resource[SpecT, Nothing] = batch.write(scope, plan)[identity]
        return written

    def delete_in(self, batch: WorkspaceBatch, found: Resource[SpecT, Nothing]) -> None:
        """Delete an object in a batch's draft."""
        plan = batch.plan(found.scope, cause=self._cause("delete"), subject=found.name)
        self._delete(plan, found, at=batch.draft)
        batch.write(found.scope, plan)

    def _cause(self, verb: str) -> str:
        return f"{self.word.replace(' ', '_')}.{verb}"

    def _put(
        self,
        plan: WorkspacePlan,
        scope: str,
        identity: str,
        spec: SpecT,
        *,
        before: Resource[SpecT, Nothing] | None,
        at: ServedReader,
    ) -> None:
        kind, name = self.kind, getattr(spec, NAME)
        if before is None:
            require_room(at, scope, kind, self.limit)
        plan.puts.append(PutObject(kind=kind, name=identity, spec=spec, before=before))

        def claim(draft: Draft) -> None:
            if before is not None:
                move_unique(draft, kind, scope, NAME, getattr(before.spec, NAME), name, identity)
                return
            claim_unique(draft, kind, scope, NAME, name, identity)
            register(draft, kind, scope, identity)

        plan.also.append(claim)

    def _delete(self, plan: WorkspacePlan, found: Resource[SpecT, Nothing], *, at: ServedReader) -> None:
        self._require_unused(found, at)
        kind, scope, identity = self.kind, found.scope, found.name
        plan.deletes.append(found)
        plan.also.append(lambda draft: draft.release(kind, scope, NAME, getattr(found.spec, NAME), identity))
        plan.also.append(lambda draft: unregister(draft, kind, scope, identity))


class AccessLists(NamedObjects[AccessListSpec]):
    kind = ACCESS_LIST
    word = "access list"
    limit = LISTS_PER_WORKSPACE

    def _accept(self, spec: AccessListSpec, _scope: str, _identity: str, _at: ServedReader | None) -> None:
        refuse(list_problems(spec))

    async def _sealed(self, spec: AccessListSpec) -> AccessListSpec:
        return await asyncio.to_thread(list_sealed, spec)

    def _completed(self, spec: AccessListSpec, before: AccessListSpec) -> AccessListSpec:
        return list_with_known_passwords(spec, before)

    def _require_unused(self, found: Resource[AccessListSpec, Nothing], at: ServedReader) -> None:
        using = [host for host in at.list(VIRTUAL_HOST, found.scope) if found.name in lists_of(host.spec)]
        hold("the access list is in use", holders("access", "virtual host", using))


class Streams(NamedObjects[StreamSpec]):
    kind = STREAM
    word = "stream"
    limit = STREAMS_PER_WORKSPACE
    optional = frozenset(
        {
            "upstream_id",
            "routes",
            "send_proxy_protocol",
            "rules",
            "limits",
            "timeouts",
            "responses",
            "log",
        }
    )

    def _accept(self, spec: StreamSpec, scope: str, identity: str, at: ServedReader | None) -> None:
        accept_stream(spec, self._workspaces.surroundings(scope, without=identity, at=at))


class Upstreams(NamedObjects[UpstreamSpec]):
    kind = UPSTREAM
    word = "upstream"
    limit = UPSTREAMS_PER_WORKSPACE
    optional = UPSTREAM_GROUPS

    def _accept(self, spec: UpstreamSpec, scope: str, identity: str, at: ServedReader | None) -> None:
        accept_upstream(spec, self._workspaces.surroundings(scope, at=at), identity=identity)

    def _require_unused(self, found: Resource[UpstreamSpec, Nothing], at: ServedReader) -> None:
        identity, scope = found.name, found.scope
        using = [
            host
            for host in at.list(VIRTUAL_HOST, scope)
            if any(identity in upstreams_of(location) for location in host.spec.locations)
        ]
        streaming = [one for one in at.list(STREAM, scope) if identity in stream_upstreams(one.spec)]
        hold(
            "the upstream is referenced",
            [*holders("locations", "virtual host", using), *holders("upstream_id", "stream", streaming)],
        )


def require_room(at: ServedReader, scope: str, kind: AnyKind, limit: int) -> None:
    """Refuse one more object than a workspace may have."""
    if at.count(kind, scope) >= limit:
        refuse([Problem(field="", message=f"The workspace has {limit} already", code=Code.TOO_MANY)])


def changed(before: SpecT, given: dict[str, Any], optional: frozenset[str]) -> SpecT:
    """A spec with the given fields; optional fields that are null are taken away."""
    fields = {name: UNSET if value is None and name in optional else value for name, value in given.items()}
    spec: SpecT = msgspec.structs.replace(before, **fields)  # type: ignore[type-var]
    return spec
