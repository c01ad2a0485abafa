"""Access lists of a workspace: rules, bans and users that several hosts refer to."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from fleetplane.domains.proxies.kinds.passwords import list_sealed, list_with_known_passwords
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    VIRTUAL_HOST,
    AccessList,
    AccessListSpec,
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
from fleetplane.domains.proxies.rules.configuration import lists_of
from fleetplane.domains.proxies.serving.basis import ServedReader, decided_again
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspaceBatch, WorkspacePlan, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

NAME = "name"
LISTS_PER_WORKSPACE = 200


class AccessLists:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    def get(self, scope: str, identity: str) -> AccessList:
        found = self._store.get(ACCESS_LIST, scope, identity)
        if found is None:
            raise NotFound("access list not found")
        return found

    @decided_again
    async def create(self, scope: str, spec: AccessListSpec, *, actor: str) -> AccessList:
        refuse(list_problems(spec))
        spec = await asyncio.to_thread(list_sealed, spec)
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            identity = new_uuid(self._clock)
            plan = self._workspaces.plan(scope, cause="access_list.create", subject=identity, actor=actor)
            _create(plan, scope, identity, spec, at=self._store)
            made: AccessList = await self._workspaces.commit(scope, plan)
            return made

    @decided_again
    async def update(
        self, scope: str, identity: str, given: dict[str, Any], *, if_match: str | None, actor: str
    ) -> AccessList:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            spec = list_with_known_passwords(msgspec.structs.replace(before.spec, **given), before.spec)
            refuse(list_problems(spec))
            spec = await asyncio.to_thread(list_sealed, spec)
            plan = self._workspaces.plan(scope, cause="access_list.update", subject=identity, actor=actor)
            _update(plan, scope, spec, before=before)
            written: AccessList = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            plan = self._workspaces.plan(scope, cause="access_list.delete", subject=identity, actor=actor)
            _delete(plan, before, at=self._store)
            await self._workspaces.commit(scope, plan)

    def put_in(self, batch: WorkspaceBatch, scope: str, identity: str, spec: AccessListSpec) -> AccessList:
        """Create or replace a list in a batch's draft; its passwords are hashed already."""
        draft = batch.draft
        self._workspaces.require(scope, at=draft)
        refuse(list_problems(spec))
        before = draft.get(ACCESS_LIST, scope, identity)
        cause = "access_list.create" if before is None else "access_list.update"
        plan = batch.plan(scope, cause=cause, subject=identity)
        if before is None:
            _create(plan, scope, identity, spec, at=draft)
        else:
            _update(plan, scope, spec, before=before)
        written: AccessList = batch.write(scope, plan)[identity]
        return written

    def delete_in(self, batch: WorkspaceBatch, found: AccessList) -> None:
        """Delete a list in a batch's draft."""
        plan = batch.plan(found.scope, cause="access_list.delete", subject=found.name)
        _delete(plan, found, at=batch.draft)
        batch.write(found.scope, plan)


# What a change puts into a plan, whoever writes it.


def _create(
    plan: WorkspacePlan, scope: str, identity: str, spec: AccessListSpec, *, at: ServedReader
) -> None:
    if at.count(ACCESS_LIST, scope) >= LISTS_PER_WORKSPACE:
        message = f"The workspace has {LISTS_PER_WORKSPACE} already"
        refuse([Problem(field="", message=message, code=Code.TOO_MANY)])
    plan.puts.append(PutObject(kind=ACCESS_LIST, name=identity, spec=spec))
    plan.also.append(lambda draft: claim_unique(draft, ACCESS_LIST, scope, NAME, spec.name, identity))
    plan.also.append(lambda draft: register(draft, ACCESS_LIST, scope, identity))


def _update(plan: WorkspacePlan, scope: str, spec: AccessListSpec, *, before: AccessList) -> None:
    identity, name = before.name, before.spec.name
    plan.puts.append(PutObject(kind=ACCESS_LIST, name=identity, spec=spec, before=before))
    plan.also.append(lambda draft: move_unique(draft, ACCESS_LIST, scope, NAME, name, spec.name, identity))


def _delete(plan: WorkspacePlan, found: AccessList, *, at: ServedReader) -> None:
    scope, identity = found.scope, found.name
    using = [host for host in at.list(VIRTUAL_HOST, scope) if identity in lists_of(host.spec)]
    hold("the access list is in use", holders("access", "virtual host", using))
    plan.deletes.append(found)
    plan.also.append(lambda draft: draft.release(ACCESS_LIST, scope, NAME, found.spec.name, identity))
    plan.also.append(lambda draft: unregister(draft, ACCESS_LIST, scope, identity))
