"""How many series each source and tenant has, and whose goes when there is no room. Pure bookkeeping.

A source may have so many, and a tenant so many, whatever else there is. When all together are too many, the
one who has the most gives way to whoever has less: first among tenants, then among a tenant's sources.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fleetplane.kernel.telemetry.fair_queue import tenant_of
from fleetplane.kernel.telemetry.values import TelemetryLimits

NEAR: Final = 0.8
"""The share of a quota at which its owner is warned."""
NOTICES_LIMIT: Final = 100
"""Told of one batch."""
EVICT_SHARE: Final = 0.05
"""Of the largest source's series that give way at once, the stalest: so as not to look for them each time."""


class Admission(StrEnum):
    YES = "yes"
    EVICT = "evict"
    """Once somebody who has more has given some up."""
    SOURCE_FULL = "source"
    TENANT_FULL = "tenant"
    ALL_FULL = "all"
    """No room is left, and no other source has more series than this one."""


@dataclass(slots=True)
class SeriesQuota:
    limits: TelemetryLimits
    total: int = 0
    _tenants: Counter[str] = field(default_factory=Counter, repr=False)
    _sources: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict, repr=False)
    """By tenant, how many each of its sources has; a source is named with its scope."""

    def count(self, scope: str, source: str, number: int = 1) -> None:
        tenant = tenant_of(scope)
        sources = self._sources.setdefault(tenant, Counter())
        sources[(scope, source)] += number
        self._tenants[tenant] += number
        self.total += number
        if sources[(scope, source)] <= 0:
            del sources[(scope, source)]

    def of_source(self, scope: str, source: str) -> int:
        return self._sources.get(tenant_of(scope), Counter())[(scope, source)]

    def of_tenant(self, scope: str) -> int:
        return self._tenants[tenant_of(scope)]

    def admit(self, scope: str, source: str) -> Admission:
        """Whether this source may have one more series."""
        if self.of_source(scope, source) >= self.limits.source_series:
            return Admission.SOURCE_FULL
        if self.of_tenant(scope) >= self.limits.tenant_series:
            return Admission.TENANT_FULL
        if self.total < self.limits.series:
            return Admission.YES
        victim = self.largest()
        same_tenant = tenant_of(victim[0]) == tenant_of(scope)
        theirs = self.of_source(*victim) if same_tenant else self.of_tenant(victim[0])
        ours = self.of_source(scope, source) if same_tenant else self.of_tenant(scope)
        return Admission.EVICT if theirs > ours + 1 else Admission.ALL_FULL

    def largest(self) -> tuple[str, str]:
        """The source, with its scope, that gives way next: the largest of the largest tenant."""
        tenant = self._tenants.most_common(1)[0][0]
        return self._sources[tenant].most_common(1)[0][0]

    def near(self, scope: str, source: str) -> tuple[str, int, int] | None:
        """Which quota is about to be hit, how much of it is used, and how large it is."""
        for name, used, limit in (
            ("source", self.of_source(scope, source), self.limits.source_series),
            ("tenant", self.of_tenant(scope), self.limits.tenant_series),
            ("all", self.total, self.limits.series),
        ):
            if used >= limit * NEAR:
                return name, used, limit
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaNotice:
    """A quota that is near, or hit."""

    quota: str
    """`source`, `tenant`, `all`, or `evicted`: whose series gave way."""
    scope: str
    source: str
    used: int
    limit: int
    hit: bool


class Admissions:
    """Which new series the rows of one batch get, and what is told about it."""

    def __init__(self, quota: SeriesQuota) -> None:
        self.quota = quota
        self._notices: dict[tuple[str, str, str, bool], QuotaNotice] = {}
        self._refused: set[tuple[str, str]] = set()
        """Sources that were refused one already: to find out whether there is room costs time."""

    def __repr__(self) -> str:
        return f"<Admissions refused={len(self._refused)}>"

    @property
    def notices(self) -> tuple[QuotaNotice, ...]:
        return tuple(self._notices.values())

    def admit(self, scope: str, source: str) -> Admission:
        """YES; EVICT, after which whoever is `quota.largest()` must give some up; or why not."""
        quota, limits = self.quota, self.quota.limits
        if (scope, source) in self._refused:
            return Admission.ALL_FULL
        if (near := quota.near(scope, source)) is not None:
            self._tell(*near, scope=scope, source=source, hit=False)
        found = quota.admit(scope, source)
        if found not in (Admission.YES, Admission.EVICT):
            used, limit = {
                Admission.SOURCE_FULL: (quota.of_source(scope, source), limits.source_series),
                Admission.TENANT_FULL: (quota.of_tenant(scope), limits.tenant_series),
            }.get(found, (quota.total, limits.series))
            self._tell(found, used, limit, scope=scope, source=source, hit=True)
            self._refused.add((scope, source))
        return found

    def evicted(self, scope: str, source: str, *, before: int) -> None:
        """Tell that a source, which had so many, gave some up."""
        left = self.quota.of_source(scope, source)
        self._tell("evicted", left, before, scope=scope, source=source, hit=True)

    def _tell(self, quota: str, used: int, limit: int, *, scope: str, source: str, hit: bool) -> None:
        if len(self._notices) < NOTICES_LIMIT:
            self._notices.setdefault(
                (str(quota), scope, source, hit),
                QuotaNotice(quota=str(quota), scope=scope, source=source, used=used, limit=limit, hit=hit),
            )
