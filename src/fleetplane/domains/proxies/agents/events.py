"""Events that agents report from their machines: kept for a while, and sent to event subscribers.

An event is written into one of a few places of its agent, which are used in turn, so that what is
kept is bounded without anything having to be deleted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies.kinds.records import AGENT, Agent, ProxiesSpec, agent_scope
from fleetplane.domains.proxies.wire import moment_ns
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store, transact_found

EVENTS_KEPT = 64
"""Per agent, the newest."""
DATA_LIMIT = 32
"""Facts of one event; with their names and values at most 40 KB."""
NAME_LIMIT = 64
VALUE_LIMIT = 1024
OTHER = "agent.event"
"""The event type for subscribers where an agent's event type is unknown here."""
KNOWN = frozenset(
    {
        "nginx.started",
        "nginx.stopped",
        "nginx.reloaded",
        "nginx.crashed",
        "config.drift",
        "config.repaired",
        "upstream.server_down",
        "upstream.server_up",
        "certificate.loaded",
        "agent.started",
        "agent.shutdown",
    }
)
_TYPE = re.compile(r"[a-z0-9_]{1,32}(?:\.[a-z0-9_]{1,32}){1,3}")


class AgentEventSpec(ProxiesSpec, frozen=True):
    """Named by its place, in the agent's scope. Written by the agents' service only."""

    serial: int
    """Counts the agent's events."""
    event_id: str
    event_type: str
    occurred_at_ns: int
    """By the agent's clock; when it came, if the agent does not say."""
    data: dict[str, str] = msgspec.field(default_factory=dict)


AgentEvent = Resource[AgentEventSpec, Nothing]
AGENT_EVENT: Kind[AgentEventSpec, Nothing] = Kind("proxy-agent-event", AgentEventSpec, Nothing)


def read(event: pb.Event, *, now_ns: int) -> AgentEventSpec:
    """An event as it is kept; its serial is given when it is written."""
    if not _TYPE.fullmatch(event.event_type):
        raise InvalidArgument("must be dotted words such as nginx.crashed", field="event.event_type")
    names = sorted(name for name in event.data if 0 < len(name) <= NAME_LIMIT)[:DATA_LIMIT]
    return AgentEventSpec(
        serial=0,
        event_id=event.event_id[:NAME_LIMIT],
        event_type=event.event_type,
        occurred_at_ns=moment_ns(event.timestamp) or now_ns,
        data={name: event.data[name][:VALUE_LIMIT] for name in names},
    )


class AgentEvents:
    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, agent: Agent) -> Sequence[AgentEvent]:
        """Newest first."""
        found = self._store.list(AGENT_EVENT, agent_scope(agent.scope, agent.name))
        return sorted(found, key=lambda one: -one.spec.serial)

    async def note(self, agent: Agent, spec: AgentEventSpec, *, actor: str) -> None:
        """Keep an event, unless it is there already: agents repeat what was not acknowledged."""
        scope = agent_scope(agent.scope, agent.name)
        if spec.event_id and any(one.spec.event_id == spec.event_id for one in self.of(agent)):
            return

        def place(reader: Store | Draft) -> list[Key]:
            return [AGENT_EVENT.key(scope, f"{_serial(reader, scope) % EVENTS_KEPT:03d}")]

        def change(draft: Draft, places: Sequence[Key]) -> None:
            if draft.get(AGENT, agent.scope, agent.name) is not None:
                kept = msgspec.structs.replace(spec, serial=_serial(draft, scope))
                draft.put(AGENT_EVENT, scope, places[0].name, spec=kept)

        await transact_found(self._store, place, change, actor=actor, action="agent.event")

    async def clear(self, agent: Agent, *, actor: str) -> None:
        """Remove what is left of an agent that was deleted."""
        scope = agent_scope(agent.scope, agent.name)
        left = [one.name for one in self._store.list(AGENT_EVENT, scope)]

        def change(draft: Draft) -> None:
            for name in left:
                if draft.get(AGENT_EVENT, scope, name) is not None:
                    draft.delete(AGENT_EVENT, scope, name)

        if left:
            touches = [AGENT_EVENT.key(scope, name) for name in left]
            await self._store.transact(change, actor=actor, action="agent.clear", touches=touches)


def _serial(reader: Store | Draft, scope: str) -> int:
    """Of the next event of an agent."""
    return max((one.spec.serial for one in reader.list(AGENT_EVENT, scope)), default=0) + 1
