"""REST: DNS zones of a workspace, by which its wildcards are proved. Credentials go in and never come out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies.access import ADMINISTER, READ
from fleetplane.domains.proxies.kinds.records import DNS_ZONE, DnsZone, workspace_of
from fleetplane.domains.proxies.kinds.values import Value
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    actor,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.serving.dns_zones import DnsZoneRecords
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("DNS zones")


class CreateDnsZone(Value, frozen=True):
    zone: str
    provider: str
    credentials: dict[str, str]
    """What the provider wants to know, such as `auth_token`."""


class UpdateDnsZone(Value, frozen=True):
    credentials: dict[str, str]


class DnsZoneView(msgspec.Struct, frozen=True, kw_only=True):
    """Without its credentials."""

    id: str
    workspace_id: str
    zone: str
    provider: str
    created_at: str
    updated_at: str


def _view(found: DnsZone) -> DnsZoneView:
    return DnsZoneView(
        id=found.name,
        workspace_id=workspace_of(found.scope),
        zone=found.spec.zone,
        provider=found.spec.provider,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class DnsZoneRoutes:
    def __init__(self, store: Store, zones: DnsZoneRecords) -> None:
        self._store = store
        self._zones = zones

    def routes(self) -> Sequence[Route]:
        many, one = "/workspaces/{workspace_id}/dns-zones", "/dns-zones/{dns_zone_id}"
        return (
            _ROUTES.get(many, self.dns_zones, READ, query=PAGING),
            _ROUTES.post(many, self.create_dns_zone, ADMINISTER, body=CreateDnsZone, status=CREATED),
            _ROUTES.get(one, self.dns_zone, READ),
            _ROUTES.patch(one, self.update_dns_zone, ADMINISTER, body=UpdateDnsZone),
            _ROUTES.delete(one, self.delete_dns_zone, ADMINISTER, status=NO_CONTENT),
        )

    async def dns_zones(self, call: ProxyCall) -> Answer[Listing[DnsZoneView]]:
        """List DNS zones."""
        found = in_order(self._store.list(DNS_ZONE, call.scope))
        return Answer(content=listing(found, paging(call.query), _view))

    async def create_dns_zone(self, call: ProxyCall) -> Answer[DnsZoneView]:
        """Add a DNS zone, so that wildcards in it can be proved."""
        body: CreateDnsZone = call.body
        answer = call.answering(self._created)
        return answer(
            await self._zones.create(
                call.scope, body.zone, body.provider, body.credentials, actor=actor(call)
            )
        )

    def _created(self, made: DnsZone) -> Answer[DnsZoneView]:
        return created(_view(made), made, "dns-zones")

    async def dns_zone(self, call: ProxyCall) -> Answer[DnsZoneView]:
        """Get a DNS zone."""
        found = self._zones.get(call.scope, call.path["dns_zone_id"])
        return shown(_view(found), found)

    async def update_dns_zone(self, call: ProxyCall) -> Answer[DnsZoneView]:
        """Replace the credentials of a DNS zone."""
        body: UpdateDnsZone = call.body
        updated = await self._zones.replace_credentials(
            call.scope,
            call.path["dns_zone_id"],
            body.credentials,
            if_match=if_match(call),
            actor=actor(call),
        )
        return shown(_view(updated), updated)

    async def delete_dns_zone(self, call: ProxyCall) -> Answer[None]:
        """Delete a DNS zone with its credentials."""
        await self._zones.delete(
            call.scope, call.path["dns_zone_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()
