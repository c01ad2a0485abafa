"""Everything of this domain that people write through the resource API."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.proxies.desired.content import (
    ACCESS_LIST_WRITER,
    ACCESS_LISTS,
    CERTIFICATE_WRITER,
    SETTINGS_WRITER,
    WORKSPACE_SETTINGS,
)
from fleetplane.domains.proxies.desired.dns_zones import DNS_ZONES
from fleetplane.domains.proxies.desired.hosts import HOST_WRITER, UPSTREAM_WRITER
from fleetplane.domains.proxies.desired.places import ORGANIZATION_WRITER, ORGANIZATIONS, WORKSPACE_WRITER
from fleetplane.domains.proxies.desired.streams import STREAM_WRITER, STREAMS
from fleetplane.fleet.resources.declaration import Writable

WRITERS: Mapping[str, Writable] = {
    "organization": ORGANIZATION_WRITER,
    "workspace": WORKSPACE_WRITER,
    "access-list": ACCESS_LIST_WRITER,
    "certificate": CERTIFICATE_WRITER,
    "upstream": UPSTREAM_WRITER,
    "virtual-host": HOST_WRITER,
    "proxy-stream": STREAM_WRITER,
    "workspace-settings": SETTINGS_WRITER,
}
DESIRED = (ORGANIZATIONS, ACCESS_LISTS, STREAMS, WORKSPACE_SETTINGS, DNS_ZONES)
"""Resources that are declared beside their writers; DNS zones have none."""
