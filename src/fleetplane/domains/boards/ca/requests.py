"""Requests for certificates: made by operators, decided by administrators, kept for a while.

A private key is never made here for anybody: whoever wants a certificate has a key, and proves it by
signing the request. What is issued is recorded in the transaction that answers the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.domains.boards.ca import issued as certificates
from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.ca.issued import IssuedCertificates
from fleetplane.domains.boards.ca.rules import (
    CERTIFICATE_REQUEST,
    CertificateRequest,
    CertificateType,
    RequestSpec,
    RequestState,
    RequestStatus,
    request_status,
)
from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.kinds import (
    BOARD,
    CERTIFICATE,
    CLUSTER,
    SCOPE,
    BoardCertificateSpec,
    Certificate,
)
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, NotFound, ResourceExhausted
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.enrolment import proven_key
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.kernel.values.times import NS

PENDING_LIMIT = 1000
RETENTION_SECONDS = 2160 * 3600.0
"""After which what has ended is forgotten: ninety days."""
CLEAN_BATCH = 256


class CertificateRequests:
    def __init__(
        self,
        store: Store,
        authority: Authority,
        issued: IssuedCertificates,
        *,
        domains: Sequence[str] = ca_rules.DOMAINS,
    ) -> None:
        self._store = store
        self._authority = authority
        self._issued = issued
        self._domains = tuple(domains)
        self._numbers = Numbers(store, "certificate-request")

    def __repr__(self) -> str:
        return f"<CertificateRequests {len(self._store.list(CERTIFICATE_REQUEST, SCOPE))}>"

    def all(self) -> Sequence[CertificateRequest]:
        return sorted(self._store.list(CERTIFICATE_REQUEST, SCOPE), key=lambda one: int(one.name))

    def require(self, number: int) -> CertificateRequest:
        return _present(self._store.get(CERTIFICATE_REQUEST, SCOPE, str(number)), number)

    async def up_to_date(self) -> None:
        """Wait for what is being written, so that what is read next includes it."""
        await self._store.settled(CERTIFICATE_REQUEST)

    async def create(self, spec: RequestSpec, *, actor: str) -> CertificateRequest:
        """Written down for somebody to decide; refuses what could never be issued."""
        proven_key(spec.csr_pem)
        spec = ca_rules.checked(spec, self._domains)
        number = await self._numbers.take()

        def change(draft: Draft) -> CertificateRequest:
            if spec.board is not None and draft.get(BOARD, SCOPE, str(spec.board)) is None:
                raise NotFound(f"board {spec.board} is not known", field="node_id")
            if spec.cluster_id is not None and draft.get(CLUSTER, SCOPE, str(spec.cluster_id)) is None:
                raise NotFound(f"cluster {spec.cluster_id} is not known", field="cluster_id")
            waiting = sum(
                request_status(one).state is RequestState.PENDING
                for one in draft.list(CERTIFICATE_REQUEST, SCOPE)
            )
            if waiting >= PENDING_LIMIT:
                raise ResourceExhausted(f"{waiting} requests wait to be decided")
            self._numbers.record(draft, number)
            return draft.put(
                CERTIFICATE_REQUEST, SCOPE, str(number), spec=spec, status=RequestStatus(), expect=ABSENT
            )

        touches = [_key(number), self._numbers.key]
        done = await self._store.transact(
            change, actor=actor, action="boards.request_certificate", touches=touches
        )
        return done.value

    async def process(self, number: int, *, approve: bool, actor: str) -> CertificateRequest:
        """Issue what was asked for, or refuse it; either is said once."""
        request = self.require(number)
        _check_pending(request)
        if not approve:
            status = RequestStatus(state=RequestState.REJECTED, processed_by=actor)
            return await self._decide(number, status, actor=actor)
        try:
            key = proven_key(request.spec.csr_pem).key
            made = self._authority.issue_leaf(key, ca_rules.profile(request.spec, self._domains))
        except FleetplaneError as error:  # it was sound when it was made, and is not any more
            status = RequestStatus(
                state=RequestState.FAILED, processed_by=actor, failure_reason=error.message[:256]
            )
            return await self._decide(number, status, actor=actor)
        spec = certificates.described(made, board=request.spec.board, cluster_id=request.spec.cluster_id)
        certificate = await self._issued.numbers.take()
        status = RequestStatus(state=RequestState.APPROVED, processed_by=actor, certificate=certificate)
        return await self._decide(number, status, actor=actor, issued=(certificate, spec))

    async def renew(self, number: int, *, actor: str) -> Certificate:
        """Another certificate for the same key and names; the one before is good for its own time."""
        kept = self._issued.get(number)
        if kept is None:
            raise NotFound(f"certificate {number} is not known", field="id")
        if not certificates.is_standing(kept):
            raise FailedPrecondition(f"certificate {number} was revoked", details={"cause": "revoked"})
        if kept.spec.board is not None and kept.spec.auto_renew:
            raise FailedPrecondition(
                f"certificate {number} is that of board {kept.spec.board}, which renews it itself",
                details={"cause": "board"},
            )
        spec = self._again(kept.spec)
        fresh = await self._issued.numbers.take()

        def change(draft: Draft) -> Certificate:
            return self._issued.record(draft, fresh, spec)

        done = await self._store.transact(
            change, actor=actor, action="boards.renew_certificate", touches=self._issued.touches(fresh)
        )
        return done.value

    def _again(self, kept: BoardCertificateSpec) -> BoardCertificateSpec:
        leaf = x509.load_pem_x509_certificate(kept.pem.encode())
        key = leaf.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey)
        asked = RequestSpec(
            common_name=kept.common_name,
            type=CertificateType(kept.purpose),
            csr_pem="",
            requested_by="",
            sans=kept.sans,
            ext_key_usage=kept.ext_key_usage,
            validity_seconds=(kept.not_after_ns - kept.not_before_ns) / NS,
        )
        # Domains may have been set otherwise since: then it is not certified again.
        made = self._authority.issue_leaf(key, ca_rules.profile(asked, self._domains))
        return certificates.described(made, board=kept.board, cluster_id=kept.cluster_id)

    async def clean_up(self, *, now_ns: int, actor: str) -> int:
        """Forget certificates and requests that ended long ago; how many certificates."""
        before_ns = now_ns - round(RETENTION_SECONDS * NS)
        ended = [one for one in self._issued.all() if one.spec.not_after_ns < before_ns]
        for start in range(0, len(ended), CLEAN_BATCH):
            await self._forget(ended[start : start + CLEAN_BATCH], actor=actor)
        old = [
            one.key
            for one in self.all()
            if request_status(one).state is not RequestState.PENDING and one.updated_at_ns < before_ns
        ]

        def change(draft: Draft) -> None:
            for key in old:
                if draft.get(CERTIFICATE_REQUEST, SCOPE, key.name) is not None:
                    draft.delete(CERTIFICATE_REQUEST, SCOPE, key.name)

        if old:
            await self._store.transact(change, actor=actor, action="boards.clean_requests", touches=old)
        return len(ended)

    async def _forget(self, ended: Sequence[Certificate], *, actor: str) -> None:
        def change(draft: Draft) -> None:
            for one in ended:
                if draft.get(CERTIFICATE, SCOPE, one.name) is not None:
                    draft.release(CERTIFICATE, SCOPE, "serial", one.spec.serial, one.name)
                    draft.delete(CERTIFICATE, SCOPE, one.name)

        await self._store.transact(
            change, actor=actor, action="boards.clean_certificates", touches=[one.key for one in ended]
        )

    async def _decide(
        self,
        number: int,
        status: RequestStatus,
        *,
        actor: str,
        issued: tuple[int, BoardCertificateSpec] | None = None,
    ) -> CertificateRequest:
        def change(draft: Draft) -> CertificateRequest:
            request = _present(draft.get(CERTIFICATE_REQUEST, SCOPE, str(number)), number)
            _check_pending(request)
            if issued is not None:
                self._issued.record(draft, *issued)
            decided = RequestStatus(
                state=status.state,
                processed_at_ns=draft.now_ns,
                processed_by=status.processed_by,
                certificate=status.certificate,
                failure_reason=status.failure_reason,
            )
            return draft.put(CERTIFICATE_REQUEST, SCOPE, request.name, spec=request.spec, status=decided)

        touches = [_key(number), *(self._issued.touches(issued[0]) if issued is not None else ())]
        done = await self._store.transact(
            change, actor=actor, action=f"boards.certificate_request_{status.state}", touches=touches
        )
        return done.value


def _check_pending(request: CertificateRequest) -> None:
    state = request_status(request).state
    if state is not RequestState.PENDING:
        raise FailedPrecondition(f"request {request.name} was {state} already", details={"cause": state})


def _key(number: int) -> Key:
    return CERTIFICATE_REQUEST.key(SCOPE, str(number))


def _present(request: CertificateRequest | None, number: int) -> CertificateRequest:
    if request is None:
        raise NotFound(f"certificate request {number} is not known", field="id")
    return request
