from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.proxies.acme.renewal import (
    DAY_NS,
    HOUR_NS,
    Alarm,
    IssueNow,
    RenewalPolicy,
    Rest,
    alarm,
    decide,
    next_alarm_ns,
    next_attempt_ns,
    renew_at_ns,
)
from fleetplane.domains.proxies.kinds.records import CertificateSpec, CertificateStatus
from fleetplane.domains.proxies.kinds.values import CertificateState

POLICY = RenewalPolicy()
EXACT = RenewalPolicy(jitter_share=0.0)
SPEC = CertificateSpec(domain="example.com", provider="letsencrypt", auto_renew=True)
BY_HAND = msgspec.structs.replace(SPEC, auto_renew=False)
START = 1_800_000_000_000_000_000
S = CertificateState


def issued(days: float, *, fingerprint: str = "00" * 32, state: S = S.ACTIVE) -> CertificateStatus:
    return CertificateStatus(
        state=state,
        fingerprint=fingerprint,
        issued_at_ns=START,
        expires_at_ns=START + round(days * DAY_NS),
    )


def test_what_was_requested_is_issued_at_once() -> None:
    assert decide(SPEC, CertificateStatus(state=S.PENDING), POLICY, now_ns=START) == IssueNow(why="requested")


@pytest.mark.parametrize(
    ("days", "after_days"), [(90, 60), (365, 365 * 2 / 3), (10, 5), (6, 3), (10.1, 10.1 * 2 / 3)]
)
def test_a_certificate_is_renewed_with_a_third_of_its_life_left_or_half_of_a_short_one(
    days: float, after_days: float
) -> None:
    status, moment = issued(days), START + round(after_days * DAY_NS)
    assert renew_at_ns(status, EXACT) == pytest.approx(moment, abs=10)
    assert isinstance(decide(SPEC, status, EXACT, now_ns=moment - HOUR_NS), Rest)
    assert decide(SPEC, status, EXACT, now_ns=moment + 10) == IssueNow(why="renewal")


@given(fingerprint=st.binary(min_size=32, max_size=32), days=st.floats(min_value=0.01, max_value=3650))
def test_jitter_only_ever_renews_earlier_and_always_the_same_for_one_certificate(
    fingerprint: bytes, days: float
) -> None:
    status = issued(days, fingerprint=fingerprint.hex())
    exact, jittered = renew_at_ns(status, EXACT), renew_at_ns(status, POLICY)
    assert exact is not None
    assert jittered is not None
    assert exact - round(days * DAY_NS * POLICY.jitter_share) - 2 <= jittered <= exact
    assert jittered == renew_at_ns(status, POLICY)
    assert jittered > START


def test_different_certificates_are_renewed_at_different_moments() -> None:
    moments = {renew_at_ns(issued(90, fingerprint=f"{n:02x}" * 32), POLICY) for n in range(0, 256, 16)}
    assert len(moments) == 16


def test_the_moment_that_the_authority_suggests_wins() -> None:
    status, early = issued(90), START + 5 * DAY_NS
    assert decide(SPEC, status, POLICY, now_ns=early, suggested_ns=early) == IssueNow(why="renewal")
    late = START + 80 * DAY_NS
    resting = decide(SPEC, status, POLICY, now_ns=START + 70 * DAY_NS, suggested_ns=late)
    assert isinstance(resting, Rest)
    assert resting.until_ns == late


def test_a_suggestion_after_the_end_is_not_followed() -> None:
    status = issued(90)
    assert renew_at_ns(status, EXACT, suggested_ns=START + 91 * DAY_NS) == renew_at_ns(status, EXACT)


def test_a_suggestion_of_the_past_does_not_replace_a_certificate_that_was_just_issued() -> None:
    resting = decide(SPEC, issued(90), POLICY, now_ns=START + HOUR_NS, suggested_ns=START - DAY_NS)
    assert isinstance(resting, Rest)
    assert resting.until_ns == START + 4.5 * DAY_NS


def test_nothing_is_renewed_that_should_not_be() -> None:
    status, late = issued(90), START + 89 * DAY_NS
    imported = msgspec.structs.replace(SPEC, provider="imported")
    revoked = msgspec.structs.replace(status, state=S.REVOKED)
    decisions = [
        decide(BY_HAND, status, POLICY, now_ns=late),
        decide(imported, status, POLICY, now_ns=late),
        decide(SPEC, revoked, POLICY, now_ns=late),
    ]
    assert [one.code for one in decisions if isinstance(one, Rest)] == [
        "NOT_AUTOMATIC",
        "IMPORTED",
        "REVOKED",
    ]


@pytest.mark.parametrize("state", [S.PENDING, S.ISSUING, S.RENEWING, S.FAILED])
def test_nobody_is_asked_again_before_the_back_off_is_over(state: S) -> None:
    status = CertificateStatus(state=state, failures=1, next_attempt_at_ns=START + HOUR_NS, error="no")
    resting = decide(SPEC, status, POLICY, now_ns=START)
    assert isinstance(resting, Rest)
    assert (resting.code, resting.until_ns) == ("BACKING_OFF", START + HOUR_NS)
    assert isinstance(decide(SPEC, status, POLICY, now_ns=START + HOUR_NS), IssueNow)


def test_a_failed_renewal_by_hand_waits_for_the_next_hand() -> None:
    status = issued(90, state=S.FAILED)
    assert decide(SPEC, status, POLICY, now_ns=START) == IssueNow(why="retry")
    assert isinstance(decide(BY_HAND, status, POLICY, now_ns=START), Rest)
    never_had = CertificateStatus(state=S.FAILED)
    assert decide(BY_HAND, never_had, POLICY, now_ns=START) == IssueNow(why="retry"), (
        "the first one is wanted"
    )


@given(failures=st.integers(min_value=1, max_value=1000), jitter=st.floats(min_value=0, max_value=0.999))
def test_the_back_off_lies_between_an_hour_and_a_day(failures: int, jitter: float) -> None:
    wait = next_attempt_ns(failures, POLICY, jitter=jitter, now_ns=0)
    assert HOUR_NS <= wait <= 24 * HOUR_NS
    assert next_attempt_ns(failures + 1, POLICY, jitter=jitter, now_ns=0) >= wait


def test_alarms_get_worse_at_their_thresholds() -> None:
    status = issued(90)
    levels = {left: alarm(status, POLICY, now_ns=START + (90 - left) * DAY_NS) for left in (15, 14, 4, 3, 0)}
    assert levels == {
        15: Alarm.NONE,
        14: Alarm.WARNING,
        4: Alarm.WARNING,
        3: Alarm.CRITICAL,
        0: Alarm.EXPIRED,
    }


def test_a_certificate_that_lives_six_days_does_not_warn_before_it_should_have_been_renewed() -> None:
    status = issued(6)
    renewal = renew_at_ns(status, POLICY)
    first = next_alarm_ns(status, POLICY, now_ns=START)
    assert renewal is not None
    assert first is not None
    assert renewal < first
    assert alarm(status, POLICY, now_ns=first) is Alarm.WARNING


def test_the_next_alarm_is_the_next_moment_that_something_gets_worse() -> None:
    status, seen, now = issued(90), [], START
    while (moment := next_alarm_ns(status, POLICY, now_ns=now)) is not None:
        seen.append(alarm(status, POLICY, now_ns=moment))
        now = moment
    assert seen == [Alarm.WARNING, Alarm.CRITICAL, Alarm.EXPIRED]
    assert next_alarm_ns(CertificateStatus(state=S.PENDING), POLICY, now_ns=START) is None
