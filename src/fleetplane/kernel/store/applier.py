"""Groups into memory: the one place where view, claims and hub move, by number and exactly once.

A server applies what it wrote itself from memory, and what others wrote from the log. Both come here, in
one step that nobody can interrupt, so that whoever reads or watches sees whole groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store import log
from fleetplane.kernel.store.engine import DatabaseMark, LoggedGroup, LogRow
from fleetplane.kernel.store.group import GroupState
from fleetplane.kernel.store.log import Claimed, LogType, SecretChanged
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.store.view import StoreView
from fleetplane.kernel.watch import Event, EventType, Hub

told = structlog.get_logger(__name__)


class Applier:
    def __init__(
        self,
        kinds: Mapping[str, AnyKind],
        view: StoreView,
        hub: Hub,
        mark: DatabaseMark,
        levels: level.Levels = level.SUPPORTED,
    ) -> None:
        self._kinds = kinds
        self._view = view
        self._hub = hub
        self._levels = levels
        self.mark = mark
        """Where memory stands."""
        self.secret_changed: Callable[[str], None] = _ignored
        """Told the name of each secret that another process has put or deleted."""
        self.wrote: Callable[[int], None] = _unheard
        """Told the number of each group that this process has written."""

    def __repr__(self) -> str:
        return f"<Applier number={self.mark.number} revision={self.mark.revision}>"

    def own(self, group: GroupState) -> None:
        """What this process wrote, unless it was read from the log before the database's answer came."""
        after = group.after()
        if after.number > self.mark.number:
            self._check(after)
            group.apply()
            self._show(group.events, after)
        self.wrote(after.number)

    def foreign(self, logged: LoggedGroup, bodies: Mapping[Key, AnyResource]) -> None:
        """What another process wrote; `bodies` has what the log leaves out (`Kind.is_logged`)."""
        self._check(logged.mark)
        events: list[Event] = []
        for row in logged.log:
            if not row.kind:
                self._other(row)
            elif (event := self._change(row, bodies)) is not None:
                events.append(event)
        self._show(events, logged.mark)

    def pass_over(self, mark: DatabaseMark) -> None:
        """A group that changed nothing, such as one that says who has the seat from now on."""
        if mark.number <= self.mark.number:
            return
        self._check(mark)
        self._show([], mark)

    def _check(self, mark: DatabaseMark) -> None:
        if mark.number != self.mark.number + 1:
            raise IntegrityError(f"group {mark.number} cannot be applied after group {self.mark.number}")

    def _show(self, events: list[Event], mark: DatabaseMark) -> None:
        self.mark = mark
        self._hub.compacted = mark.compacted
        self._hub.publish(events, mark.revision)

    def _change(self, row: LogRow, bodies: Mapping[Key, AnyResource]) -> Event | None:
        kind = self._kinds.get(row.kind)
        if kind is None:  # of a newer version: it stays in the database
            return None
        resource, view = kind.decode_logged(row.body), self._view.of(row.kind)
        if kind is level.LEVEL:  # before anything that was written from it on
            level.check(level.of(resource), self._levels)
            told.info("store.level_rose", to=level.of(resource))
        view.revision = row.revision
        if row.type == EventType.DELETED:
            known = (resource.scope, resource.name) in view.live
            view.delete(resource.scope, resource.name)
            if not known:  # of a kind whose content is not logged, and was gone before we could read it
                return None
        else:
            if not kind.is_logged:
                found = bodies.get(resource.key)
                if found is None or found.revision != row.revision:  # gone again, as a later group says
                    return None
                resource = found
            view.put(resource)
        return Event(type=EventType(row.type), resource=resource, revision=row.revision)

    def _other(self, row: LogRow) -> None:
        said = log.read(row)
        if isinstance(said, Claimed):
            if row.type == LogType.CLAIMED:
                self._view.claims[said.claim] = said.owner
            else:
                self._view.claims.pop(said.claim, None)
        elif isinstance(said, SecretChanged):
            self.secret_changed(said.name)


def _ignored(_name: str) -> None:
    pass


def _unheard(_number: int) -> None:
    pass
