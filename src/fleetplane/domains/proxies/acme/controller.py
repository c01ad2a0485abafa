"""Keeping certificates as they should be: there, valid for long enough, and complained about if not.

Looks at one certificate at a time and does what `renewal` decides. Whatever goes wrong, the
certificate that is there stays in service; what went wrong is in its status, in the events that
follow from it, and here for whoever asks why nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from fleetplane.domains.proxies.acme import renewal
from fleetplane.domains.proxies.acme.issuers import Issuer, Suggestion
from fleetplane.domains.proxies.acme.orders import ACTOR, TEXT_LIMIT, IssuanceFailed
from fleetplane.domains.proxies.acme.renewal import Alarm, Decision, IssueNow, RenewalPolicy, Rest
from fleetplane.domains.proxies.kinds.records import (
    CERTIFICATE,
    ID_CLAIM,
    VIRTUAL_HOST,
    Certificate,
    CertificateStatus,
)
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.domains.proxies.serving import certificates as binding
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet import freeze as freezing
from fleetplane.fleet.freeze import FROZEN, Freezes
from fleetplane.kernel.access import covers
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, NotFound
from fleetplane.kernel.events import EventType
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

CONCURRENCY = 2
"""Orders at a time, for the whole server: authorities count, and a fleet is not in a hurry."""
CHECK_SECONDS = 3600.0
"""However far the next moment is: the wall clock may have been put right meanwhile."""
ASK_AGAIN_NS = 6 * renewal.HOUR_NS
"""After an authority could not be asked when to renew."""

Change = Callable[[CertificateStatus, int], CertificateStatus]
"""From a status and the moment of the transaction to the next status."""


class CertificateController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        workspaces: Workspaces,
        certificates: Certificates,
        issuers: Mapping[str, Issuer],
        policy: RenewalPolicy,
        agents_name_workspace: bool = False,
    ) -> None:
        """`issuers` by the name of the provider that a certificate is requested from.

        `agents_name_workspace`: agents that pass challenges on say whose they are.
        """
        self._agents_name_workspace = agents_name_workspace
        self._store = store
        self._clock = clock
        self._workspaces = workspaces
        self._certificates = certificates
        self._issuers = dict(issuers)
        self._policy = policy
        self._freezes = Freezes(store, clock)
        self._suggestions: dict[str, tuple[str, Suggestion]] = {}
        """By certificate: of which fingerprint, and what was said."""
        self.reconciler = Reconciler(
            "proxies/certificates", self._look, clock=clock, store=store, concurrency=CONCURRENCY
        )

    def __repr__(self) -> str:
        return f"<CertificateController issuers={' '.join(sorted(self._issuers))}>"

    async def run(self) -> None:
        """Until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("certificates/reconcile", self.reconciler.run)
            tasks.keep("certificates/follow", self._follow)
            tasks.keep("certificates/freezes", partial(self._freezes.follow, self._thaw))

    def _thaw(self, scope: str) -> None:
        """A freeze was set or lifted: look at the certificates that it concerns."""
        for certificate in self._store.list(CERTIFICATE):
            if covers(scope, certificate.scope):
                self.reconciler.enqueue(certificate.name)

    async def _follow(self) -> None:
        async with self._store.watch(CERTIFICATE) as watch:
            for certificate in self._store.list(CERTIFICATE):
                self.reconciler.enqueue(certificate.name)
            async for batch in watch:
                for event in batch.events:
                    if event.type is EventType.DELETED:
                        self._suggestions.pop(event.resource.name, None)
                        self.reconciler.forget(event.resource.name)
                    else:
                        self.reconciler.enqueue(event.resource.name)

    # Looking.

    async def _look(self, identity: str) -> PassResult:
        certificate = self._find(identity)
        if certificate is None or certificate.status is None:
            return PassResult()
        suggestion = await self._suggestion(certificate)
        decision = self._decide(certificate, suggestion)
        if isinstance(decision, IssueNow):
            await self._issue(certificate, decision)
            certificate = self._find(identity)
            if certificate is None:
                return PassResult()
            decision = self._decide(certificate, None)
        if isinstance(decision, IssueNow):  # someone asked for another one meanwhile
            return PassResult(requeue_after_seconds=0.0)
        await self._note_alarm(certificate)
        return self._result(certificate, decision, suggestion)

    def _find(self, identity: str) -> Certificate | None:
        scope = self._store.claimed_by(CERTIFICATE, "", ID_CLAIM, identity)
        return self._store.get(CERTIFICATE, scope, identity) if scope is not None else None

    def _decide(self, certificate: Certificate, suggestion: Suggestion | None) -> Decision:
        assert certificate.status is not None
        decision = renewal.decide(
            certificate.spec,
            certificate.status,
            self._policy,
            now_ns=self._clock.now_ns(),
            suggested_ns=suggestion.at_ns if suggestion is not None else None,
        )
        if isinstance(decision, IssueNow) and certificate.spec.provider not in self._issuers:
            return Rest(code="NO_ISSUER", message=f"nobody here issues for {certificate.spec.provider}")
        freeze = self._freezes.holding("proxies", certificate.scope)
        if isinstance(decision, IssueNow) and freeze is not None:
            return Rest(code=FROZEN, message=freezing.message(freeze), until_ns=freeze.spec.expires_at_ns)
        return decision

    def _result(self, certificate: Certificate, rest: Rest, suggestion: Suggestion | None) -> PassResult:
        assert certificate.status is not None
        now_ns = self._clock.now_ns()
        moments = (
            rest.until_ns,
            renewal.next_alarm_ns(certificate.status, self._policy, now_ns=now_ns),
            suggestion.ask_again_ns if suggestion is not None else None,
        )
        ahead = [(moment - now_ns) / NS for moment in moments if moment is not None]
        reasons = () if rest.code == "VALID" else (Reason(code=rest.code, message=rest.message),)
        return PassResult(explanation=reasons, requeue_after_seconds=max(0.0, min([CHECK_SECONDS, *ahead])))

    async def _suggestion(self, certificate: Certificate) -> Suggestion | None:
        """What the authority says about renewal, asked for as rarely as it wants to be."""
        status = certificate.status
        issuer = self._issuers.get(certificate.spec.provider)
        if issuer is None or status is None or not certificate.spec.auto_renew:
            return None
        if status.state is not CertificateState.ACTIVE or not status.fingerprint:
            return None
        of, known = self._suggestions.get(certificate.name, ("", None))
        if known is not None and of == status.fingerprint and self._clock.now_ns() < known.ask_again_ns:
            return known
        try:
            found = await issuer.suggestion(status.chain_pem, scope=certificate.scope)
        except IssuanceFailed as error:
            log.info("certificates.no_suggestion", certificate=certificate.name, error=error.message)
            found = Suggestion(at_ns=None, ask_again_ns=self._clock.now_ns() + ASK_AGAIN_NS)
        if found is not None:
            self._suggestions[certificate.name] = (status.fingerprint, found)
        return found

    # Issuing.

    async def _issue(self, certificate: Certificate, decision: IssueNow) -> None:
        about = {"certificate": certificate.name, "domain": certificate.spec.domain}
        jitter = self._clock.random()

        def begin(status: CertificateStatus, now_ns: int) -> CertificateStatus:
            failures = status.failures + 1
            state = CertificateState.RENEWING if status.fingerprint else CertificateState.ISSUING
            again_ns = renewal.next_attempt_ns(failures, self._policy, jitter=jitter, now_ns=now_ns)
            return msgspec.structs.replace(
                status, state=state, failures=failures, next_attempt_at_ns=again_ns
            )

        await self._change(certificate, begin, "certificate.begin")
        log.info("certificates.issuing", why=decision.why, **about)
        try:
            self._certificates.require_unbound(certificate)
            if not self._agents_name_workspace:
                binding.require_own(certificate, self._store.list(VIRTUAL_HOST))
            found = await self._issuers[certificate.spec.provider].issue(
                certificate.spec.domain, scope=certificate.scope
            )
            await self._certificates.issued(certificate.scope, certificate.name, found, actor=ACTOR)
        except NotFound:
            log.info("certificates.deleted_meanwhile", **about)
        except FleetplaneError as error:
            advice = f" ({error.advice})" if error.advice else ""
            await self._fail(certificate, error.message + advice)
        except Exception as error:  # a defect, which the reconciler reports; the status has to know too
            await self._fail(certificate, f"{type(error).__name__}: {error}")
            raise
        else:
            log.info("certificates.issued", fingerprint=found.fingerprint, **about)

    async def _fail(self, certificate: Certificate, error: str) -> None:
        jitter = self._clock.random()

        def fail(status: CertificateStatus, now_ns: int) -> CertificateStatus:
            failures = max(1, status.failures)  # someone may have asked anew, and set it to none
            again_ns = renewal.next_attempt_ns(failures, self._policy, jitter=jitter, now_ns=now_ns)
            return msgspec.structs.replace(
                status,
                state=CertificateState.FAILED,
                error=error[:TEXT_LIMIT],
                failures=failures,
                next_attempt_at_ns=again_ns,
            )

        log.warning(
            "certificates.failed", certificate=certificate.name, domain=certificate.spec.domain, error=error
        )
        await self._change(certificate, fail, "certificate.fail")

    async def revoke(self, scope: str, identity: str, *, reason: int = 0, actor: str) -> Certificate:
        """Tell the world not to trust it any more. It is served until it is renewed or replaced."""
        certificate = self._certificates.get(scope, identity)
        status = certificate.status
        issuer = self._issuers.get(certificate.spec.provider)
        if status is None or not status.fingerprint or issuer is None:
            raise FailedPrecondition("there is nothing here that could be revoked")
        await issuer.revoke(status.chain_pem, reason, scope=scope)

        def revoked(current: CertificateStatus, _now_ns: int) -> CertificateStatus:
            if current.fingerprint != status.fingerprint:
                return current  # renewed meanwhile: the new one is good
            return msgspec.structs.replace(
                current, state=CertificateState.REVOKED, failures=0, next_attempt_at_ns=None
            )

        await self._change(certificate, revoked, "certificate.revoke", actor=actor)
        return self._certificates.get(scope, identity)

    async def _note_alarm(self, certificate: Certificate) -> None:
        status = certificate.status
        assert status is not None
        level = renewal.alarm(status, self._policy, now_ns=self._clock.now_ns())
        if level == status.alarm:
            return

        def note(current: CertificateStatus, now_ns: int) -> CertificateStatus:
            if current.fingerprint != status.fingerprint:
                return current
            at_ns = now_ns if level is not Alarm.NONE else None
            return msgspec.structs.replace(current, alarm=level.value, alarmed_at_ns=at_ns)

        if level is not Alarm.NONE:
            log.warning(
                "certificates.expiring",
                certificate=certificate.name,
                domain=certificate.spec.domain,
                alarm=level.value,
                error=status.error,
            )
        await self._change(certificate, note, "certificate.alarm")

    async def _change(
        self, certificate: Certificate, change: Change, action: str, *, actor: str = ACTOR
    ) -> None:
        scope, identity = certificate.scope, certificate.name

        def apply(draft: Draft) -> None:
            current = draft.get(CERTIFICATE, scope, identity)
            if current is not None and current.status is not None:
                status = change(current.status, draft.now_ns)
                draft.put(CERTIFICATE, scope, identity, spec=current.spec, status=status)

        async with self._workspaces.editing(scope):
            await self._store.transact(
                apply, actor=actor, action=action, touches=[CERTIFICATE.key(scope, identity)]
            )
