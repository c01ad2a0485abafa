"""Organisations and workspaces as objects that people write through the resource API.

An organisation is the tenant of its slug, so it lies there: whoever has a role at the tenant sees it, and its
owner makes it. Nobody becomes a member by that; roles are bound at the tenant.
"""

from __future__ import annotations

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.desired.common import organization_at, slug_of
from fleetplane.domains.proxies.kinds.records import (
    ORGANIZATION,
    WORKSPACE,
    Organization,
    OrganizationSpec,
    Workspace,
    WorkspaceSpec,
    organization_scope,
    workspace_scope,
)
from fleetplane.domains.proxies.resources.places import place
from fleetplane.domains.proxies.resources.workspaces import WorkspaceSpecView
from fleetplane.domains.proxies.tenancy import organizations
from fleetplane.domains.proxies.tenancy.organizations import SLUG
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.store import Draft

# Organisations.


class OrganizationSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    display_name: str = ""
    """Its slug, unless it is called something else."""


def organization_view(
    found: Organization, _reading: ViewReader
) -> ResourceView[OrganizationSpecView, NoStatus]:
    """What is shown of an organisation."""
    return ResourceView(spec=OrganizationSpecView(display_name=found.spec.name), status=None)


def find_organization(_domain: object, draft: Draft, scope: str, name: str) -> Organization | None:
    """By its slug, which is the name of its tenant."""
    if name != slug_of(scope):
        raise InvalidArgument(
            f"the organization of {scope} is called {slug_of(scope)!r}, not {name[:64]!r}",
            field="name",
            hint=f"write it at /tenants/{name[:64]}",
        )
    found = organization_at(draft, scope)
    return None if found is None else draft.get(ORGANIZATION, organization_scope(found), found)


def put_organization(call: WriteCall) -> Organization:
    """Create an organisation without members, or change what it is called."""
    given: OrganizationSpecView = call.spec
    shown = given.display_name or call.name
    if call.stored is not None:
        return organizations.change_organization(call.draft, call.stored.name, name=shown)
    _require_owner(call, "creating an organization")
    spec = OrganizationSpec(name=shown, slug=call.name)
    return organizations.make_organization(call.draft, call.new_id(), spec)


def delete_organization(call: WriteCall) -> None:
    """Delete an organisation without workspaces and API tokens."""
    assert call.stored is not None
    _require_owner(call, "deleting an organization")
    organizations.remove_organization(call.draft, call.stored.name)


def _require_owner(call: WriteCall, what: str) -> None:
    if not call.may(access.OWN):
        raise PermissionDenied(
            f"{what} needs an owner of {call.scope}",
            hint="have a role bound that includes it",
            details={"permission": access.OWN},
        )


ORGANIZATIONS = PublicResource(
    name="organization",
    plural="organizations",
    short=("org", "orgs"),
    summary="Whose workspaces they are: the tenant of the same name, in proxies",
    kind=ORGANIZATION,
    spec=OrganizationSpecView,
    status=NoStatus,
    view=organization_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda found, _reading: found.spec.slug,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DISPLAY-NAME", value=".spec.displayName"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
    search=(".metadata.name", ".spec.displayName"),
)
ORGANIZATION_WRITER = Writable(
    anywhere=True,
    permission=access.ADMINISTER,
    find=find_organization,
    put=put_organization,
    delete=delete_organization,
    rank=9,
    referred_to=True,
)


# Workspaces.


def find_workspace(_domain: object, draft: Draft, scope: str, name: str) -> Workspace | None:
    """By its slug."""
    organization = organization_at(draft, scope)
    if organization is None:
        return None
    found = draft.claimed_by(WORKSPACE, organization_scope(organization), SLUG, name)
    return None if found is None else draft.get(WORKSPACE, workspace_scope(organization, found), found)


def put_workspace(call: WriteCall) -> Workspace:
    """Create a workspace, or change what it is called."""
    given: WorkspaceSpecView = call.spec
    shown = given.display_name or call.name
    if call.stored is not None:
        return organizations.change_workspace(call.draft, call.stored.scope, name=shown)
    organization = organization_at(call.draft, call.scope)
    if organization is None:
        raise NotFound(
            f"there is no organization with the slug {slug_of(call.scope)!r}",
            field="scope",
            hint=f"create it first: PUT /apis/v1/organizations/{slug_of(call.scope)}",
        )
    spec = WorkspaceSpec(name=shown, slug=call.name)
    return organizations.make_workspace(call.draft, organization, call.new_id(), spec)


def delete_workspace(call: WriteCall) -> None:
    """Delete an empty workspace."""
    assert call.stored is not None
    organizations.remove_workspace(call.draft, call.stored.scope)


WORKSPACE_WRITER = Writable(
    anywhere=True,
    permission=access.ADMINISTER,
    find=find_workspace,
    put=put_workspace,
    delete=delete_workspace,
    rank=10,
    referred_to=True,
)
