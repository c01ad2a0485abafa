from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.instances.certificates_rig import BOSS, Desk, controlled, desk, until

from fleetplane.domains.proxies.acme.controller import CertificateController
from fleetplane.domains.proxies.acme.issuers import SelfSigned, Suggestion
from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.acme.renewal import DAY_NS, HOUR_NS
from fleetplane.domains.proxies.kinds.records import CERTIFICATE
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.domains.proxies.serving.certificates import Material
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

S = CertificateState
STEP_SECONDS = 600.0
"""How finely these tests let time pass, so how exactly they can tell when something happened."""


class FakeAuthority:
    """Issues at once, or refuses with what it was told to say."""

    def __init__(self, clock: VirtualClock, *, days: float = 90) -> None:
        self.clock = clock
        self.press = SelfSigned(clock, days=days)
        self.refusal: Exception | None = None
        self.asked_ns: list[int] = []
        self.revoked: list[tuple[str, int]] = []
        self.suggested_ns: int | None = None
        self.suggestions_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.most_running = 0

    async def issue(self, domain: str, *, scope: str) -> Material:
        self.asked_ns.append(self.clock.now_ns())
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.gate.wait()
            if self.refusal is not None:
                raise self.refusal
            return await self.press.issue(domain)
        finally:
            self.running -= 1

    def asked(self, times: int) -> Callable[[], bool]:
        return lambda: len(self.asked_ns) >= times

    async def revoke(self, chain_pem: str, reason: int, *, scope: str) -> None:
        self.revoked.append((chain_pem, reason))

    async def suggestion(self, _chain_pem: str, *, scope: str) -> Suggestion:
        self.suggestions_asked += 1
        return Suggestion(at_ns=self.suggested_ns, ask_again_ns=self.clock.now_ns() + 6 * HOUR_NS)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def issuer(clock: VirtualClock) -> FakeAuthority:
    return FakeAuthority(clock)


@pytest.fixture
async def at(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Desk]:
    async with desk(tmp_path, clock) as opened:
        yield opened


async def passes(
    controller: CertificateController,
    clock: VirtualClock,
    condition: Callable[[], Any],
    *,
    at_most_days: float,
    skip_days: float = 0.0,
) -> None:
    """Let time pass until the condition holds; `skip_days` of it without looking closely."""
    end = clock.now_ns() + round(at_most_days * DAY_NS)
    await _quiet(controller)
    await clock.advance(skip_days * 86_400)
    while not condition():
        assert clock.now_ns() < end, "nothing happened in time"
        await clock.advance(STEP_SECONDS)
        await _quiet(controller)


async def _quiet(controller: CertificateController) -> None:
    """The database works in real time: no more may pass here while it is at work."""
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while controller.reconciler.statistics().running:
            await asyncio.sleep(0.0005)


async def test_a_certificate_is_issued_and_renewed_all_year_each_time_with_another_key(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        first = await at.reached(certificate, S.ACTIVE)
        seen = [first.fingerprint]
        for _ in range(3):
            before = at.status(certificate)
            assert before.expires_at_ns is not None
            await passes(controller, clock, issuer.asked(len(seen) + 1), skip_days=55, at_most_days=70)
            left_ns = before.expires_at_ns - issuer.asked_ns[-1]
            assert 30 * DAY_NS - HOUR_NS <= left_ns <= 30 * DAY_NS + 5 * DAY_NS
            renewed = await at.reached(certificate, S.ACTIVE)
            seen.append(renewed.fingerprint)
        assert len(set(seen)) == 4
        for fingerprint in seen:
            assert await at.vault.private_key(certificate.name, fingerprint), "older versions can be served"


async def test_a_failed_renewal_keeps_the_old_certificate_in_service_and_says_why(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        old = await at.reached(certificate, S.ACTIVE)
        version = at.workspaces.newest(at.scope)
        issuer.refusal = IssuanceFailed("urn:ietf:params:acme:error:unauthorized: 404 from 192.0.2.1")
        await passes(
            controller, clock, lambda: at.status(certificate).state is S.FAILED, skip_days=54, at_most_days=70
        )
        failed = at.status(certificate)
        assert (failed.fingerprint, failed.chain_pem) == (old.fingerprint, old.chain_pem)
        assert "unauthorized: 404 from 192.0.2.1" in failed.error
        assert at.workspaces.newest(at.scope) == version, "agents are not bothered"
        explained = await until(lambda: controller.reconciler.explain(certificate.name))
        assert explained.reasons[0].code == "BACKING_OFF"
        assert "404 from 192.0.2.1" in explained.reasons[0].message

        await passes(controller, clock, issuer.asked(5), at_most_days=4)
        waits = [(b - a) / HOUR_NS for a, b in zip(issuer.asked_ns[1:], issuer.asked_ns[2:], strict=False)]
        assert 1 <= waits[0] <= 2.3
        assert 2 <= waits[1] <= 4.3
        assert 4 <= waits[2] <= 8.3
        issuer.refusal = None
        await passes(controller, clock, at.is_in(certificate, S.ACTIVE), at_most_days=2)
        mended = at.status(certificate)
        assert mended.fingerprint != old.fingerprint
        assert (mended.error, mended.failures, mended.alarm) == ("", 0, "")


async def test_a_certificate_that_cannot_be_renewed_warns_at_fourteen_days_three_days_and_the_end(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        status = await at.reached(certificate, S.ACTIVE)
        assert status.expires_at_ns is not None
        issuer.refusal = IssuanceFailed("no")
        await passes(
            controller,
            clock,
            at.alarmed(certificate, "warning"),
            skip_days=54,
            at_most_days=77,
        )
        late_ns = clock.now_ns() - (status.expires_at_ns - 14 * DAY_NS)
        assert 0 <= late_ns <= 2 * STEP_SECONDS * NS
        await passes(controller, clock, at.alarmed(certificate, "critical"), at_most_days=12)
        await passes(controller, clock, at.alarmed(certificate, "expired"), at_most_days=4)
        assert clock.now_ns() - status.expires_at_ns <= 2 * STEP_SECONDS * NS
        assert at.status(certificate).alarmed_at_ns is not None


async def test_imported_certificates_are_watched_but_never_renewed(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    made = await SelfSigned(clock, days=30).issue("own.example.com")
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.certificates.bring(
            at.scope, None, made.chain_pem, made.key_pem.decode(), actor=BOSS
        )
        await until(lambda: controller.reconciler.explain(certificate.name))
        await passes(
            controller,
            clock,
            at.alarmed(certificate, "warning"),
            skip_days=20,
            at_most_days=24,
        )
        assert at.status(certificate).state is S.ACTIVE
        assert issuer.asked_ns == []


async def test_a_crash_while_issuing_counts_as_a_failure(
    tmp_path: Path, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    issuer.gate.clear()
    async with desk(tmp_path, clock) as at, controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        await at.reached(certificate, S.ISSUING)
        await until(lambda: issuer.running)
    issuer.gate.set()
    async with desk(tmp_path, clock) as at, controlled(at, {"letsencrypt": issuer}) as controller:
        found = await until(lambda: controller.reconciler.explain(certificate.name))
        assert found.reasons[0].code == "BACKING_OFF"
        assert len(issuer.asked_ns) == 1
        await passes(controller, clock, issuer.asked(2), at_most_days=0.2)
        await at.reached(certificate, S.ACTIVE)


async def test_asking_for_renewal_does_not_wait_for_the_back_off(at: Desk, issuer: FakeAuthority) -> None:
    issuer.refusal = IssuanceFailed("no")
    async with controlled(at, {"letsencrypt": issuer}):
        certificate = await at.request("example.com")
        await at.reached(certificate, S.FAILED)
        issuer.refusal = None
        await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
        first = await at.reached(certificate, S.ACTIVE)
        await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
        await until(lambda: at.status(certificate).fingerprint != first.fingerprint)
        assert len(issuer.asked_ns) == 3


async def test_a_certificate_that_is_deleted_while_it_is_issued_stays_deleted(
    at: Desk, issuer: FakeAuthority
) -> None:
    issuer.gate.clear()
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        await until(lambda: issuer.running)
        await at.certificates.delete(at.scope, certificate.name, if_match=None, actor=BOSS)
        issuer.gate.set()
        await until(lambda: not issuer.running and not controller.reconciler.statistics().running)
        assert not at.store.list(CERTIFICATE, at.scope)
        assert await at.store.secret_names("proxies/certificate/") == []


async def test_no_more_than_two_orders_run_at_a_time(at: Desk, issuer: FakeAuthority) -> None:
    issuer.gate.clear()
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        made = [await at.request(f"site-{number}.example.com") for number in range(5)]
        await until(lambda: issuer.running == 2 and controller.reconciler.statistics().queued >= 3)
        issuer.gate.set()
        for certificate in made:
            await at.reached(certificate, S.ACTIVE)
        assert issuer.most_running == 2


async def test_the_authority_is_followed_when_it_wants_renewal_early(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    issuer.suggested_ns = clock.now_ns() + 5 * DAY_NS
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        await at.reached(certificate, S.ACTIVE)
        await passes(controller, clock, issuer.asked(2), at_most_days=6)
        assert issuer.asked_ns[1] - issuer.suggested_ns <= HOUR_NS
        assert 5 <= issuer.suggestions_asked <= 30, "asked as rarely as it wants to be"
        issuer.suggested_ns = None


async def test_a_revoked_certificate_is_not_renewed_by_itself_but_when_asked_for(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        with pytest.raises(FailedPrecondition):
            await controller.revoke(
                at.scope, (await at.request("x.example.com", provider="selfsigned")).name, actor=BOSS
            )
        old = await at.reached(certificate, S.ACTIVE)
        await controller.revoke(at.scope, certificate.name, reason=1, actor=BOSS)
        assert issuer.revoked == [(old.chain_pem, 1)]
        assert at.status(certificate).state is S.REVOKED
        await clock.advance(100 * 86_400)
        await _quiet(controller)
        assert len(issuer.asked_ns) == 1
        await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
        assert (await at.reached(certificate, S.ACTIVE)).fingerprint != old.fingerprint


async def test_a_defect_is_reported_as_a_failure_and_not_repeated_at_once(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    issuer.refusal = ZeroDivisionError("oops")
    async with controlled(at, {"letsencrypt": issuer}) as controller:
        certificate = await at.request("example.com")
        assert "ZeroDivisionError: oops" in (await at.reached(certificate, S.FAILED)).error
        await until(lambda: controller.reconciler.statistics().failures == 1)
        await clock.advance(1800)
        assert len(issuer.asked_ns) == 1


async def test_every_failure_is_an_event_of_its_own(
    at: Desk, clock: VirtualClock, issuer: FakeAuthority
) -> None:
    issuer.refusal = IssuanceFailed("no")
    async with at.store.watch(CERTIFICATE) as watch, controlled(at, {"letsencrypt": issuer}) as controller:
        await at.reached(await at.request("example.com"), S.FAILED)
        await passes(controller, clock, issuer.asked(3), at_most_days=1)
        states: list[str] = []
        async with asyncio.timeout(60):
            while states.count(S.FAILED) < 3:
                batch = await watch.next(idle_seconds=0.05)
                states += [event.resource.status.state for event in batch.events if event.resource.status]
    assert states == [S.PENDING, *([S.ISSUING, S.FAILED] * 3)]
