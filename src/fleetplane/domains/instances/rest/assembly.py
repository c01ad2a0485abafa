"""The half of the instances domain that people look at: `/v1/instances`, and the page that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.instances.access import GRANTS, TENANT_HEADER
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.live.feed import LiveFeed
from fleetplane.domains.instances.rest.overview import Overview
from fleetplane.domains.instances.rest.remote import RemoteCalls
from fleetplane.domains.instances.rest.routes import ViewRoutes
from fleetplane.rpc import Needs
from fleetplane.web import documents
from fleetplane.web.documents import Documents
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyText, RestFamily
from fleetplane.web.rest.gate import operator_gate
from fleetplane.web.rest.routes import RouteTable

PREFIX = "/v1/instances"
PAGE = "/ui/instances"


class InstanceRest:
    def __init__(
        self, kernel: Kernel, *, overview: Overview, errors: ErrorFeed, remote: RemoteCalls, version: str
    ) -> None:
        gate = operator_gate(kernel.door, GRANTS, tenant_headers=(TENANT_HEADER,))
        self.feed = LiveFeed(kernel.store, overview, errors, kernel.clock)
        views = ViewRoutes(overview=overview, feed=self.feed, errors=errors, gate=gate)
        self.table = RouteTable(PREFIX, (*views.routes(), *remote.routes(gate)))
        gate.require_complete(self.table.permissions)
        self.family = RestFamily(
            kernel,
            self.table,
            gate,
            domain="instances",
            text=FamilyText(
                title="Fleetplane instances",
                version=version,
                description="Groups of machines and their instances: to look at, and what operators do.",
                summary="REST: groups and instances",
            ),
        )

    def __repr__(self) -> str:
        return f"<RestSide {self.feed!r}>"

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @cached_property
    def routes(self) -> Sequence[Mount]:
        page = Documents(
            {
                PAGE: documents.file("instances.html", "text/html; charset=utf-8"),
                f"{PAGE}/instances.css": documents.file("instances.css", "text/css; charset=utf-8"),
                f"{PAGE}/page.mjs": documents.file("instances_page.mjs", "text/javascript; charset=utf-8"),
                f"{PAGE}/model.mjs": documents.file("instances_model.mjs", "text/javascript; charset=utf-8"),
                f"{PAGE}/live.mjs": documents.file("live.mjs", "text/javascript; charset=utf-8"),
            }
        )
        return (
            *self.family.mounts,
            Mount(
                path=PAGE,
                app=page,
                summary="groups and instances, live",
                is_page=True,
                needs=Needs.NOTHING,  # the same files everywhere; what they show is asked for by themselves
            ),
        )

    def drain(self) -> None:
        self.feed.close()
