"""Events of boards, clusters and pins, in both dialects of the WebSocket. Pure.

Two dialects say the same. The documented one has dotted types:

    {"type": "node.status.changed", "timestamp": "...", "data": {...}}

and the one that known clients speak has an envelope and topics to subscribe to:

    {"type": "node_status", "payload": {...}, "timestamp": "..."}

What changed follows from what was known before, which is remembered here: a board whose last
report alone is new is no news.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BOARD, CLUSTER, Board, BoardState, Cluster, number_of
from fleetplane.domains.boards.pins import kinds as gpio_kinds
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, Device, DeviceType, device_number
from fleetplane.domains.boards.rest.views import cluster_state
from fleetplane.domains.boards.wire.message_json import json_number
from fleetplane.kernel.events import Event, EventType
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import spelled

Json = dict[str, Any]
DELETED = "deleted"
"""The state of a board that is forgotten, for those who listen; no board has it."""


class Topic(StrEnum):
    GPIO = "gpio"
    NODES = "nodes"
    CLUSTERS = "clusters"
    SYSTEM = "system"


@dataclass(frozen=True, kw_only=True)
class BoardEvent:
    """One event in both dialects, empty where a dialect has none; encoded once for all listeners."""

    topic: Topic
    at_ns: int
    type: str = ""
    """Dotted."""
    data: Json | None = None
    beside: Json | None = None
    """What the documented examples put beside `data`."""
    kind: str = ""
    """In the envelope."""
    payload: Json | None = None

    @cached_property
    def dotted(self) -> str:
        body = {"type": self.type, "timestamp": spelled(self.at_ns), **(self.beside or {}), "data": self.data}
        return msgspec.json.encode(body).decode()

    @cached_property
    def enveloped(self) -> str:
        body = {"type": self.kind, "payload": self.payload, "timestamp": spelled(self.at_ns)}
        return msgspec.json.encode(body).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoardSeen:
    state: str
    cluster: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterSeen:
    name: str
    state: str
    ready: int = 0
    total: int = 0


class SentStates:
    """The last state of each resource that listeners were sent."""

    def __init__(self) -> None:
        self._boards: dict[int, _BoardSeen] = {}
        self._clusters: dict[int, _ClusterSeen] = {}
        self._values: dict[int, float | None] = {}

    def prime(self, resources: Iterable[AnyResource]) -> None:
        """Take what is there for known."""
        for resource in resources:
            for _ in self.events_of(Event(type=EventType.ADDED, resource=resource, revision=0)):
                pass

    def events_of(self, event: Event) -> Iterator[BoardEvent]:
        """The events that one change of a resource means."""
        resource, gone = event.resource, event.type is EventType.DELETED
        match resource.kind:
            case BOARD.name:
                yield from self._board(resource, gone=gone)
            case CLUSTER.name:
                yield from self._cluster(resource, gone=gone)
            case GPIO_DEVICE.name:
                yield from self._device(resource, gone=gone)

    # Boards.

    def _board(self, board: Board, *, gone: bool) -> Iterator[BoardEvent]:
        number, at_ns = number_of(board), board.updated_at_ns
        before = self._boards.get(number)
        if gone:
            self._boards.pop(number, None)
            yield self._status(board, DELETED, type="node.removed", data={"node_id": number})
            cluster = None
        else:
            state, cluster = status_of(board).state.value, board.spec.cluster_id
            self._boards[number] = _BoardSeen(state=state, cluster=cluster)
            if before is None:
                data = {"node_id": number, "ip_address": board.spec.ip_address, "name": board.spec.name}
                yield self._status(board, state, type="node.discovered", data={**data, "status": state})
            elif before.state != state:
                data = {"node_id": number, "status": state, "previous_status": before.state}
                yield self._status(board, state, type="node.status.changed", data=data)
        left = before.cluster if before is not None else None
        if left != cluster:
            yield from _moved(board, left, cluster)
        for touched in sorted({one for one in (left, cluster) if one is not None}):
            yield from self._count(touched, at_ns=at_ns)

    def _status(self, board: Board, state: str, *, type: str, data: Json) -> BoardEvent:  # noqa: A002  # as the wire calls it
        at_ns = board.updated_at_ns
        payload = {
            "node_id": number_of(board),
            "name": board.spec.name,
            "status": state,
            "ip_address": board.spec.ip_address,
            "timestamp": spelled(at_ns),
        }
        return BoardEvent(
            topic=Topic.NODES, at_ns=at_ns, type=type, data=data, kind="node_status", payload=payload
        )

    # Clusters.

    def _cluster(self, cluster: Cluster, *, gone: bool) -> Iterator[BoardEvent]:
        number = number_of(cluster)
        if gone:
            self._clusters.pop(number, None)
            return
        before = self._clusters.get(number)
        seen = _ClusterSeen(
            name=cluster.spec.name,
            state=cluster_state(cluster).value,
            ready=before.ready if before is not None else 0,
            total=before.total if before is not None else 0,
        )
        self._clusters[number] = seen
        if seen != before:
            yield _cluster_event(number, seen, at_ns=cluster.updated_at_ns)

    def _count(self, number: int, *, at_ns: int) -> Iterator[BoardEvent]:
        """Anew, because one of its boards changed."""
        before = self._clusters.get(number)
        if before is None:  # its own event is on its way
            before = _ClusterSeen(name="", state="")
        members = [board for board in self._boards.values() if board.cluster == number]
        ready = sum(board.state == BoardState.READY for board in members)
        seen = _ClusterSeen(name=before.name, state=before.state, ready=ready, total=len(members))
        if seen != before:
            self._clusters[number] = seen
            if seen.name:
                yield _cluster_event(number, seen, at_ns=at_ns)

    # Pins.

    def _device(self, device: Device, *, gone: bool) -> Iterator[BoardEvent]:
        number, spec = device_number(device), device.spec
        if gone:
            self._values.pop(number, None)
            return
        status = gpio_kinds.status_of(device)
        before = self._values.get(number)
        self._values[number] = status.value
        if status.value is None or status.value == before:
            return
        at_ns = status.value_at_ns or device.updated_at_ns
        level = json_number(status.value)
        data: Json = {"device_id": number, "node_id": spec.board, "pin": spec.pin, "value": level}
        if spec.device_type is DeviceType.PWM:
            data["pwm_duty"] = level
        else:
            data["state"] = "high" if status.value else "low"
        yield BoardEvent(
            topic=Topic.GPIO,
            at_ns=at_ns,
            type="gpio.state.changed",
            data={"resource": spec.name, **data},
            beside={"resource": spec.name},
            kind="gpio_reading",
            payload={
                "device_id": number,
                "node_id": spec.board,
                "pin": spec.pin,
                "value": level,
                "timestamp": spelled(at_ns),
            },
        )


def _moved(board: Board, left: int | None, joined: int | None) -> Iterator[BoardEvent]:
    for cluster, type_ in ((left, "cluster.node.removed"), (joined, "cluster.node.added")):
        if cluster is not None:
            data = {
                "cluster_id": cluster,
                "node_id": number_of(board),
                "ip_address": board.spec.ip_address,
                "status": status_of(board).state,
            }
            yield BoardEvent(
                topic=Topic.CLUSTERS,
                at_ns=board.updated_at_ns,
                type=type_,
                data=data,
                beside={"cluster_id": cluster},
            )


def _cluster_event(number: int, seen: _ClusterSeen, *, at_ns: int) -> BoardEvent:
    payload = {
        "cluster_id": number,
        "name": seen.name,
        "status": seen.state,
        "nodes_ready": seen.ready,
        "nodes_total": seen.total,
        "timestamp": spelled(at_ns),
    }
    return BoardEvent(
        topic=Topic.CLUSTERS,
        at_ns=at_ns,
        type="cluster.status.changed",
        data=payload,
        kind="cluster_status",
        payload=payload,
    )


def system_metrics(*, cpu: float, memory: float, tasks: int, at_ns: int) -> BoardEvent:
    payload = {
        "cpu_usage": cpu,
        "memory_usage": memory,
        "goroutines": tasks,
        "timestamp": spelled(at_ns),
    }
    return BoardEvent(topic=Topic.SYSTEM, at_ns=at_ns, kind="system_metrics", payload=payload)
