"""`fleetplane.fleet.v1.AgentReleases`: what agents of one domain ask about their own version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fleetplane.fleet.releases.check_in import AgentRegister, CheckIns
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, MethodRow, Needs, Rate, service_rows

SERVICE = pb.DESCRIPTOR.services_by_name["AgentReleases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAudience:
    """How the agents of a domain reach releases: on their own listener, as they are known there."""

    listener: str
    authentication: Authentication
    permission: Permission | None
    register: Callable[[Any, Store], AgentRegister]
    """From the running domain."""
    rate: Rate | None = None
    needs: Needs = Needs.ACTIVE
    """`WRITES` for agents that may call any of several servers."""

    def rows(self) -> Iterator[MethodRow]:
        """The rows of the method table."""
        return service_rows(
            SERVICE,
            self.permission,
            listener=self.listener,
            authentication=self.authentication,
            rate=self.rate,
            needs=self.needs,
        )


class DomainReleases:
    """The servicer for the agents of one domain."""

    def __init__(self, check_ins: CheckIns, domain: str, register: AgentRegister) -> None:
        self._check_ins = check_ins
        self._domain = domain
        self._register = register

    async def CheckIn(self, request: pb.CheckInRequest, context: CallContext) -> pb.CheckInResponse:
        agent = self._register.recognise(context, request.name)
        return await self._check_ins.hear(self._domain, agent, request)

    async def Fetch(self, request: pb.FetchRequest, context: CallContext) -> AsyncIterator[pb.FetchChunk]:
        self._register.recognise(context, "")
        releases = self._check_ins.releases
        releases.shelf.path(request.sha256)
        if not releases.has_file(request.sha256):
            raise NotFound("no release has such a file")
        async for piece in releases.shelf.read(request.sha256, request.offset):
            self._check_ins.sent_bytes[self._domain] += len(piece)
            yield pb.FetchChunk(content=piece)
