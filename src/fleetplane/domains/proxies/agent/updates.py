"""Which configuration to bring to service next: always the newest that came. Pure but for its wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleetplane.domains.proxies.agent.nginx.change_journal import VersionState, VersionStatus
from fleetplane.domains.proxies.nginx.checksum import checksum
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


class Updates:
    """Holds one pending update; a newer one marks the former as superseded."""

    def __init__(self, overtaken: Callable[[VersionStatus], None]) -> None:
        self._overtaken = overtaken
        self._waiting: pb.ConfigUpdate | None = None
        self._current: pb.ConfigUpdate | None = None
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Updates waiting={self._waiting and self._waiting.version}>"

    def offer(self, update: pb.ConfigUpdate) -> None:
        if _same(update, self._current) or _same(update, self._waiting):
            return  # the server asks again while we are at it, after a reconnect for instance
        if self._waiting is not None and update.version < self._waiting.version:
            self._tell_overtaken(update, by=self._waiting)
            return
        if self._waiting is not None:
            self._tell_overtaken(self._waiting, by=update)
        self._waiting = update
        self._arrived.set()

    def _tell_overtaken(self, update: pb.ConfigUpdate, *, by: pb.ConfigUpdate) -> None:
        self._overtaken(
            VersionStatus(
                config_id=update.config_id,
                version=update.version,
                state=VersionState.FAILED,
                error=f"superseded by version {by.version}",
            )
        )

    async def next(self) -> pb.ConfigUpdate:
        """The newest; it is being dealt with until this is asked again."""
        self._current = None
        while self._waiting is None:
            self._arrived.clear()
            await self._arrived.wait()
        self._current, self._waiting = self._waiting, None
        return self._current


def _same(update: pb.ConfigUpdate, other: pb.ConfigUpdate | None) -> bool:
    return other is not None and update.version == other.version and checksum(update) == checksum(other)
