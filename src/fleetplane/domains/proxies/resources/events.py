"""What agents reported from their machines."""

from __future__ import annotations

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.agents.events import AGENT_EVENT, AgentEvent
from fleetplane.domains.proxies.kinds.records import AGENT
from fleetplane.domains.proxies.resources.places import names, place
from fleetplane.fleet.feeds.state_events import EventSpecView, event_resource
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import ResourceView, ViewReader
from fleetplane.kernel.values.times import spelled


def event_view(event: AgentEvent, reading: ViewReader) -> ResourceView[EventSpecView, NoStatus]:
    """What is shown of an event that an agent reported."""
    workspace, _, agent = event.scope.rpartition("/agent/")
    spec = event.spec
    return ResourceView(
        spec=EventSpecView(
            type=spec.event_type,
            about=f"proxy-agents/{names(AGENT, workspace, reading)(agent)}",
            occurred_at=spelled(spec.occurred_at_ns),
            details=spec.data,
        ),
        status=None,
    )


EVENTS = event_resource(
    kind=AGENT_EVENT,
    view=event_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda event, _reading: event.spec.event_id or event.uid,
)
