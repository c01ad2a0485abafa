"""Health of services that are not boards, as controllers report it.

On a database file it is kept in memory only: a service that reports tells again soon, and one that does not
is not there. Several servers hear each in part; there it is written down, if it is news or a minute old, so
that all of them tell the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.kernel.resources import Condition, Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS

SERVICES_LIMIT: Final = 256
"""The service with the oldest report is forgotten first."""
AGAIN_NS: Final = 60 * NS
"""A report that says nothing new is written down this long after the one before."""


class ServiceReport(BoardsSpec, frozen=True):
    reporter: str
    """The principal in the certificate."""
    service: str
    conditions: tuple[Condition, ...]
    at_ns: int


BOARD_SERVICE: Kind[ServiceReport, Nothing] = Kind("board-service", ServiceReport, Nothing)


class ServiceReports:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._reports: OrderedDict[tuple[str, str], ServiceReport] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ServiceReports {len(self.all())}>"

    async def heard(self, report: ServiceReport) -> None:
        if self._store.shared:
            await self._write(report)
            return
        key = (report.reporter, report.service)
        self._reports[key] = report
        self._reports.move_to_end(key)
        while len(self._reports) > SERVICES_LIMIT:
            self._reports.popitem(last=False)

    async def _write(self, report: ServiceReport) -> None:
        name = _name(report)
        before = self._store.get(BOARD_SERVICE, SCOPE, name)
        if before is not None and not _is_news(report, before.spec):
            return
        kept = sorted(self._store.list(BOARD_SERVICE, SCOPE), key=lambda one: one.spec.at_ns)
        oldest = [one.name for one in kept[: max(0, len(kept) + 1 - SERVICES_LIMIT)] if one.name != name]

        def change(draft: Draft) -> None:
            known = draft.get(BOARD_SERVICE, SCOPE, name)
            if known is not None and known.spec.at_ns >= report.at_ns:
                return  # another server heard it later
            draft.put(BOARD_SERVICE, SCOPE, name, spec=report)
            for one in oldest if known is None else ():
                if draft.get(BOARD_SERVICE, SCOPE, one) is not None:
                    draft.delete(BOARD_SERVICE, SCOPE, one)

        await self._store.transact(
            change,
            actor=report.reporter,
            action="boards.service_report",
            touches=[_key(name), *map(_key, oldest)],
        )

    def all(self) -> Sequence[ServiceReport]:
        found = list(self._reports.values())
        if self._store.shared:
            found = [one.spec for one in self._store.list(BOARD_SERVICE, SCOPE)]
        return sorted(found, key=lambda one: (one.reporter, one.service))


def _is_news(report: ServiceReport, before: ServiceReport) -> bool:
    """Messages have figures in them that change with every report, and are no news."""
    said, known = ({one.type: one.status for one in each.conditions} for each in (report, before))
    return said != known or report.at_ns - before.at_ns >= AGAIN_NS


def _name(report: ServiceReport) -> str:
    return hashlib.sha256(f"{report.reporter}\n{report.service}".encode()).hexdigest()[:32]


def _key(name: str) -> Key:
    return BOARD_SERVICE.key(SCOPE, name)
