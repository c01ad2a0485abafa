"""Streams of a workspace: ports on which TCP or UDP is passed on as it comes."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from fleetplane.domains.proxies.kinds.records import STREAM, Stream, StreamSpec
from fleetplane.domains.proxies.kinds.unique import (
    check_match,
    claim_unique,
    move_unique,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.rules.streams import STREAMS_PER_WORKSPACE, accept_stream
from fleetplane.domains.proxies.serving.basis import ServedReader, decided_again
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspaceBatch, WorkspacePlan, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

NAME = "name"
OPTIONAL = frozenset(
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
"""What null takes away."""


class Streams:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    def get(self, scope: str, identity: str) -> Stream:
        found = self._store.get(STREAM, scope, identity)
        if found is None:
            raise NotFound("stream not found")
        return found

    @decided_again
    async def create(self, scope: str, spec: StreamSpec, *, actor: str) -> Stream:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            accept_stream(spec, self._workspaces.surroundings(scope))
            identity = new_uuid(self._clock)
            plan = self._workspaces.plan(scope, cause="stream.create", subject=identity, actor=actor)
            _create(plan, scope, identity, spec, at=self._store)
            made: Stream = await self._workspaces.commit(scope, plan)
            return made

    @decided_again
    async def update(
        self, scope: str, identity: str, given: dict[str, Any], *, if_match: str | None, actor: str
    ) -> Stream:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            given = {
                name: UNSET if value is None and name in OPTIONAL else value for name, value in given.items()
            }
            spec = msgspec.structs.replace(before.spec, **given)
            accept_stream(spec, self._workspaces.surroundings(scope, without=identity))
            plan = self._workspaces.plan(scope, cause="stream.update", subject=identity, actor=actor)
            _update(plan, scope, spec, before=before)
            written: Stream = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            plan = self._workspaces.plan(scope, cause="stream.delete", subject=identity, actor=actor)
            _delete(plan, scope, before)
            await self._workspaces.commit(scope, plan)

    def put_in(self, batch: WorkspaceBatch, scope: str, identity: str, spec: StreamSpec) -> Stream:
        """Create or replace a stream in a batch's draft."""
        self._workspaces.require(scope, at=batch.draft)
        accept_stream(spec, self._workspaces.surroundings(scope, without=identity, at=batch.draft))
        before = batch.draft.get(STREAM, scope, identity)
        cause = "stream.create" if before is None else "stream.update"
        plan = batch.plan(scope, cause=cause, subject=identity)
        if before is None:
            _create(plan, scope, identity, spec, at=batch.draft)
        else:
            _update(plan, scope, spec, before=before)
        written: Stream = batch.write(scope, plan)[identity]
        return written

    def delete_in(self, batch: WorkspaceBatch, stream: Stream) -> None:
        """Delete a stream in a batch's draft."""
        plan = batch.plan(stream.scope, cause="stream.delete", subject=stream.name)
        _delete(plan, stream.scope, stream)
        batch.write(stream.scope, plan)


def _create(plan: WorkspacePlan, scope: str, identity: str, spec: StreamSpec, *, at: ServedReader) -> None:
    if at.count(STREAM, scope) >= STREAMS_PER_WORKSPACE:
        message = f"The workspace has {STREAMS_PER_WORKSPACE} already"
        refuse([Problem(field="", message=message, code=Code.TOO_MANY)])
    plan.puts.append(PutObject(kind=STREAM, name=identity, spec=spec))
    plan.also.append(lambda draft: claim_unique(draft, STREAM, scope, NAME, spec.name, identity))
    plan.also.append(lambda draft: register(draft, STREAM, scope, identity))


def _update(plan: WorkspacePlan, scope: str, spec: StreamSpec, *, before: Stream) -> None:
    identity, name = before.name, before.spec.name
    plan.puts.append(PutObject(kind=STREAM, name=identity, spec=spec, before=before))
    plan.also.append(lambda draft: move_unique(draft, STREAM, scope, NAME, name, spec.name, identity))


def _delete(plan: WorkspacePlan, scope: str, stream: Stream) -> None:
    plan.deletes.append(stream)
    plan.also.append(lambda draft: draft.release(STREAM, scope, NAME, stream.spec.name, stream.name))
    plan.also.append(lambda draft: unregister(draft, STREAM, scope, stream.name))
