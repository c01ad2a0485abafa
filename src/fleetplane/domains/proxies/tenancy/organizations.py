"""Organisations and workspaces: making, renaming and removing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fleetplane.domains.proxies.agents.runs import PROXY_RUN
from fleetplane.domains.proxies.audit import notes_of
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    API_TOKEN,
    AUDIT_NOTE,
    CERTIFICATE,
    CONFIG_PART,
    CONFIG_VERSION,
    DNS_ZONE,
    MEMBERSHIP,
    ORGANIZATION,
    SETTINGS,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    ConfigVersionSpec,
    MembershipSpec,
    Organization,
    OrganizationSpec,
    Workspace,
    WorkspaceSpec,
    named_since_ns,
    organization_of,
    organization_scope,
    version_name,
    workspace_of,
    workspace_scope,
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
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rules.configuration import NextVersion
from fleetplane.domains.proxies.rules.validation import name_problems, slug_problems
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity.bindings import end_at, keys_at
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.values.ids import new_uuid

SLUG = "slug"


def _first_version() -> ConfigVersionSpec:
    return NextVersion.after(None).finish(1, cause="workspace.create")


class OrganizationPlaces:
    """What the scope tree means here: a tenant is the organisation with that slug."""

    def __init__(self, store: Store | Draft) -> None:
        self._store = store

    def stored(self, tenant: str, place: str, name: str) -> Iterator[str]:
        identity = self._store.claimed_by(ORGANIZATION, "", SLUG, tenant)
        if identity is None:
            return
        scope = organization_scope(identity)
        if not place:
            yield scope
        elif place == "workspaces":
            workspace = self._store.claimed_by(WORKSPACE, scope, SLUG, name)
            if workspace is not None:
                yield workspace_scope(identity, workspace)

    def path(self, scope: str) -> str | None:
        identity, workspace = organization_of(scope), workspace_of(scope)
        organization = self._store.get(ORGANIZATION, organization_scope(identity), identity)
        if not identity or organization is None:
            return None
        above = f"/tenants/{organization.spec.slug}"
        if scope == organization_scope(identity):
            return above
        exact = workspace_scope(identity, workspace)
        found = self._store.get(WORKSPACE, exact, workspace) if scope == exact else None
        return None if found is None else f"{above}/workspaces/{found.spec.slug}"


class TenancyPlaces:
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
        """Its maker owns it; with an empty `owner` it has no members yet."""
        refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
        identity = new_uuid(self._clock)
        scope = organization_scope(identity)

        def change(draft: Draft) -> Organization:
            if owner:
                draft.put(MEMBERSHIP, scope, owner, spec=MembershipSpec(role=OrganizationRole.OWNER))
            return make_organization(draft, identity, spec)

        touches = [ORGANIZATION.key(scope, identity)]
        if owner:
            touches.append(MEMBERSHIP.key(scope, owner))
        done = await self._store.transact(change, actor=actor, action="organization.create", touches=touches)
        return done.value

    async def update_organization(
        self, identity: str, given: dict[str, str], *, if_match: str | None, actor: str
    ) -> Organization:
        scope = organization_scope(identity)

        def change(draft: Draft, _given: Sequence[Key]) -> Organization:
            current = draft.get(ORGANIZATION, scope, identity)
            if current is not None:
                check_match(if_match, current)
            return change_organization(draft, identity, **given)

        done = await transact_found(
            self._store,
            lambda reader: _given_at(reader, reader.get(ORGANIZATION, scope, identity)),
            change,
            actor=actor,
            action="organization.update",
            touches=[ORGANIZATION.key(scope, identity)],
        )
        return done.value

    async def delete_organization(self, identity: str, *, if_match: str | None, actor: str) -> None:
        """Only an empty one; its members and tokens go with it."""
        scope = organization_scope(identity)

        def going(reader: Store | Draft) -> list[Key]:
            given = _given_at(reader, reader.get(ORGANIZATION, scope, identity))
            return [*given, *(member.key for member in reader.list(MEMBERSHIP, scope))]

        def change(draft: Draft, _going: Sequence[Key]) -> None:
            current = draft.get(ORGANIZATION, scope, identity)
            if current is not None:
                check_match(if_match, current)
            remove_organization(draft, identity)

        async with self._workspaces.editing(scope):
            await transact_found(
                self._store,
                going,
                change,
                actor=actor,
                action="organization.delete",
                touches=[ORGANIZATION.key(scope, identity), *notes_of(identity)],
            )

    # Workspaces.

    def workspace(self, scope: str) -> Workspace:
        found = self._store.get(WORKSPACE, scope, scope.rpartition("/")[2])
        if found is None:
            raise NotFound("workspace not found")
        return found

    async def create_workspace(self, organization: str, spec: WorkspaceSpec, *, actor: str) -> Workspace:
        refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
        identity = new_uuid(self._clock)
        above, scope = organization_scope(organization), workspace_scope(organization, identity)
        touches = [WORKSPACE.key(scope, identity), CONFIG_VERSION.key(scope, version_name(1))]
        async with self._workspaces.editing(above):
            done = await self._store.transact(
                lambda draft: make_workspace(draft, organization, identity, spec),
                actor=actor,
                action="workspace.create",
                touches=touches,
            )
        return done.value

    async def update_workspace(
        self, scope: str, given: dict[str, str], *, if_match: str | None, actor: str
    ) -> Workspace:
        identity = scope.rpartition("/")[2]

        def change(draft: Draft, _given: Sequence[Key]) -> Workspace:
            current = draft.get(WORKSPACE, scope, identity)
            if current is not None:
                check_match(if_match, current)
            return change_workspace(draft, scope, **given)

        done = await transact_found(
            self._store,
            lambda reader: _given_at(reader, reader.get(WORKSPACE, scope, identity)),
            change,
            actor=actor,
            action="workspace.update",
            touches=[WORKSPACE.key(scope, identity)],
        )
        return done.value

    async def delete_workspace(self, scope: str, *, if_match: str | None, actor: str) -> None:
        """Only an empty one; its settings and versions go with it."""
        identity = scope.rpartition("/")[2]

        def going(reader: Store | Draft) -> list[Key]:
            own = [one.key for kind in _GOES_WITH_WORKSPACE for one in reader.list(kind, scope)]
            return [*own, *_given_at(reader, reader.get(WORKSPACE, scope, identity))]

        def change(draft: Draft, _going: Sequence[Key]) -> None:
            current = draft.get(WORKSPACE, scope, identity)
            if current is not None:
                check_match(if_match, current)
            remove_workspace(draft, scope)

        async with self._workspaces.editing(scope):
            await transact_found(
                self._store,
                going,
                change,
                actor=actor,
                action="workspace.delete",
                touches=[WORKSPACE.key(scope, identity)],
            )


def _given_at(reader: Store | Draft, place: Organization | Workspace | None) -> list[Key]:
    """What was given at a place and ends when it goes, or is called otherwise."""
    path = OrganizationPlaces(reader).path(place.scope) if place is not None else None
    if place is None or path is None:
        return []
    return list(keys_at(reader, path, since_ns=named_since_ns(place)))


# The changes of organisations themselves, as functions of a draft.


def make_organization(draft: Draft, identity: str, spec: OrganizationSpec) -> Organization:
    """Create an organisation without members; its slug must be free."""
    refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
    scope = organization_scope(identity)
    claim_unique(draft, ORGANIZATION, "", SLUG, spec.slug, identity)
    register(draft, ORGANIZATION, scope, identity)
    return draft.put(ORGANIZATION, scope, identity, spec=spec)


def change_organization(draft: Draft, identity: str, **given: str) -> Organization:
    """Change fields of an organisation's spec."""
    scope = organization_scope(identity)
    current = draft.get(ORGANIZATION, scope, identity)
    if current is None:
        raise NotFound("organization not found")
    spec = msgspec.structs.replace(current.spec, **given)
    refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
    move_unique(draft, ORGANIZATION, "", SLUG, current.spec.slug, spec.slug, identity)
    if spec.slug != current.spec.slug:
        end_at(draft, f"/tenants/{current.spec.slug}", since_ns=named_since_ns(current))
        spec = msgspec.structs.replace(spec, named_at_ns=draft.now_ns)
    return draft.put(ORGANIZATION, scope, identity, spec=spec)


def remove_organization(draft: Draft, identity: str) -> None:
    """Delete an organisation without workspaces and API tokens; its members go with it."""
    scope = organization_scope(identity)
    current = draft.get(ORGANIZATION, scope, identity)
    if current is None:
        raise NotFound("organization not found")
    hold(
        "the organization has workspaces",
        holders("workspaces", "workspace", draft.list(WORKSPACE, scope)),
    )
    hold(
        "the organization has API tokens",
        holders("api_tokens", "API token", draft.list(API_TOKEN, scope)),
    )
    draft.delete(ORGANIZATION, scope, identity)
    draft.release(ORGANIZATION, "", SLUG, current.spec.slug, identity)
    end_at(draft, f"/tenants/{current.spec.slug}", since_ns=named_since_ns(current))
    unregister(draft, ORGANIZATION, scope, identity)
    going: tuple[AnyKind, ...] = (MEMBERSHIP, AUDIT_NOTE)
    for kind in going:
        for one in draft.list(kind, scope):
            draft.delete(kind, scope, one.name)


# The changes of workspaces themselves, as functions of a draft.

_GOES_WITH_WORKSPACE: tuple[AnyKind, ...] = (SETTINGS, CONFIG_VERSION, CONFIG_PART, PROXY_RUN)


def make_workspace(draft: Draft, organization: str, identity: str, spec: WorkspaceSpec) -> Workspace:
    """Create a workspace with an empty first version; its slug must be free in the organisation."""
    refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
    above, scope = organization_scope(organization), workspace_scope(organization, identity)
    if draft.get(ORGANIZATION, above, organization) is None:
        raise NotFound("organization not found")
    claim_unique(draft, WORKSPACE, above, SLUG, spec.slug, identity)
    register(draft, WORKSPACE, scope, identity)
    draft.put(CONFIG_VERSION, scope, version_name(1), spec=_first_version())
    return draft.put(WORKSPACE, scope, identity, spec=spec)


def change_workspace(draft: Draft, scope: str, **given: str) -> Workspace:
    """Change fields of a workspace's spec."""
    above, _, identity = scope.rpartition("/ws/")
    current = draft.get(WORKSPACE, scope, identity)
    if current is None:
        raise NotFound("workspace not found")
    spec = msgspec.structs.replace(current.spec, **given)
    refuse([*name_problems(spec.name), *slug_problems(spec.slug)])
    if spec.slug != current.spec.slug:
        _end_at_workspace(draft, above, current)
        spec = msgspec.structs.replace(spec, named_at_ns=draft.now_ns)
    move_unique(draft, WORKSPACE, above, SLUG, current.spec.slug, spec.slug, identity)
    return draft.put(WORKSPACE, scope, identity, spec=spec)


def _end_at_workspace(draft: Draft, above: str, workspace: Workspace) -> None:
    organization = draft.get(ORGANIZATION, above, organization_of(above))
    if organization is not None:
        path = f"/tenants/{organization.spec.slug}/workspaces/{workspace.spec.slug}"
        end_at(draft, path, since_ns=max(named_since_ns(workspace), named_since_ns(organization)))


def remove_workspace(draft: Draft, scope: str) -> None:
    """Delete an empty workspace, with its settings and versions."""
    above, _, identity = scope.rpartition("/ws/")
    current = draft.get(WORKSPACE, scope, identity)
    if current is None:
        raise NotFound("workspace not found")
    hold(
        "the workspace is not empty",
        (
            problem
            for field, word, kind in (
                ("agents", "agent", AGENT),
                ("virtual_hosts", "virtual host", VIRTUAL_HOST),
                ("upstreams", "upstream", UPSTREAM),
                ("certificates", "certificate", CERTIFICATE),
                ("access_lists", "access list", ACCESS_LIST),
                ("streams", "stream", STREAM),
                ("dns_zones", "DNS zone", DNS_ZONE),
            )
            for problem in holders(field, word, draft.list(kind, scope))
        ),
    )
    _end_at_workspace(draft, above, current)
    draft.delete(WORKSPACE, scope, identity)
    draft.release(WORKSPACE, above, SLUG, current.spec.slug, identity)
    unregister(draft, WORKSPACE, scope, identity)
    for kind in _GOES_WITH_WORKSPACE:
        for one in draft.list(kind, scope):
            draft.delete(kind, scope, one.name)
