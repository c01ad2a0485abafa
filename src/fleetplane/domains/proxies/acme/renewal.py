"""When a certificate is asked for, renewed, given up on for a while, or worried about. Pure.

A certificate is renewed when a third of its life is left, or half of one that lives ten days or
less, a little earlier by its own jitter so that a fleet's certificates do not all come at once.
An authority that suggests another moment is followed. What fails is tried again after an hour,
then two, up to a day; the back-off is part of the stored status, so that a server which is
restarted over and over does not use up the authority's patience.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fleetplane.domains.proxies.kinds.records import CertificateSpec, CertificateStatus
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.values.times import NS

HOUR_NS = 3600 * NS
DAY_NS = 24 * HOUR_NS
IMPORTED = "imported"
RETRY = Backoff(first_seconds=2 * 3600.0, ceiling_seconds=24 * 3600.0)
"""The first wait is between one and two hours: a back-off never uses its lower half."""


class Alarm(StrEnum):
    """From least to worst."""

    NONE = ""
    WARNING = "warning"
    CRITICAL = "critical"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalPolicy:
    share_left: float = 1 / 3
    short_life_ns: int = 10 * DAY_NS
    """Up to this length a certificate counts as short-lived."""
    short_share_left: float = 1 / 2
    jitter_share: float = 0.05
    """Of a certificate's life: how much earlier than others it may be renewed."""
    retry: Backoff = RETRY
    shortest_share: float = 1 / 20
    """Of its life: how long a certificate is kept at least, whatever its authority suggests."""
    warn_left_ns: int = 14 * DAY_NS
    critical_left_ns: int = 3 * DAY_NS
    warn_share_left: float = 1 / 4
    """Of a life that is so short that it would warn from birth."""
    critical_share_left: float = 1 / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueNow:
    """Ask for it now."""

    why: Literal["requested", "renewal", "retry", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Nothing to ask for before a moment; None if never by itself."""

    code: str
    message: str
    until_ns: int | None = None


Decision = IssueNow | Rest


def renew_at_ns(
    status: CertificateStatus, policy: RenewalPolicy, *, suggested_ns: int | None = None
) -> int | None:
    """When a certificate should be replaced; None while there is none.

    The jitter comes from the certificate's fingerprint: every server, before and after a
    restart, works out the same moment. A suggestion after the certificate's end is none.
    """
    if not status.fingerprint or status.issued_at_ns is None or status.expires_at_ns is None:
        return None
    life_ns = status.expires_at_ns - status.issued_at_ns
    if suggested_ns is not None and suggested_ns < status.expires_at_ns:
        # One who suggests the past for every new certificate must not make us order without end.
        return max(suggested_ns, status.issued_at_ns + round(life_ns * policy.shortest_share))
    share = policy.short_share_left if life_ns <= policy.short_life_ns else policy.share_left
    jitter = int(status.fingerprint[:8], 16) / 2**32
    return status.expires_at_ns - round(life_ns * (share + policy.jitter_share * jitter))


def decide(
    spec: CertificateSpec,
    status: CertificateStatus,
    policy: RenewalPolicy,
    *,
    now_ns: int,
    suggested_ns: int | None = None,
) -> Decision:
    if spec.provider == IMPORTED:
        return Rest(code="IMPORTED", message="its owner renews an imported certificate")
    wait_ns = status.next_attempt_at_ns
    waiting = wait_ns is not None and now_ns < wait_ns
    match status.state:
        case CertificateState.PENDING | CertificateState.ISSUING | CertificateState.RENEWING:
            if waiting:
                return _backing_off(status)
            return IssueNow(why="requested" if wait_ns is None else "interrupted")
        case CertificateState.FAILED:
            if status.fingerprint and not spec.auto_renew:
                return Rest(code="FAILED", message=f"the renewal that was asked for failed: {status.error}")
            return _backing_off(status) if waiting else IssueNow(why="retry")
        case CertificateState.REVOKED:
            return Rest(code="REVOKED", message="it was revoked; renew it to get another")
        case CertificateState.ACTIVE | CertificateState.EXPIRED:
            return _when_active(spec, status, policy, now_ns=now_ns, suggested_ns=suggested_ns)


def _when_active(
    spec: CertificateSpec,
    status: CertificateStatus,
    policy: RenewalPolicy,
    *,
    now_ns: int,
    suggested_ns: int | None,
) -> Decision:
    moment_ns = renew_at_ns(status, policy, suggested_ns=suggested_ns)
    if not spec.auto_renew:
        return Rest(code="NOT_AUTOMATIC", message="it is renewed only when asked for")
    if moment_ns is None or now_ns >= moment_ns:
        return IssueNow(why="renewal")
    return Rest(code="VALID", message="it is valid for long enough", until_ns=moment_ns)


def _backing_off(status: CertificateStatus) -> Rest:
    return Rest(
        code="BACKING_OFF",
        message=f"tried {status.failures} times without success: {status.error or 'interrupted'}",
        until_ns=status.next_attempt_at_ns,
    )


def next_attempt_ns(failures: int, policy: RenewalPolicy, *, jitter: float, now_ns: int) -> int:
    """When to try again after this many failures in a row, from 1; `jitter` in [0, 1)."""
    return now_ns + round(policy.retry.delay_seconds(failures - 1, jitter=jitter) * NS)


# Expiry.


def alarm(status: CertificateStatus, policy: RenewalPolicy, *, now_ns: int) -> Alarm:
    """How worrying the time is that a certificate has left."""
    found = Alarm.NONE
    for moment_ns, level in _alarm_moments(status, policy):
        if now_ns >= moment_ns:
            found = level
    return found


def next_alarm_ns(status: CertificateStatus, policy: RenewalPolicy, *, now_ns: int) -> int | None:
    return next((moment_ns for moment_ns, _ in _alarm_moments(status, policy) if moment_ns > now_ns), None)


def _alarm_moments(status: CertificateStatus, policy: RenewalPolicy) -> tuple[tuple[int, Alarm], ...]:
    if not status.fingerprint or status.expires_at_ns is None:
        return ()
    end_ns = status.expires_at_ns
    life_ns = end_ns - (status.issued_at_ns if status.issued_at_ns is not None else 0)
    warn_ns = min(policy.warn_left_ns, round(life_ns * policy.warn_share_left))
    critical_ns = min(policy.critical_left_ns, round(life_ns * policy.critical_share_left))
    return (end_ns - warn_ns, Alarm.WARNING), (end_ns - critical_ns, Alarm.CRITICAL), (end_ns, Alarm.EXPIRED)
