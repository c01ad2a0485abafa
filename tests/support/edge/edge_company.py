"""Daemons of both kinds around a real server, as the conformance tests need them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
from support.edge import edge_streams_rig
from support.edge.edge_daemon_rig import running
from support.edge.edge_identity_rig import Machine
from support.edge.edge_site import Event, Rest, Site, identity_of
from support.edge.edge_streams_rig import Daemon
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.clock import SystemClock

INVALID, NOT_FOUND, EXHAUSTED, PRECONDITION, ABORTED, UNAUTHENTICATED = 3, 5, 8, 9, 10, 16


@asynccontextmanager
async def at_work(here: Site, rest: Rest, **options: Any) -> AsyncIterator[ShippedDaemon]:
    daemon = await here.shipped(rest, **options)
    async with daemon.running():
        await rest.connected(daemon.node_id)
        yield daemon


@asynccontextmanager
async def by_hand(here: Site, rest: Rest) -> AsyncIterator[Daemon]:
    """A daemon whose every event the test writes itself."""
    identity = identity_of(await here.shipped(rest), rest.tenant)
    async with grpc.aio.insecure_channel(here.edge) as channel:
        yield Daemon(cast("edge_streams_rig.Rig", SimpleNamespace(clock=SystemClock())), identity, channel)


@asynccontextmanager
async def machine(here: Site, rest: Rest) -> AsyncIterator[Machine]:
    """One that is enrolled and rotates its key in whatever layout is asked for."""
    daemon = await here.shipped(rest)
    async with grpc.aio.insecure_channel(here.edge) as channel:
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        yield Machine(stub, node_id=daemon.node_id, key=daemon.key, token=daemon.token)


async def only(rest: Rest, run_id: str) -> dict[str, Any]:
    """What became of the one target of a run."""
    (found,) = (await rest.ended(run_id))["per_node"]
    return cast("dict[str, Any]", found)


async def told(rest: Rest, run_id: str, kind: str) -> list[Event]:
    await rest.ended(run_id)
    async with rest.events(f"/fleet/runs/{run_id}/events") as events:
        return [event async for event in events if event.kind == kind]


@asynccontextmanager
async def ours_at_work(here: Site, rest: Rest, folder: Path) -> AsyncIterator[str]:
    state = await here.ours(rest, folder)
    async with running(state):
        (node,) = (await rest.get("/hosts"))["items"]
        await rest.connected(node["node_id"])
        yield node["node_id"]
