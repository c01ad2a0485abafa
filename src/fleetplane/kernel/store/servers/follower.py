"""Following the log that all servers write.

What this process wrote itself is in the log as well, and may be read there before its own call has
returned: whoever comes second, the writer or the follower, finds it applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store.engine import DatabaseMark, GroupOutcome, GroupPage, LoggedGroup, WriteGroup
from fleetplane.kernel.store.group import Applier
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.watch import EventType

PAGE_ROWS = 500
"""Changes read at a time: about 0.5 MB."""


class Follower:
    def __init__(self, engine: SharedEngine, applier: Applier, kinds: Mapping[str, AnyKind]) -> None:
        self._engine = engine
        self._applier = applier
        self._kinds = kinds
        self.applied = 0
        self._turn = asyncio.Lock()  # guards: the same page is not read twice at the same time

    def __repr__(self) -> str:
        return f"<Follower number={self._applier.mark.number}>"

    async def catch_up(self) -> None:
        """Apply everything that the database has; raises if that cannot be done from here."""
        async with self._turn:
            while True:
                asked = self._applier.mark
                page = await self._engine.groups(after=asked.number, limit=PAGE_ROWS)
                await self._apply(page, asked)
                if self._applier.mark.number >= page.head.number:
                    return

    async def write_alone(self, draft: Callable[[], WriteGroup | None]) -> GroupOutcome | None:
        """Catch up, and write what is drafted then, while no other server can write.

        None if nothing was written: too much is missing (then `draft` was not called), or nothing is wanted.
        """
        asked = self._applier.mark

        async def drafted(page: GroupPage) -> WriteGroup | None:
            await self._apply(page, asked)
            return draft()

        return await self._engine.commit_alone(after=asked.number, limit=PAGE_ROWS, draft=drafted)

    async def _apply(self, page: GroupPage, asked: DatabaseMark) -> None:
        """Apply what was read after a mark, but for what was applied meanwhile."""
        _check(page, asked)
        for group in page.groups:
            if group.mark.number <= self._applier.mark.number:
                continue
            bodies = await self._bodies(group)
            if group.mark.number == self._applier.mark.number + 1:
                self._applier.foreign(group, bodies)
                self.applied += 1

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


def _check(page: GroupPage, asked: DatabaseMark) -> None:
    if page.head.number < asked.number or (page.before is not None and page.before != asked):
        raise IntegrityError(
            f"the database is at group {page.head.number} and does not have group {asked.number} as this"
            " server has seen it: commits that were acknowledged are lost",
            hint="a replica that lacked them was promoted; restore the one that has them, or accept the"
            " loss and start all servers again",
        )
    first = page.groups[0].mark.number if page.groups else page.head.number + 1
    if first != asked.number + 1:
        raise IntegrityError(
            f"group {asked.number + 1} is no longer in the log, which begins with group {first}:"
            " this server was away for too long",
            hint="start it again; it loads everything anew",
        )
