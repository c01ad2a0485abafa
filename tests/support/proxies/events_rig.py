"""`/v1/events` in this process: the real feed on a real store, a real listener, a real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import websockets
from support.instances.agents_rig import BOSS, Rig, agents_rig, until
from websockets.asyncio.client import ClientConnection

from fleetplane.domains.proxies.access import Access, ProxyCaller
from fleetplane.domains.proxies.kinds.records import (
    MEMBERSHIP,
    MembershipSpec,
    OrganizationSpec,
    WorkspaceSpec,
)
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.live.app import ProxyEventsApp
from fleetplane.domains.proxies.live.events import ProxyEvent, event_ring
from fleetplane.fleet.feeds.ring import RING_EVENTS, EventRing
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.rpc import ListenerSpec, open_listener

DEADLINE_SECONDS = 60.0


class Listener:
    """A client and everything that it heard."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Say something and wait for the reply, passing over events."""
        await self.say(**message)
        return await self.until(
            lambda one: one["type"] in ("subscription.updated", "error", "pong", "authenticated")
        )

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            heard = json.loads(await self.socket.recv())
        assert isinstance(heard, dict)
        return heard

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            if wanted(heard := await self.next()):
                return heard

    async def event(self, kind: str) -> dict[str, Any]:
        return await self.until(lambda one: one["type"] == kind)


@dataclass(slots=True, kw_only=True)
class EventsRig:
    fleet: Rig
    feed: EventRing[ProxyEvent]
    app: ProxyEventsApp
    address: str
    tokens: dict[str, ProxyCaller]
    stack: AsyncExitStack

    @property
    def organization(self) -> str:
        return self.fleet.scope.split("/")[1]

    @property
    def workspace(self) -> str:
        return self.fleet.scope.split("/")[3]

    async def member(self, name: str, role: str = "viewer", organization: str = "") -> str:
        """The token of a user with a role."""
        await self._put_member(name, organization or self.organization, role)
        self.tokens[f"token-{name}"] = ProxyCaller(name=f"user/{name}", user=name)
        return f"token-{name}"

    async def _put_member(self, name: str, organization: str, role: str) -> None:
        scope, spec = f"org/{organization}", MembershipSpec(role=OrganizationRole(role))
        await self.fleet.store.transact(
            lambda draft: draft.put(MEMBERSHIP, scope, name, spec=spec),
            actor="t",
            action="t",
            touches=[MEMBERSHIP.key(scope, name)],
        )

    async def remove_member(self, name: str) -> None:
        scope = f"org/{self.organization}"
        await self.fleet.store.transact(
            lambda draft: draft.delete(MEMBERSHIP, scope, name),
            actor="t",
            action="t",
            touches=[MEMBERSHIP.key(scope, name)],
        )

    async def another_organization(self) -> Rig:
        """The same server as another organisation sees it."""
        made = await self.fleet.places.create_organization(
            OrganizationSpec(name="Other", slug="other"), owner="other", actor=BOSS
        )
        workspace = await self.fleet.places.create_workspace(
            made.name, WorkspaceSpec(name="Theirs", slug="theirs"), actor=BOSS
        )
        return replace(self.fleet, scope=workspace.scope)

    async def listen(self, token: str | None = None, **options: Any) -> Listener:
        query = f"?token={token}" if token else ""
        connection = websockets.connect(f"{self.address}/v1/events{query}", **options)
        return Listener(await self.stack.enter_async_context(connection))

    async def caught_up(self) -> None:
        """The feed has told everything that was written."""
        await until(lambda: self.feed.revision >= self.fleet.store.revision)


@asynccontextmanager
async def events_rig(
    folder: Path, *, ring_events: int = RING_EVENTS, **options: Any
) -> AsyncIterator[EventsRig]:
    async with agents_rig(folder) as fleet, asyncio.TaskGroup() as tasks:
        tokens: dict[str, ProxyCaller] = {}

        def authenticate(token: str) -> ProxyCaller:
            if token not in tokens:
                raise Unauthenticated("the token is not known")
            return tokens[token]

        feed = event_ring(fleet.store, ring_events=ring_events)
        running = tasks.create_task(feed.run())
        app = ProxyEventsApp(
            feed, access=Access(fleet.store), authenticate=authenticate, clock=SystemClock(), **options
        )

        spec = ListenerSpec(name="web", addresses=("127.0.0.1:0",), app=app, http1=True)
        async with open_listener(spec, grace_seconds=1) as listener, AsyncExitStack() as stack:
            yield EventsRig(
                fleet=fleet,
                feed=feed,
                app=app,
                address=listener.addresses[0].replace("http", "ws", 1),
                tokens=tokens,
                stack=stack,
            )
            app.drain()
        running.cancel()
