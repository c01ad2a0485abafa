"""Virtual hosts and settings of a workspace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetplane.domains.proxies.kinds.passwords import has_passwords, sealed, with_known_passwords
from fleetplane.domains.proxies.kinds.records import (
    SETTINGS,
    SETTINGS_NAME,
    VIRTUAL_HOST,
    SettingsSpec,
    VirtualHost,
    VirtualHostSpec,
    WorkspaceSettings,
)
from fleetplane.domains.proxies.kinds.unique import (
    check_match,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.rules import directives, raw_text
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.serving.basis import ServedReader, decided_again
from fleetplane.domains.proxies.serving.named import Upstreams, changed, require_room
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspaceBatch, WorkspacePlan, Workspaces
from fleetplane.domains.proxies.typed_options import HOST_GROUPS
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Problem

PARSED_AT_ONCE = 50
"""Raw directives that are judged on the event loop: a quarter of a millisecond each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedHost:
    """A virtual host as it should be."""

    identity: str
    spec: VirtualHostSpec
    raw: RawRight | None
    """Decides about raw text; without it the caller has decided."""


class Hosts:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces
        self.upstreams = Upstreams(store, clock, workspaces)

    # Virtual hosts.

    def get(self, scope: str, identity: str) -> VirtualHost:
        found = self._store.get(VIRTUAL_HOST, scope, identity)
        if found is None:
            raise NotFound("virtual host not found")
        return found

    @decided_again
    async def create(
        self, scope: str, spec: VirtualHostSpec, *, actor: str, raw: RawRight | None = None
    ) -> VirtualHost:
        """`raw` decides inside the transaction about raw text; without it the caller has decided."""
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            spec = normal(spec)
            await _accept(spec, self._workspaces.surroundings(scope))
            spec = await sealing(spec)
            identity = new_uuid(self._clock)
            plan = self._workspaces.plan(scope, cause="virtual_host.create", subject=identity, actor=actor)
            self._create(plan, scope, identity, spec, raw=raw, at=self._store)
            made: VirtualHost = await self._workspaces.commit(scope, plan)
            return made

    @decided_again
    async def update(
        self,
        scope: str,
        identity: str,
        given: dict[str, Any],
        *,
        if_match: str | None,
        actor: str,
        raw: RawRight | None = None,
    ) -> VirtualHost:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            spec = normal(changed(before.spec, given, HOST_GROUPS))
            spec = with_known_passwords(spec, before.spec)
            await _accept(spec, self._workspaces.surroundings(scope, without=identity))
            spec = await sealing(spec)
            plan = self._workspaces.plan(scope, cause="virtual_host.update", subject=identity, actor=actor)
            _update(plan, scope, spec, before=before, raw=raw)
            written: VirtualHost = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def purge(self, scope: str, identity: str, *, actor: str) -> VirtualHost:
        """Forget what is kept of a host's answers: agents look for a generation that nothing was kept of."""
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            if not before.spec.cache:
                raise FailedPrecondition("the virtual host has no cache", hint="set its `cache` first")
            cache = msgspec.structs.replace(before.spec.cache, generation=before.spec.cache.generation + 1)
            spec = msgspec.structs.replace(before.spec, cache=cache)
            plan = self._workspaces.plan(scope, cause="virtual_host.purge", subject=identity, actor=actor)
            plan.puts.append(PutObject(kind=VIRTUAL_HOST, name=identity, spec=spec, before=before))
            written: VirtualHost = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def delete(
        self, scope: str, identity: str, *, if_match: str | None, actor: str, raw: RawRight | None = None
    ) -> None:
        async with self._workspaces.editing(scope):
            host = self.get(scope, identity)
            check_match(if_match, host)
            plan = self._workspaces.plan(scope, cause="virtual_host.delete", subject=identity, actor=actor)
            _delete(plan, scope, host, raw=raw)
            await self._workspaces.commit(scope, plan)

    def put_in(self, batch: WorkspaceBatch, scope: str, wanted: WantedHost) -> VirtualHost:
        """Create or replace a host in a batch's draft."""
        draft, identity, spec = batch.draft, wanted.identity, normal(wanted.spec)
        self._workspaces.require(scope, at=draft)
        rules.accept_host(spec, self._workspaces.surroundings(scope, without=identity, at=draft))
        before = draft.get(VIRTUAL_HOST, scope, identity)
        cause = "virtual_host.create" if before is None else "virtual_host.update"
        plan = batch.plan(scope, cause=cause, subject=identity)
        if before is None:
            self._create(plan, scope, identity, spec, raw=wanted.raw, at=draft)
        else:
            _update(plan, scope, spec, before=before, raw=wanted.raw)
        written: VirtualHost = batch.write(scope, plan)[identity]
        return written

    def delete_in(self, batch: WorkspaceBatch, host: VirtualHost, *, raw: RawRight | None) -> None:
        """Delete a host in a batch's draft."""
        plan = batch.plan(host.scope, cause="virtual_host.delete", subject=host.name)
        _delete(plan, host.scope, host, raw=raw)
        batch.write(host.scope, plan)

    def _create(
        self,
        plan: WorkspacePlan,
        scope: str,
        identity: str,
        spec: VirtualHostSpec,
        *,
        raw: RawRight | None,
        at: ServedReader,
    ) -> None:
        require_room(at, scope, VIRTUAL_HOST, rules.HOSTS_PER_WORKSPACE)
        plan.puts.append(PutObject(kind=VIRTUAL_HOST, name=identity, spec=spec))
        _decide_raw(plan, scope, identity, spec, raw)
        plan.also.append(lambda draft: register(draft, VIRTUAL_HOST, scope, identity))

    # Settings.

    def settings(self, scope: str) -> SettingsSpec:
        found = self._store.get(SETTINGS, scope, SETTINGS_NAME)
        return found.spec if found is not None else SettingsSpec()

    @decided_again
    async def put_settings(
        self, scope: str, spec: SettingsSpec, *, actor: str, raw: RawRight | None = None
    ) -> WorkspaceSettings:
        refuse(settings_problems(spec))
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            before = self._store.get(SETTINGS, scope, SETTINGS_NAME)
            plan = self._workspaces.plan(scope, cause="settings.update", subject=SETTINGS_NAME, actor=actor)
            _put_settings(plan, scope, spec, before=before, raw=raw)
            written: WorkspaceSettings = await self._workspaces.commit(scope, plan)
            return written

    def put_settings_in(
        self, batch: WorkspaceBatch, scope: str, spec: SettingsSpec, *, raw: RawRight
    ) -> WorkspaceSettings:
        """Replace a workspace's settings in a batch's draft."""
        self._workspaces.require(scope, at=batch.draft)
        refuse(settings_problems(spec))
        before = batch.draft.get(SETTINGS, scope, SETTINGS_NAME)
        plan = batch.plan(scope, cause="settings.update", subject=SETTINGS_NAME)
        _put_settings(plan, scope, spec, before=before, raw=raw)
        written: WorkspaceSettings = batch.write(scope, plan)[SETTINGS_NAME]
        return written

    def delete_settings_in(self, batch: WorkspaceBatch, found: WorkspaceSettings, *, raw: RawRight) -> None:
        """Take a workspace's settings away in a batch's draft."""
        raw_text.decide_settings(batch.draft, raw, found.scope, SettingsSpec())
        plan = batch.plan(found.scope, cause="settings.update", subject=SETTINGS_NAME)
        plan.deletes.append(found)
        batch.write(found.scope, plan)


# What a change puts into a plan, whoever writes it.


def _decide_raw(
    plan: WorkspacePlan, scope: str, identity: str, spec: VirtualHostSpec, raw: RawRight | None
) -> None:
    if raw is not None:
        plan.also.append(lambda draft: raw_text.decide_host(draft, raw, scope, identity, spec))
        plan.also.append(lambda draft: raw_text.decide_names(draft, raw, scope, {identity: spec}))


def _update(
    plan: WorkspacePlan, scope: str, spec: VirtualHostSpec, *, before: VirtualHost, raw: RawRight | None
) -> None:
    _decide_raw(plan, scope, before.name, spec, raw)
    plan.puts.append(PutObject(kind=VIRTUAL_HOST, name=before.name, spec=spec, before=before))


def _delete(plan: WorkspacePlan, scope: str, host: VirtualHost, *, raw: RawRight | None) -> None:
    plan.deletes.append(host)
    if raw is not None:
        plan.also.append(lambda draft: raw_text.decide_host(draft, raw, scope, host.name, None))
    plan.also.append(lambda draft: unregister(draft, VIRTUAL_HOST, scope, host.name))


def _put_settings(
    plan: WorkspacePlan,
    scope: str,
    spec: SettingsSpec,
    *,
    before: WorkspaceSettings | None,
    raw: RawRight | None,
) -> None:
    if raw is not None:
        plan.also.append(lambda draft: raw_text.decide_settings(draft, raw, scope, spec))
    plan.puts.append(PutObject(kind=SETTINGS, name=SETTINGS_NAME, spec=spec, before=before))


async def sealing(spec: VirtualHostSpec) -> VirtualHostSpec:
    """The host with hashes of its users' passwords, made beside the event loop."""
    return await asyncio.to_thread(sealed, spec) if has_passwords(spec) else spec


async def _accept(spec: VirtualHostSpec, around: WorkspaceSurroundings) -> None:
    """Beside the event loop where there is much to parse."""
    own = (location.custom_directives or {} for location in spec.locations)
    if len(spec.custom_directives) + sum(map(len, own)) > PARSED_AT_ONCE:
        await asyncio.to_thread(rules.accept_host, spec, around)
    else:
        rules.accept_host(spec, around)


def normal(spec: VirtualHostSpec) -> VirtualHostSpec:
    """Names separated by one blank each, whatever they came with."""
    return msgspec.structs.replace(spec, server_name=" ".join(spec.server_name.split()))


def settings_problems(spec: SettingsSpec) -> list[Problem]:
    return [
        *directives.problems(spec.nginx_directives, field="nginx_directives", contexts=judging.SETTINGS),
        *directives.variable_problems(spec.env_vars, field="env_vars"),
    ]
