"""REST: a tenant's groups and instances, to look at. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetplane.domains.instances import rules, views
from fleetplane.domains.instances.access import VIEW, Caller, Gatekeeper, seeing
from fleetplane.domains.instances.error_feed import ErrorFeed
from fleetplane.domains.instances.live_feed import LiveFeed
from fleetplane.domains.instances.overview import Overview
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.cursors import PAGING, number, page
from fleetplane.web.routes import Answer, Call, Query, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM

InstancesCall = Call[Caller]

ERRORS, ERRORS_LIMIT = 50, 500
ABOUT_LIMIT = 256
_GROUPS, _INSTANCES, _WATCHING = "Groups", "Instances", "Watching"


class ViewRoutes:
    def __init__(self, *, overview: Overview, feed: LiveFeed, errors: ErrorFeed, gate: Gatekeeper) -> None:
        self._overview = overview
        self._feed = feed
        self._errors = errors
        self._gate = gate

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/groups", handler=self.groups, tag=_GROUPS, permission=VIEW,
                summary="Groups: what they should be and what they are", answer=views.GroupList,
            ),
            Route(
                method="GET", path="/groups/{name}", handler=self.group, tag=_GROUPS, permission=VIEW,
                summary="One group", answer=views.ShownGroup,
            ),
            Route(
                method="GET", path="/instances", handler=self.instances, tag=_INSTANCES, permission=VIEW,
                summary="Instances, oldest first", answer=views.InstancePage,
                query=(
                    Query(name="group", summary="Of this group"),
                    Query(name="state", summary="In this state", choices=tuple(rules.State)),
                    *PAGING,
                ),
            ),
            Route(
                method="GET", path="/instances/{instance_id}", handler=self.instance, tag=_INSTANCES,
                permission=VIEW, summary="One instance, with what its agent said last",
                answer=views.InstanceDetail,
            ),
            *self._watching(),
        )  # fmt: skip

    def _watching(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/explain", handler=self.explain, tag=_WATCHING, permission=VIEW,
                summary="Why something is not happening", answer=views.Explained,
                query=(Query(name="about", summary="A group, or an instance's id"),),
            ),
            Route(
                method="GET", path="/errors", handler=self.errors, tag=_WATCHING, permission=VIEW,
                summary="What went wrong lately, newest first", answer=views.ErrorList,
                query=(
                    Query(
                        name="limit", summary="At most so many", kind="integer", default=ERRORS, low=1,
                        high=ERRORS_LIMIT,
                    ),
                ),
            ),
            Route(
                method="GET", path="/events", handler=self.events, tag=_WATCHING, permission=VIEW,
                summary="Server-sent events; `Last-Event-ID` goes on where a reader was cut off",
                streams=True, answer=dict[str, Any],
            ),
        )  # fmt: skip

    async def groups(self, call: InstancesCall) -> Answer[views.GroupList]:
        return Answer(content=views.GroupList(items=self._overview.groups(_tenant(call))))

    async def group(self, call: InstancesCall) -> Answer[views.ShownGroup]:
        return Answer(content=self._overview.group(_tenant(call), call.path["name"]))

    async def instances(self, call: InstancesCall) -> Answer[Any]:
        state = call.query.get("state")
        if state is not None and state not in tuple(rules.State):
            raise InvalidArgument(f"is not one of {', '.join(rules.State)}", field="state")
        found = self._overview.instances(_tenant(call), group=call.query.get("group"), state=state)
        return Answer(content=page(call, found, self._overview.instance))

    async def instance(self, call: InstancesCall) -> Answer[views.InstanceDetail]:
        return Answer(content=self._overview.detail(_tenant(call), call.path["instance_id"]))

    async def explain(self, call: InstancesCall) -> Answer[views.Explained]:
        about = call.query.get("about", "")
        if not 0 < len(about) <= ABOUT_LIMIT:
            raise InvalidArgument("say which group or instance", field="about")
        return Answer(content=self._overview.explain(_tenant(call), about))

    async def errors(self, call: InstancesCall) -> Answer[views.ErrorList]:
        limit = number(call, "limit", default=ERRORS, low=1, high=ERRORS_LIMIT)
        found = self._errors.recent(_tenant(call), limit)
        return Answer(content=views.ErrorList(items=[views.error(trouble) for trouble in found]))

    async def events(self, call: InstancesCall) -> Stream:
        def check() -> None:
            """A token may be revoked, and a session ends, while its holder reads on."""
            self._gate.authenticate(call.headers.get("authorization"))

        mark = call.headers.get("last-event-id") or ""
        return Stream(
            chunks=self._feed.follow(_tenant(call), mark=mark, check=check), content_type=EVENT_STREAM
        )


def _tenant(call: InstancesCall) -> str:
    return seeing(call.caller, call.headers)
