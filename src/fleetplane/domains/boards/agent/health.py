"""How this node is, from what is known already: no hardware is touched, and nothing is waited for.

`OK` with every check, `DEGRADED` if one is worried, `FAILED` if one has failed. That a node has no pins
or no journal is a fact about it and no fault; that it had pins and lost them is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fleetplane.domains.boards.agent.metrics.values import HOT_CELSIUS, Reserve, Snapshot

STALE_METRICS_SECONDS: Final = 30.0
DISK_WORRY_PERCENT: Final = 90.0
DISK_FULL_PERCENT: Final = 98.0
CRITICAL_CELSIUS: Final = 90.0
CERTIFICATE_WORRY_SHARE: Final = 1 / 6
"""Of its life left: it should have been renewed when twice that was."""


class CheckStatus(StrEnum):
    OK = "OK"
    DEGRADED = "DEGRADED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: CheckStatus
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFacts:
    """What the checks go by. Times in seconds since the Unix epoch."""

    now: float
    gpio_wanted: bool
    gpio_available: bool
    gpio_reason: str
    snapshot: Snapshot | None
    log_sources: tuple[str, ...]
    journal_reason: str
    audit_lost: int
    certificate_begins: float | None
    certificate_ends: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardHealth:
    status: CheckStatus
    checks: tuple[Check, ...]


def assess(facts: CheckFacts) -> BoardHealth:
    checks = tuple(_checks(facts))
    worst = CheckStatus.OK
    for check in checks:
        if check.status is CheckStatus.FAILED:
            worst = CheckStatus.FAILED
        elif check.status is CheckStatus.DEGRADED and worst is CheckStatus.OK:
            worst = CheckStatus.DEGRADED
    return BoardHealth(status=worst, checks=checks)


def _checks(facts: CheckFacts) -> Iterable[Check]:
    yield _gpio(facts)
    yield _metrics(facts)
    yield Check(name="logs", status=CheckStatus.OK, message=facts.journal_reason)
    if facts.audit_lost:
        yield Check(name="audit", status=CheckStatus.FAILED, message=f"{facts.audit_lost} entries are lost")
    if facts.snapshot is not None:
        yield _disk(facts.snapshot)
        yield _temperature(facts.snapshot)
        yield _power(facts.snapshot)
        yield _clock(facts.snapshot)
    yield _certificate(facts)


def _gpio(facts: CheckFacts) -> Check:
    if facts.gpio_available:
        return Check(name="gpio", status=CheckStatus.OK)
    status = CheckStatus.DEGRADED if facts.gpio_wanted else CheckStatus.OK
    return Check(name="gpio", status=status, message=facts.gpio_reason)


def _metrics(facts: CheckFacts) -> Check:
    if facts.snapshot is None:
        return Check(name="metrics", status=CheckStatus.DEGRADED, message="nothing was measured yet")
    age = facts.now - facts.snapshot.at_ns / 1e9
    if age > STALE_METRICS_SECONDS:
        return Check(name="metrics", status=CheckStatus.FAILED, message=f"last measured {age:.0f} s ago")
    return Check(name="metrics", status=CheckStatus.OK)


def _disk(snapshot: Snapshot) -> Check:
    used = snapshot.root_disk_usage_percent
    if snapshot.root_read_only:
        return Check(name="disk", status=CheckStatus.FAILED, message="the root file system is read-only")
    if used >= DISK_FULL_PERCENT:
        return Check(name="disk", status=CheckStatus.FAILED, message=f"{used:.0f} % of the root disk is used")
    worn = [one.name for one in snapshot.storage if one.reserve in (Reserve.WARNING, Reserve.URGENT)]
    if worn:
        return Check(name="disk", status=CheckStatus.DEGRADED, message=f"{', '.join(worn)} is worn out")
    if used >= DISK_WORRY_PERCENT:
        return Check(
            name="disk", status=CheckStatus.DEGRADED, message=f"{used:.0f} % of the root disk is used"
        )
    return Check(name="disk", status=CheckStatus.OK)


def _temperature(snapshot: Snapshot) -> Check:
    celsius = snapshot.temperature_celsius
    if any(zone.status == "critical" for zone in snapshot.zones) or celsius >= CRITICAL_CELSIUS:
        return Check(name="temperature", status=CheckStatus.FAILED, message=f"{celsius:.0f} degrees")
    if celsius >= HOT_CELSIUS:
        return Check(name="temperature", status=CheckStatus.DEGRADED, message=f"{celsius:.0f} degrees")
    return Check(name="temperature", status=CheckStatus.OK, message="" if snapshot.zones else "no sensor")


def _power(snapshot: Snapshot) -> Check:
    power = snapshot.power
    if snapshot.under_voltage_alarm or (power is not None and power.under_voltage_now):
        return Check(name="power", status=CheckStatus.DEGRADED, message="the supply's voltage is too low")
    if power is not None and power.throttled_now:
        return Check(name="power", status=CheckStatus.DEGRADED, message="the processor is being slowed down")
    return Check(name="power", status=CheckStatus.OK)


def _clock(snapshot: Snapshot) -> Check:
    if snapshot.clock_synchronised is False:
        return Check(name="clock", status=CheckStatus.DEGRADED, message="the clock is not synchronised")
    return Check(name="clock", status=CheckStatus.OK)


def _certificate(facts: CheckFacts) -> Check:
    begins, ends = facts.certificate_begins, facts.certificate_ends
    if begins is None or ends is None:
        return Check(
            name="certificate", status=CheckStatus.DEGRADED, message="this node has not joined a server"
        )
    left = ends - facts.now
    if left <= 0:
        return Check(name="certificate", status=CheckStatus.FAILED, message="it has expired")
    if left < (ends - begins) * CERTIFICATE_WORRY_SHARE:
        words = f"it expires in {left / 3600:.0f} h and was not renewed"
        return Check(name="certificate", status=CheckStatus.DEGRADED, message=words)
    return Check(name="certificate", status=CheckStatus.OK)
