"""Following the log that other servers write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store.applier import Applier
from fleetplane.kernel.store.engine import Author, GroupPage, LoggedGroup
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.watch import EventType

PAGE_ROWS = 500
"""Changes read at a time: about 0.5 MB."""


class Follower:
    def __init__(self, engine: SharedEngine, applier: Applier, kinds: Mapping[str, AnyKind]) -> None:
        self._engine = engine
        self._applier = applier
        self._kinds = kinds
        self.author: Author | None = None
        """Who wrote the last group that was applied; None before the first."""
        self.applied = 0
        self.ended = False
        """This server writes now: what it wrote is in memory before anybody is told of it."""
        self._turn = asyncio.Lock()  # guards: a group is applied once, whoever asked for it

    def __repr__(self) -> str:
        return f"<Follower number={self._applier.mark.number}>"

    async def catch_up(self) -> None:
        """Apply everything that the database has; raises if that cannot be done from here."""
        async with self.caught_up():
            pass

    @asynccontextmanager
    async def caught_up(self) -> AsyncIterator[None]:
        """Everything that the database had at entry is applied, and nothing more until exit.

        For whoever writes inside: nobody else takes that from the log before its writer has.
        """
        async with self._turn:
            while not self.ended:
                page = await self._engine.groups(after=self._applier.mark.number, limit=PAGE_ROWS)
                self._check(page)
                for group in page.groups:
                    self._applier.foreign(group, await self._bodies(group))
                    self.author = group.author
                    self.applied += 1
                if self._applier.mark.number >= page.head.number:
                    break
            yield

    def _check(self, page: GroupPage) -> None:
        mine = self._applier.mark
        if page.head.number < mine.number or (page.before is not None and page.before != mine):
            raise IntegrityError(
                f"the database is at group {page.head.number} and does not have group {mine.number} as this"
                " server has seen it: commits that were acknowledged are lost",
                hint="a replica that lacked them was promoted; restore the one that has them, or accept the"
                " loss and start all servers again",
            )
        first = page.groups[0].mark.number if page.groups else page.head.number + 1
        if first != mine.number + 1:
            raise IntegrityError(
                f"group {mine.number + 1} is no longer in the log, which begins with group {first}:"
                " this server was away for too long",
                hint="start it again; it loads everything anew",
            )

    async def _bodies(self, group: LoggedGroup) -> Mapping[Key, AnyResource]:
        """The content of what the log only names, as the database has it now."""
        bodies: dict[Key, AnyResource] = {}
        for row in group.log:
            kind = self._kinds.get(row.kind)
            if kind is not None and not kind.is_logged and row.type != EventType.DELETED:
                key = kind.decode_logged(row.body).key
                found = await self._engine.resource(*key)
                if found is not None:
                    bodies[key] = kind.decode(found.body)
        return bodies
