"""Where the things of proxies lie, and the names of what they refer to.

An organisation is the tenant of its slug, and a workspace a place in it. What refers to another thing by its
id is shown with that thing's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    CERTIFICATE,
    ORGANIZATION,
    UPSTREAM,
    WORKSPACE,
    AgentSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
    Workspace,
    organization_of,
    organization_scope,
    workspace_of,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import Location, NamedAgents
from fleetplane.domains.proxies.typed_options import (
    Access,
    Canary,
    ClientCertificates,
    StreamRoute,
    UpstreamTls,
)
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import ViewReader
from fleetplane.fleet.resources.mirrors import Mirror
from fleetplane.kernel.resources import AnyKind, AnyResource

MIRROR = Mirror(
    "Proxy",
    renamed={
        (VirtualHostSpec, "ssl_certificate_id"): "certificate",
        (ClientCertificates, "authority_id"): "authority",
        (UpstreamTls, "authority_id"): "authority",
        (UpstreamTls, "client_certificate_id"): "client_certificate",
        (Access, "list_ids"): "access_lists",
        (Location, "upstream_id"): "upstream",
        (Canary, "upstream_id"): "upstream",
        (NamedAgents, "agent_ids"): "agents",
        (StreamSpec, "upstream_id"): "upstream",
        (StreamRoute, "upstream_id"): "upstream",
    },
    without={
        VirtualHostSpec: ("name",),
        UpstreamSpec: ("name",),
        AgentSpec: ("name",),
        StreamSpec: ("name",),
    },
)


def place(stored: AnyResource, reading: ViewReader) -> str:
    """The tenant of the organisation, or the workspace in it; empty if neither is there any more."""
    organization, workspace = organization_of(stored.scope), workspace_of(stored.scope)
    owner = reading.get(ORGANIZATION, organization_scope(organization), organization)
    if owner is None:
        return ""
    tenant = scopes.tenant_path(owner.spec.slug)
    if not workspace:
        return tenant
    found = reading.get(WORKSPACE, workspace_scope(organization, workspace), workspace)
    return "" if found is None else scopes.below(tenant, "workspaces", found.spec.slug)


def workspace_place(stored: Workspace, reading: ViewReader) -> str:
    """A workspace itself lies at its tenant."""
    organization = organization_of(stored.scope)
    owner = reading.get(ORGANIZATION, organization_scope(organization), organization)
    return "" if owner is None else scopes.tenant_path(owner.spec.slug)


def names(
    kind: AnyKind, scope: str, reading: ViewReader, name: Callable[[Any], str] = lambda found: found.spec.name
) -> Callable[[str], str]:
    """From an id to a name; what is gone keeps its id."""

    def named(identity: str) -> str:
        found = reading.get(kind, scope, identity)
        return identity if found is None else str(name(found))

    return named


def _certificate_names(scope: str, reading: ViewReader) -> Callable[[str], str]:
    """From an id to a domain, unless several providers have issued for it."""

    def named(identity: str) -> str:
        found = reading.get(CERTIFICATE, scope, identity)
        if found is None:
            return identity
        same = [one for one in reading.list(CERTIFICATE, scope) if one.spec.domain == found.spec.domain]
        return found.spec.domain if len(same) == 1 else identity

    return named


def references(scope: str, reading: ViewReader) -> Mapping[str, Callable[[str], str]]:
    """Names of what the things of a workspace refer to."""
    certificate = _certificate_names(scope, reading)
    return {
        "certificate": certificate,
        "client_certificate": certificate,
        "authority": certificate,
        "access_lists": names(ACCESS_LIST, scope, reading),
        "upstream": names(UPSTREAM, scope, reading),
        "agents": names(AGENT, scope, reading),
    }
