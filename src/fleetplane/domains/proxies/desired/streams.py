"""Streams: objects that people write through the resource API."""

from __future__ import annotations

from typing import Any

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.desired.common import ProxyParts, batch_of, place_of, reloads, required_place
from fleetplane.domains.proxies.kinds.records import AGENT, STREAM, UPSTREAM, Stream, StreamSpec
from fleetplane.domains.proxies.resources.places import MIRROR, place, references
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.kernel.store import Draft

_NAME = "name"


def stream_view(stream: Stream, reading: ViewReader) -> ResourceView[Any, NoStatus]:
    """What is shown of a stream."""
    return ResourceView(spec=MIRROR.shown(stream.spec, references(stream.scope, reading)), status=None)


def find_stream(_domain: object, draft: Draft, scope: str, name: str) -> Stream | None:
    """By its name."""
    at = place_of(draft, scope)
    found = None if at is None else draft.claimed_by(STREAM, at, _NAME, name)
    return None if at is None or found is None else draft.get(STREAM, at, found)


def put_stream(call: WriteCall) -> Stream:
    """Create a stream, or replace it."""
    domain: ProxyParts = call.domain
    scope, draft = required_place(call), call.draft
    # What is not known stays a name, and is refused by its field.
    ids = {
        "upstream": lambda name: draft.claimed_by(UPSTREAM, scope, _NAME, name) or name,
        "agents": lambda name: draft.claimed_by(AGENT, scope, _NAME, name) or name,
    }
    spec: StreamSpec = MIRROR.stored(call.spec, ids, name=call.name)
    identity = call.new_id() if call.stored is None else call.stored.name
    return domain.streams.put_in(batch_of(call), scope, identity, spec)


def delete_stream(call: WriteCall) -> None:
    """Delete a stream."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.streams.delete_in(batch_of(call), call.stored)


STREAMS = PublicResource(
    name="proxy-stream",
    plural="proxy-streams",
    short=("pstream",),
    summary="A port on which proxies pass on TCP or UDP",
    kind=STREAM,
    spec=MIRROR.shape(StreamSpec),
    status=NoStatus,
    view=stream_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda stream, _reading: stream.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="PROTOCOL", value=".spec.protocol"),
        Column(title="PORT", value=".spec.listenPort", type="number"),
        Column(title="UPSTREAM", value=".spec.upstream"),
        Column(title="ROUTES", value=lambda shown: len(shown["spec"].get("routes") or ()), type="number"),
        Column(title="AGE", value=".metadata.createdAt", type="age", wide=True),
    ),
    search=(".metadata.name",),
)
STREAM_WRITER = Writable(
    anywhere=True,
    permission=access.OPERATE,
    find=find_stream,
    put=put_stream,
    delete=delete_stream,
    rank=13,
    disturbs=reloads,
)
