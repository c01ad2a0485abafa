"""The half of the instances domain that people look at: `/v1/instances`, and the page that reads it.

Litestar is loaded here, when this half is built, and by nobody who does not run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.instances.access import Caller, Gatekeeper
from fleetplane.domains.instances.error_feed import ErrorFeed
from fleetplane.domains.instances.live_feed import LiveFeed
from fleetplane.domains.instances.overview import Overview
from fleetplane.domains.instances.rest import ViewRoutes
from fleetplane.web import documents, openapi
from fleetplane.web.app import application
from fleetplane.web.documents import Document, Documents
from fleetplane.web.gateway import REQUESTS_PER_MINUTE, Gateway
from fleetplane.web.idempotency import Answers
from fleetplane.web.metrics import GatewayCollector
from fleetplane.web.ops import Mount
from fleetplane.web.routes import RouteTable

PREFIX = "/v1/instances"
DOCUMENT = f"{PREFIX}/openapi.json"
PAGE = "/ui/instances"
TITLE = "Fleetplane instances"
ABOUT = "Groups of machines and their instances, to look at."


class RestSide:
    def __init__(self, kernel: Kernel, *, overview: Overview, errors: ErrorFeed, version: str) -> None:
        self._clock = kernel.clock
        self._version = version
        self._gate = Gatekeeper(kernel.operators)
        self._answers = Answers(kernel.store, kernel.master, kernel.clock, namespace="instances")
        """Which keeps none: everything here can be asked as often as one likes."""
        self.feed = LiveFeed(kernel.store, overview, errors, kernel.clock)
        views = ViewRoutes(overview=overview, feed=self.feed, errors=errors, gate=self._gate)
        self.table = RouteTable(PREFIX, views.routes())

    def __repr__(self) -> str:
        return f"<RestSide {self.feed!r}>"

    @cached_property
    def _gateway(self) -> Gateway[Caller]:
        return application(
            self.table, gate=self._gate, answers=self._answers, clock=self._clock,
            requests_per_minute=REQUESTS_PER_MINUTE,
        )  # fmt: skip

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self._gateway, domain="instances"),)

    @cached_property
    def routes(self) -> Sequence[Mount]:
        pages = Documents(
            {
                DOCUMENT: Document(content_type="application/json", content=lambda: self._document),
                PAGE: documents.file("instances.html", "text/html; charset=utf-8"),
                f"{PAGE}/instances.css": documents.file("instances.css", "text/css; charset=utf-8"),
                f"{PAGE}/page.mjs": documents.file("instances_page.mjs", "text/javascript; charset=utf-8"),
                f"{PAGE}/model.mjs": documents.file("instances_model.mjs", "text/javascript; charset=utf-8"),
            }
        )
        return (
            Mount(path=PREFIX, app=self._gateway, summary="REST: groups and instances, to look at"),
            Mount(path=DOCUMENT, app=pages),
            Mount(path=PAGE, app=pages, summary="groups and instances, live", is_page=True),
        )

    @cached_property
    def _document(self) -> bytes:
        made = openapi.document(self.table, title=TITLE, version=self._version, description=ABOUT)
        return msgspec.json.encode(made)

    def drain(self) -> None:
        self.feed.close()
