"""Health of services that are not boards, as controllers report it.

Kept in memory only: a service that reports tells again soon, and one that does not is not there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fleetplane.kernel.resources import Condition

SERVICES_LIMIT: Final = 256
"""The service with the oldest report is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    reporter: str
    """The principal in the certificate."""
    service: str
    conditions: tuple[Condition, ...]
    at_ns: int


class ServiceReports:
    def __init__(self) -> None:
        self._reports: OrderedDict[tuple[str, str], ServiceReport] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ServiceReports {len(self._reports)}>"

    def heard(self, report: ServiceReport) -> None:
        key = (report.reporter, report.service)
        self._reports[key] = report
        self._reports.move_to_end(key)
        while len(self._reports) > SERVICES_LIMIT:
            self._reports.popitem(last=False)

    def all(self) -> Sequence[ServiceReport]:
        return sorted(self._reports.values(), key=lambda one: (one.reporter, one.service))
