"""What agents reported from their machines."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.agents.events import AGENT_EVENT, AgentEvent
from fleetplane.domains.proxies.kinds.records import AGENT
from fleetplane.domains.proxies.resources.places import names, place
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import Column, PublicResource, Reading, Shape, View
from fleetplane.kernel.values.times import spelled


class EventSpecView(Shape, frozen=True):
    type: str
    about: str
    """The object that it is about, as `resource/name`."""
    occurred_at: str
    details: Mapping[str, str]


def event_view(event: AgentEvent, reading: Reading) -> View[EventSpecView, NoStatus]:
    """What is shown of an event that an agent reported."""
    workspace, _, agent = event.scope.rpartition("/agent/")
    spec = event.spec
    return View(
        spec=EventSpecView(
            type=spec.event_type,
            about=f"proxy-agents/{names(AGENT, workspace, reading)(agent)}",
            occurred_at=spelled(spec.occurred_at_ns),
            details=spec.data,
        ),
        status=None,
    )


EVENTS = PublicResource(
    name="event",
    plural="events",
    short=("ev",),
    summary="Something that an agent reported from its machine",
    kind=AGENT_EVENT,
    spec=EventSpecView,
    status=NoStatus,
    view=event_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda event, _reading: event.spec.event_id or event.uid,
    columns=(
        Column(title="TYPE", value=".spec.type"),
        Column(title="ABOUT", value=".spec.about"),
        Column(title="WHEN", value=".spec.occurredAt", type="age"),
        Column(title="DETAILS", value=".spec.details"),
    ),
    search=(".spec.type", ".spec.about"),
)
