"""Workspaces: virtual hosts and the proxies that serve them."""

from __future__ import annotations

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.kinds.records import WORKSPACE, Workspace
from fleetplane.domains.proxies.resources.places import workspace_place
from fleetplane.domains.proxies.resources.raw_rights import raw_right
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    ActionCall,
    Begun,
    Column,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceView,
    ViewReader,
)


class WorkspaceSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    display_name: str = ""
    """Its name, unless it is called something else."""


def workspace_view(workspace: Workspace, _reading: ViewReader) -> ResourceView[WorkspaceSpecView, NoStatus]:
    """What is shown of a workspace."""
    return ResourceView(spec=WorkspaceSpecView(display_name=workspace.spec.name), status=None)


class VersionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    version: int


async def _restore(call: ActionCall) -> Begun | None:
    await call.domain.rewriting.restore(
        call.stored.scope, call.body.version, actor=call.actor, raw=raw_right(call)
    )
    return None


WORKSPACES = PublicResource(
    name="workspace",
    plural="workspaces",
    short=("ws",),
    summary="Virtual hosts and the proxies that serve them",
    kind=WORKSPACE,
    spec=WorkspaceSpecView,
    status=NoStatus,
    view=workspace_view,
    place=workspace_place,
    moves=True,
    permission=access.READ,
    named=lambda workspace, _reading: workspace.spec.slug,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DISPLAY-NAME", value=".spec.displayName"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
    actions=(
        ResourceAction(
            name="roll-back",
            summary="Make the workspace what a version said, under a new number",
            permission=access.OPERATE,
            run=_restore,
            anywhere=True,
            body=VersionBody,
        ),
        *freeze_actions("proxies", lambda workspace: workspace.scope),
    ),
    search=(".metadata.name", ".spec.displayName"),
)
