"""The gRPC services of releases in `fleetplane.fleet.v1`.

`AgentReleases` serves the agents of one domain on that domain's listener; `ReleaseAdmin` takes and deletes
releases at the owner's socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fleetplane.fleet.releases.check_in import AgentRegister, CheckIns
from fleetplane.fleet.releases.records import Release
from fleetplane.fleet.releases.releases import NewRelease, Releases
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.kernel.access import Permission, who
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import Authentication, CallContext, MethodRow, Needs, Rate, service_rows


class ReleaseService:
    def __init__(self, releases: Releases) -> None:
        self._releases = releases

    async def AddRelease(
        self, requests: AsyncIterator[pb.AddReleasePart], context: CallContext
    ) -> pb.ReleaseView:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("a release begins with its header", field="header")
        header = first.header
        wanted = NewRelease(
            floor=header.floor,
            ignores_floor=header.ignores_floor,
            hello_seconds=header.hello_seconds,
            notes=header.notes,
            actor=context.principal.name,
        )
        return self._view(await self._releases.add(wanted, _pieces(requests)))

    async def ListReleases(
        self, _request: pb.ListReleasesRequest, _context: CallContext
    ) -> pb.ListReleasesResponse:
        return pb.ListReleasesResponse(releases=[self._view(one) for one in self._releases.list()])

    async def GetRelease(self, request: pb.GetReleaseRequest, _context: CallContext) -> pb.ReleaseView:
        return self._view(self._releases.get(request.version))

    async def DeleteRelease(
        self, request: pb.DeleteReleaseRequest, context: CallContext
    ) -> pb.DeleteReleaseResponse:
        await self._releases.delete(request.version, actor=context.principal.name)
        return pb.DeleteReleaseResponse()

    async def GetReleaseKey(
        self, _request: pb.GetReleaseKeyRequest, _context: CallContext
    ) -> pb.GetReleaseKeyResponse:
        return pb.GetReleaseKeyResponse(key=self._releases.key.text)

    def _view(self, release: Release) -> pb.ReleaseView:
        spec = release.spec
        return pb.ReleaseView(
            version=release.name,
            files=[pb.ReleaseFile(name=one.name, sha256=one.sha256, size=one.size) for one in spec.files],
            floor=spec.floor,
            ignores_floor=spec.ignores_floor,
            hello_seconds=spec.hello_seconds,
            notes=spec.notes,
            added_at=spelled(spec.added_at_ns),
            added_by=who(spec.actor),
            agents=self._releases.users(release.name),
        )


async def _pieces(requests: AsyncIterator[pb.AddReleasePart]) -> AsyncIterator[tuple[str, bytes]]:
    async for part in requests:
        match part.WhichOneof("part"):
            case "file":
                if not part.file:
                    raise InvalidArgument("is empty", field="file")
                yield part.file, b""
            case "content":
                yield "", part.content
            case _:
                raise InvalidArgument("a part is the name of a file, or content", field="part")


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
