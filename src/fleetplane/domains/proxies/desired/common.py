"""Where the things lie that people write through the resource API, and what all their changes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    CERTIFICATE,
    ORGANIZATION,
    WORKSPACE,
    organization_scope,
    workspace_scope,
)
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.named import AccessLists, Streams
from fleetplane.domains.proxies.serving.workspaces import WorkspaceBatch, Workspaces
from fleetplane.domains.proxies.tenancy.organizations import SLUG
from fleetplane.fleet.resources.declaration import ViewReader, WriteCall
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft


class ProxyParts(Protocol):
    """What of the running domain writes."""

    @property
    def hosts(self) -> Hosts: ...

    @property
    def streams(self) -> Streams: ...

    @property
    def workspaces(self) -> Workspaces: ...

    @property
    def access_lists(self) -> AccessLists: ...

    @property
    def certificates(self) -> Certificates: ...


def slug_of(scope: str) -> str:
    """The tenant that a scope of the API is; raises for one that is none."""
    parts = scope.split("/")
    if len(parts) != 3:
        raise InvalidArgument(f"{scope} is no tenant", field="scope", hint="write /tenants/NAME")
    return parts[2]


def organization_at(draft: Draft, scope: str) -> str | None:
    """The id of the organisation whose slug is the tenant."""
    return draft.claimed_by(ORGANIZATION, "", SLUG, slug_of(scope))


def place_of(draft: Draft, scope: str) -> str | None:
    """The stored scope of a workspace; None if there is none."""
    parts = scope.split("/")
    if len(parts) != 5 or parts[3] != "workspaces":
        raise InvalidArgument(
            f"{scope} is no workspace", field="scope", hint="write /tenants/NAME/workspaces/NAME"
        )
    organization = organization_at(draft, "/".join(parts[:3]))
    if organization is None:
        return None
    found = draft.claimed_by(WORKSPACE, organization_scope(organization), SLUG, parts[4])
    return None if found is None else workspace_scope(organization, found)


def required_place(call: WriteCall) -> str:
    """The stored scope of the workspace that a call names."""
    scope = place_of(call.draft, call.scope)
    if scope is None:
        raise NotFound(f"there is no workspace at {call.scope}", field="scope")
    return scope


def batch_of(call: WriteCall) -> WorkspaceBatch:
    """One for all that a request changes, finished once everything is written."""
    domain: ProxyParts = call.domain
    if "workspaces" not in call.batch:
        batch = WorkspaceBatch(domain.workspaces, call.draft, actor=call.actor)
        call.batch["workspaces"] = batch
        call.finish.append(batch.finish)
    made: WorkspaceBatch = call.batch["workspaces"]
    return made


def raw_right(call: WriteCall) -> RawRight:
    """Refuses a caller who may not touch raw text."""

    def decide(_draft: Draft, reason: str) -> None:
        if not call.may(access.RAW):
            raise PermissionDenied(
                f"this needs an administrator: {reason}",
                hint="have a role bound that includes it",
                details={"permission": access.RAW},
            )

    return decide


def certificates_called(reading: ViewReader, scope: str, domain: str) -> list[str]:
    """The ids of a workspace's certificates of a domain: each provider may have issued one."""
    wanted = domain.lower()
    return [one.name for one in reading.list(CERTIFICATE, scope) if one.spec.domain.lower() == wanted]


def reloads(before: AnyResource | None, after: AnyResource | None, reading: ViewReader) -> Sequence[str]:
    """How many NGINX reload."""
    changed = after or before
    assert changed is not None
    count = len(reading.list(AGENT, changed.scope))
    return (f"NGINX of {count} agents reloads",) if count else ()
