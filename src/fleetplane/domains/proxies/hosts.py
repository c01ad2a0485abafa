"""Virtual hosts, upstreams and a workspace's settings: what is served, and from where."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetplane.domains.proxies import directives, rules
from fleetplane.domains.proxies.kinds import (
    SETTINGS,
    SETTINGS_NAME,
    UPSTREAM,
    VIRTUAL_HOST,
    SettingsSpec,
    Upstream,
    UpstreamSpec,
    VirtualHost,
    VirtualHostSpec,
    WorkspaceSettings,
)
from fleetplane.domains.proxies.names import (
    check_match,
    claim_unique,
    hold,
    holders,
    move_unique,
    new_id,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.workspaces import Put, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.web.problems import Code, Problem

NAME = "name"


class Hosts:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    # Virtual hosts.

    def get(self, scope: str, identity: str) -> VirtualHost:
        found = self._store.get(VIRTUAL_HOST, scope, identity)
        if found is None:
            raise NotFound("virtual host not found")
        return found

    async def create(self, scope: str, spec: VirtualHostSpec, *, actor: str) -> VirtualHost:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            self._room_for(scope, VIRTUAL_HOST, rules.HOSTS_PER_WORKSPACE)
            spec = normal(spec)
            rules.accept_host(spec, self._workspaces.surroundings(scope))
            identity = new_id(self._clock)
            plan = self._workspaces.plan(scope, cause="virtual_host.create", subject=identity, actor=actor)
            plan.puts.append(Put(kind=VIRTUAL_HOST, name=identity, spec=spec))
            plan.also.append(lambda draft: register(draft, VIRTUAL_HOST, scope, identity))
            made: VirtualHost = await self._workspaces.commit(scope, plan)
            return made

    async def update(
        self, scope: str, identity: str, given: dict[str, Any], *, if_match: str | None, actor: str
    ) -> VirtualHost:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            spec = normal(msgspec.structs.replace(before.spec, **given))
            rules.accept_host(spec, self._workspaces.surroundings(scope, without=identity))
            plan = self._workspaces.plan(scope, cause="virtual_host.update", subject=identity, actor=actor)
            plan.puts.append(Put(kind=VIRTUAL_HOST, name=identity, spec=spec, before=before))
            written: VirtualHost = await self._workspaces.commit(scope, plan)
            return written

    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            host = self.get(scope, identity)
            check_match(if_match, host)
            plan = self._workspaces.plan(scope, cause="virtual_host.delete", subject=identity, actor=actor)
            plan.deletes.append(host)
            plan.also.append(lambda draft: unregister(draft, VIRTUAL_HOST, scope, identity))
            await self._workspaces.commit(scope, plan)

    # Upstreams.

    def upstream(self, scope: str, identity: str) -> Upstream:
        found = self._store.get(UPSTREAM, scope, identity)
        if found is None:
            raise NotFound("upstream not found")
        return found

    async def create_upstream(self, scope: str, spec: UpstreamSpec, *, actor: str) -> Upstream:
        rules.accept_upstream(spec)
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            self._room_for(scope, UPSTREAM, rules.UPSTREAMS_PER_WORKSPACE)
            identity = new_id(self._clock)
            plan = self._workspaces.plan(scope, cause="upstream.create", subject=identity, actor=actor)
            plan.puts.append(Put(kind=UPSTREAM, name=identity, spec=spec))
            plan.also.append(lambda draft: claim_unique(draft, UPSTREAM, scope, NAME, spec.name, identity))
            plan.also.append(lambda draft: register(draft, UPSTREAM, scope, identity))
            made: Upstream = await self._workspaces.commit(scope, plan)
            return made

    async def update_upstream(
        self, scope: str, identity: str, given: dict[str, Any], *, if_match: str | None, actor: str
    ) -> Upstream:
        async with self._workspaces.editing(scope):
            before = self.upstream(scope, identity)
            check_match(if_match, before)
            spec = msgspec.structs.replace(before.spec, **given)
            rules.accept_upstream(spec)
            plan = self._workspaces.plan(scope, cause="upstream.update", subject=identity, actor=actor)
            plan.puts.append(Put(kind=UPSTREAM, name=identity, spec=spec, before=before))
            plan.also.append(
                lambda draft: move_unique(draft, UPSTREAM, scope, NAME, before.spec.name, spec.name, identity)
            )
            written: Upstream = await self._workspaces.commit(scope, plan)
            return written

    async def delete_upstream(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            upstream = self.upstream(scope, identity)
            check_match(if_match, upstream)
            hold(
                "the upstream is referenced",
                holders("locations", "virtual host", self._users_of(scope, identity)),
            )
            plan = self._workspaces.plan(scope, cause="upstream.delete", subject=identity, actor=actor)
            plan.deletes.append(upstream)
            plan.also.append(lambda draft: draft.release(UPSTREAM, scope, NAME, upstream.spec.name, identity))
            plan.also.append(lambda draft: unregister(draft, UPSTREAM, scope, identity))
            await self._workspaces.commit(scope, plan)

    def _users_of(self, scope: str, upstream: str) -> list[VirtualHost]:
        return [
            host
            for host in self._store.list(VIRTUAL_HOST, scope)
            if any(location.upstream_id == upstream for location in host.spec.locations)
        ]

    # Settings.

    def settings(self, scope: str) -> SettingsSpec:
        found = self._store.get(SETTINGS, scope, SETTINGS_NAME)
        return found.spec if found is not None else SettingsSpec()

    async def put_settings(self, scope: str, spec: SettingsSpec, *, actor: str) -> WorkspaceSettings:
        refuse(settings_problems(spec))
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            before = self._store.get(SETTINGS, scope, SETTINGS_NAME)
            plan = self._workspaces.plan(scope, cause="settings.update", subject=SETTINGS_NAME, actor=actor)
            plan.puts.append(Put(kind=SETTINGS, name=SETTINGS_NAME, spec=spec, before=before))
            written: WorkspaceSettings = await self._workspaces.commit(scope, plan)
            return written

    def _room_for(self, scope: str, kind: AnyKind, limit: int) -> None:
        if len(self._store.list(kind, scope)) >= limit:
            refuse([Problem(field="", message=f"The workspace has {limit} already", code=Code.TOO_MANY)])


def normal(spec: VirtualHostSpec) -> VirtualHostSpec:
    """Names separated by one blank each, whatever they came with."""
    return msgspec.structs.replace(spec, server_name=" ".join(spec.server_name.split()))


def settings_problems(spec: SettingsSpec) -> list[Problem]:
    return [
        *directives.problems(spec.nginx_directives, field="nginx_directives"),
        *directives.variable_problems(spec.env_vars, field="env_vars"),
    ]
