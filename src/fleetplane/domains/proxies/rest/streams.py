"""REST: streams of a workspace."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import OPERATE, READ
from fleetplane.domains.proxies.kinds.records import STREAM, Stream, StreamSpec, workspace_of
from fleetplane.domains.proxies.kinds.values import TargetAgents
from fleetplane.domains.proxies.rest.bodies import CreateStream, UpdateStream
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    actor,
    changes,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.rest.views import ProxyShape
from fleetplane.domains.proxies.serving.named import Streams
from fleetplane.domains.proxies.typed_options import (
    AccessRule,
    StreamLimits,
    StreamProtocol,
    StreamRoute,
    StreamTimeouts,
)
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("Streams")


class StreamView(ProxyShape, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    name: str
    listen_port: int
    protocol: StreamProtocol
    upstream_id: str | UnsetType = UNSET
    routes: tuple[StreamRoute, ...] | UnsetType = UNSET
    send_proxy_protocol: bool | UnsetType = UNSET
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    limits: StreamLimits | UnsetType = UNSET
    timeouts: StreamTimeouts | UnsetType = UNSET
    responses: int | UnsetType = UNSET
    log: bool | UnsetType = UNSET
    target_agents: TargetAgents
    created_at: str
    updated_at: str


def stream_view(found: Stream) -> StreamView:
    return StreamView(
        id=found.name,
        workspace_id=workspace_of(found.scope),
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
        **{name: getattr(found.spec, name) for name in StreamSpec.__struct_fields__},
    )


class StreamRoutes:
    def __init__(self, store: Store, streams: Streams) -> None:
        self._store = store
        self._streams = streams

    def routes(self) -> Sequence[Route]:
        many, one = "/workspaces/{workspace_id}/streams", "/streams/{stream_id}"
        return (
            _ROUTES.get(many, self.streams, READ, query=PAGING),
            _ROUTES.post(many, self.create_stream, OPERATE, body=CreateStream, status=CREATED),
            _ROUTES.get(one, self.stream, READ),
            _ROUTES.patch(one, self.update_stream, OPERATE, body=UpdateStream),
            _ROUTES.delete(one, self.delete_stream, OPERATE, status=NO_CONTENT),
        )

    async def streams(self, call: ProxyCall) -> Answer[Listing[StreamView]]:
        """List streams."""
        found = in_order(self._store.list(STREAM, call.scope))
        return Answer(content=listing(found, paging(call.query), stream_view))

    async def create_stream(self, call: ProxyCall) -> Answer[StreamView]:
        """Create a stream: a port on which TCP or UDP is passed on."""
        body: CreateStream = call.body
        answer = call.answering(self._created)
        return answer(await self._streams.create(call.scope, body.spec(), actor=actor(call)))

    def _created(self, made: Stream) -> Answer[StreamView]:
        return created(stream_view(made), made, "streams")

    async def stream(self, call: ProxyCall) -> Answer[StreamView]:
        """Get a stream."""
        found = self._streams.get(call.scope, call.path["stream_id"])
        return shown(stream_view(found), found)

    async def update_stream(self, call: ProxyCall) -> Answer[StreamView]:
        """Change a stream."""
        updated = await self._streams.update(
            call.scope,
            call.path["stream_id"],
            changes(call.body),
            if_match=if_match(call),
            actor=actor(call),
        )
        return shown(stream_view(updated), updated)

    async def delete_stream(self, call: ProxyCall) -> Answer[None]:
        """Delete a stream."""
        await self._streams.delete(
            call.scope, call.path["stream_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()
