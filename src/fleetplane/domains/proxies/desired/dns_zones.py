"""DNS zones in the resource API: read there, written through the own API of proxies, with credentials."""

from __future__ import annotations

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.kinds.records import DNS_ZONE, DnsZone
from fleetplane.domains.proxies.resources.places import place
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    Secret,
    ViewReader,
)


class DnsZoneSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    provider: str
    credentials: Secret = Secret(set=True)
    """Set through the proxies' own API, never here."""


def zone_view(found: DnsZone, _reading: ViewReader) -> ResourceView[DnsZoneSpecView, NoStatus]:
    """What is shown of a zone: not its credentials."""
    return ResourceView(spec=DnsZoneSpecView(provider=found.spec.provider), status=None)


DNS_ZONES = PublicResource(
    name="dns-zone",
    plural="dns-zones",
    summary="A DNS zone by which a workspace proves its wildcards",
    kind=DNS_ZONE,
    spec=DnsZoneSpecView,
    status=NoStatus,
    view=zone_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda found, _reading: found.spec.zone,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="PROVIDER", value=".spec.provider"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
)
