"""`fleetplane.fleet.v1.ReleaseAdmin`: releases of agents, for the owner of the server's socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fleetplane.fleet.releases.records import Release
from fleetplane.fleet.releases.releases import NewRelease, Releases
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb
from fleetplane.kernel.access import who
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import CallContext


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
