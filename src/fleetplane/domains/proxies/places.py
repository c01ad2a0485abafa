"""Organisations and workspaces: making, renaming and removing them."""

from __future__ import annotations

import msgspec

from fleetplane.domains.proxies.audit_notes import notes_of
from fleetplane.domains.proxies.configuration import NextVersion
from fleetplane.domains.proxies.kinds import (
    AGENT,
    API_TOKEN,
    AUDIT_NOTE,
    CERTIFICATE,
    CONFIG_PART,
    CONFIG_VERSION,
    MEMBERSHIP,
    ORGANIZATION,
    SETTINGS,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    ConfigVersionSpec,
    MembershipSpec,
    Organization,
    OrganizationSpec,
    Workspace,
    WorkspaceSpec,
    organization_scope,
    version_name,
    workspace_scope,
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
from fleetplane.domains.proxies.rules import name_problems, slug_problems
from fleetplane.domains.proxies.values import OrganizationRole
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store

SLUG = "slug"


def _first_version() -> ConfigVersionSpec:
    return NextVersion.after(None).finish(1, cause="workspace.create")


class Places:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    # Organisations.

    def organization(self, identity: str) -> Organization:
        found = self._store.get(ORGANIZATION, organization_scope(identity), identity)
        if found is None:
            raise NotFound("organization not found")
        return found

    async def create_organization(self, spec: OrganizationSpec, *, owner: str, actor: str) -> Organization:
        """Its maker owns it."""
        refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
        identity = new_id(self._clock)
        scope = organization_scope(identity)

        def change(draft: Draft) -> Organization:
            claim_unique(draft, ORGANIZATION, "", SLUG, spec.slug, identity)
            register(draft, ORGANIZATION, scope, identity)
            draft.put(MEMBERSHIP, scope, owner, spec=MembershipSpec(role=OrganizationRole.OWNER))
            return draft.put(ORGANIZATION, scope, identity, spec=spec)

        touches = [ORGANIZATION.key(scope, identity), MEMBERSHIP.key(scope, owner)]
        done = await self._store.transact(change, actor=actor, action="organization.create", touches=touches)
        return done.value

    async def update_organization(
        self, identity: str, given: dict[str, str], *, if_match: str | None, actor: str
    ) -> Organization:
        scope = organization_scope(identity)

        def change(draft: Draft) -> Organization:
            current = draft.get(ORGANIZATION, scope, identity)
            if current is None:
                raise NotFound("organization not found")
            check_match(if_match, current)
            spec = msgspec.structs.replace(current.spec, **given)
            refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
            move_unique(draft, ORGANIZATION, "", SLUG, current.spec.slug, spec.slug, identity)
            return draft.put(ORGANIZATION, scope, identity, spec=spec)

        touches = [ORGANIZATION.key(scope, identity)]
        done = await self._store.transact(change, actor=actor, action="organization.update", touches=touches)
        return done.value

    async def delete_organization(self, identity: str, *, if_match: str | None, actor: str) -> None:
        """Only an empty one; its members and tokens go with it."""
        scope = organization_scope(identity)
        async with self._workspaces.editing(scope):
            current = self.organization(identity)
            check_match(if_match, current)
            hold(
                "the organization has workspaces",
                holders("workspaces", "workspace", self._store.list(WORKSPACE, scope)),
            )
            hold(
                "the organization has API tokens",
                holders("api_tokens", "API token", self._store.list(API_TOKEN, scope)),
            )
            members = [member.name for member in self._store.list(MEMBERSHIP, scope)]

            def change(draft: Draft) -> None:
                draft.delete(ORGANIZATION, scope, identity)
                draft.release(ORGANIZATION, "", SLUG, current.spec.slug, identity)
                unregister(draft, ORGANIZATION, scope, identity)
                for member in members:
                    draft.delete(MEMBERSHIP, scope, member)
                for note in draft.list(AUDIT_NOTE, scope):
                    draft.delete(AUDIT_NOTE, scope, note.name)

            touches = [
                ORGANIZATION.key(scope, identity),
                *notes_of(identity),
                *(MEMBERSHIP.key(scope, member) for member in members),
            ]
            await self._store.transact(change, actor=actor, action="organization.delete", touches=touches)

    # Workspaces.

    def workspace(self, scope: str) -> Workspace:
        found = self._store.get(WORKSPACE, scope, scope.rpartition("/")[2])
        if found is None:
            raise NotFound("workspace not found")
        return found

    async def create_workspace(self, organization: str, spec: WorkspaceSpec, *, actor: str) -> Workspace:
        refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
        identity = new_id(self._clock)
        above, scope = organization_scope(organization), workspace_scope(organization, identity)

        def change(draft: Draft) -> Workspace:
            if draft.get(ORGANIZATION, above, organization) is None:
                raise NotFound("organization not found")
            claim_unique(draft, WORKSPACE, above, SLUG, spec.slug, identity)
            register(draft, WORKSPACE, scope, identity)
            draft.put(CONFIG_VERSION, scope, version_name(1), spec=_first_version())
            return draft.put(WORKSPACE, scope, identity, spec=spec)

        touches = [WORKSPACE.key(scope, identity), CONFIG_VERSION.key(scope, version_name(1))]
        async with self._workspaces.editing(above):
            done = await self._store.transact(change, actor=actor, action="workspace.create", touches=touches)
        return done.value

    async def update_workspace(
        self, scope: str, given: dict[str, str], *, if_match: str | None, actor: str
    ) -> Workspace:
        above, _, identity = scope.rpartition("/ws/")

        def change(draft: Draft) -> Workspace:
            current = draft.get(WORKSPACE, scope, identity)
            if current is None:
                raise NotFound("workspace not found")
            check_match(if_match, current)
            spec = msgspec.structs.replace(current.spec, **given)
            refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
            move_unique(draft, WORKSPACE, above, SLUG, current.spec.slug, spec.slug, identity)
            return draft.put(WORKSPACE, scope, identity, spec=spec)

        touches = [WORKSPACE.key(scope, identity)]
        done = await self._store.transact(change, actor=actor, action="workspace.update", touches=touches)
        return done.value

    async def delete_workspace(self, scope: str, *, if_match: str | None, actor: str) -> None:
        """Only an empty one; its settings and versions go with it."""
        above, _, identity = scope.rpartition("/ws/")
        async with self._workspaces.editing(scope):
            current = self.workspace(scope)
            check_match(if_match, current)
            hold(
                "the workspace is not empty",
                (
                    problem
                    for field, word, kind in (
                        ("agents", "agent", AGENT),
                        ("virtual_hosts", "virtual host", VIRTUAL_HOST),
                        ("upstreams", "upstream", UPSTREAM),
                        ("certificates", "certificate", CERTIFICATE),
                    )
                    for problem in holders(field, word, self._store.list(kind, scope))
                ),
            )
            history: tuple[AnyKind, ...] = (SETTINGS, CONFIG_VERSION, CONFIG_PART)
            going = [(kind, resource.name) for kind in history for resource in self._store.list(kind, scope)]

            def change(draft: Draft) -> None:
                draft.delete(WORKSPACE, scope, identity)
                draft.release(WORKSPACE, above, SLUG, current.spec.slug, identity)
                unregister(draft, WORKSPACE, scope, identity)
                for kind, name in going:
                    draft.delete(kind, scope, name)

            touches = [WORKSPACE.key(scope, identity), *(kind.key(scope, name) for kind, name in going)]
            await self._store.transact(change, actor=actor, action="workspace.delete", touches=touches)
