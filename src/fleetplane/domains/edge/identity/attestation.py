"""How a node comes in: it asks, signs a nonce, and shows why it may.

An edge daemon shows an enrollment token, which makes it its tenant's. A worker shows a token that was
made for it, or the key it was let in with before. Checking happens in an order that gives nothing
away for free: the signature, then the token, then one transaction that uses the token up, binds the
node to its tenant and writes down the token that it gets. Of any number who show one token, one wins.

A token is for a node that does not exist yet, or names the one it is for. A node's place is taken with
another key only by a token that says so, and a revoked node has no place until an operator readmits it:
enrolling never lifts a revocation.
"""

from __future__ import annotations

from functools import partial

import msgspec

from fleetplane.domains.edge.identity.challenges import (
    Challenge,
    Challenges,
    EnrolmentCandidate,
    SharedChallenges,
)
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import EnrollmentClaims, EnrolmentToken, NodeTokens, blacklist
from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    EDGE_NODE,
    ENROLLMENT,
    NODE_CLAIM,
    Desired,
    EdgeNode,
    NodeSpec,
    NodeState,
    NodeStatus,
    principal_name,
    tenant_scope,
)
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.workers.admission import WorkerAdmission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity.enrolment import Redemption, digest, redeem
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.rest.gateway import RestRate

PURPOSE = "edge-enrollment"
ATTEMPTS = 3
"""At a transaction whose node was changed under it."""


class DaemonEnrolment:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        tokens: NodeTokens,
        workers: WorkerAdmission,
        policy: IdentityPolicy,
        shared: SharedChallenges | None = None,
    ) -> None:
        """`shared` is there where machines may answer to another server than the one that they asked."""
        self._shared = shared
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._workers = workers
        self._policy = policy
        self.challenges = Challenges(clock, life_seconds=policy.challenge_seconds)
        limit = policy.attests_per_minute
        self._rate = RestRate(limit) if limit else None

    def __repr__(self) -> str:
        return f"<Enrolment {self.challenges!r}>"

    # Asking.

    def pay(self, address: str) -> None:
        """One more edge daemon asks from an address; refuses those who ask too often."""
        if self._rate is None:
            return
        allowance = self._rate.take(address, now=self._clock.monotonic())
        if not allowance.allowed:
            raise ResourceExhausted(
                f"at most {allowance.limit} edge daemons a minute may attest from one address",
                retry_after_seconds=allowance.reset_seconds,
            )

    async def attest(self, candidate: EnrolmentCandidate) -> Challenge:
        if candidate.role is not None:
            self._workers.check(candidate)
        made = self.challenges.make(candidate)
        if self._shared is not None:
            made.shared = True
            await self._shared.keep(made, life_seconds=self._policy.challenge_seconds)
        return made

    # Answering.

    async def answer(
        self, challenge_id: str, node_id: str, *, signature: bytes, enrollment_token: str | None
    ) -> EnrolmentToken:
        """The node's token, for a signed nonce and what proves that the node may come in."""
        self._look_elsewhere(challenge_id)
        challenge = self.challenges.attempt(challenge_id, node_id)
        candidate = challenge.candidate
        if not envelope.answers_challenge(
            signature,
            node_id,
            challenge_id,
            public_key=candidate.public_key,
            nonce=challenge.nonce,
            enrollment_token=enrollment_token or "",
        ):
            raise Unauthenticated(
                "the challenge was not signed with the key that was attested",
                details={"cause": "signature"},
            )
        async with challenge.lock:
            if challenge.answer is None or self._tokens.is_blacklisted(challenge.answer.jti):
                challenge.answer = await self._admit(candidate, enrollment_token)
            return challenge.answer

    def _look_elsewhere(self, challenge_id: str) -> None:
        """Take up a challenge that another server made."""
        if self._shared is None or self.challenges.knows(challenge_id):
            return
        found = self._shared.find(challenge_id)
        if found is None:
            return
        nonce, candidate, expires_at_ns = found
        seconds = (expires_at_ns - self._clock.now_ns()) / 1e9
        self.challenges.adopt(challenge_id, nonce=nonce, candidate=candidate, seconds=seconds)

    async def _admit(self, candidate: EnrolmentCandidate, enrollment_token: str | None) -> EnrolmentToken:
        if candidate.role is not None:
            return await self._workers.admit(candidate)
        if not enrollment_token:
            raise InvalidArgument(
                "an edge daemon must show an enrollment token", field="bootstrap_proof.enrollment_token"
            )
        claims = self._tokens.verify_enrollment(enrollment_token)
        for _ in range(ATTEMPTS):
            try:
                return await self._enrol(candidate, claims)
            except Conflict:  # its token was replaced meanwhile; look again
                await self._store.settled(EDGE_NODE, tenant_scope(claims.tenant), candidate.node_id)
        raise Conflict("the node is being enrolled or rotated by someone else")

    async def _enrol(self, candidate: EnrolmentCandidate, claims: EnrollmentClaims) -> EnrolmentToken:
        scope = tenant_scope(claims.tenant)
        issued = self._tokens.issue_node(
            candidate.node_id,
            claims.tenant,
            candidate.public_key,
            life_seconds=self._policy.node_token_seconds,
        )
        principal = principal_name(candidate.node_id)
        before = self._store.get(EDGE_NODE, scope, candidate.node_id)
        touches = [EDGE_NODE.key(scope, candidate.node_id), ENROLLMENT.key(scope, claims.jti)]
        if before is not None and before.spec.token_id:
            touches.append(BLACKLISTED.key("", before.spec.token_id))
        await self._store.transact(
            partial(self._bind, candidate=candidate, claims=claims, issued=issued, before=before),
            actor=principal,
            action=_action(before, candidate),
            touches=touches,
        )
        return issued

    def _bind(
        self,
        draft: Draft,
        *,
        candidate: EnrolmentCandidate,
        claims: EnrollmentClaims,
        issued: EnrolmentToken,
        before: EdgeNode | None,
    ) -> None:
        """Redeem, bind and record: all of it or nothing."""
        node_id, scope = candidate.node_id, tenant_scope(claims.tenant)
        again = _use_up(draft, candidate, claims) is Redemption.RETRY
        owner = draft.claimed_by(EDGE_NODE, "", NODE_CLAIM, node_id)
        if owner not in (None, scope):
            raise PermissionDenied(
                "the node belongs to another tenant", hint="revoke it there first, or give it another id"
            )
        current = draft.get(EDGE_NODE, scope, node_id)
        if (current.spec.token_id if current else None) != (before.spec.token_id if before else None):
            raise Conflict("the node's token was replaced")
        if again and not _holds(current, candidate):
            # It came in with this token once, and was put out or changed its key since.
            raise Unauthenticated(
                "the enrollment token was used already",
                hint="ask for a new token",
                details={"cause": "redeemed"},
            )
        check_invited(current, candidate, claims)
        if current is not None and current.spec.token_id:
            blacklist(
                draft,
                current.spec.token_id,
                node_id=node_id,
                reason="enrolled again",
                expires_at_ns=current.spec.token_expires_at_ns,
            )
        draft.claim(EDGE_NODE, "", NODE_CLAIM, node_id, scope)
        draft.put(
            EDGE_NODE,
            scope,
            node_id,
            spec=_spec(current, candidate, claims, issued, now_ns=draft.now_ns),
            status=_status(current, now_ns=draft.now_ns),
        )


def check_invited(current: EdgeNode | None, candidate: EnrolmentCandidate, claims: EnrollmentClaims) -> None:
    """Refuse a token that is not for this node as it is. Pure."""
    node_id = candidate.node_id
    if claims.node_id not in ("", node_id):
        raise PermissionDenied(
            f"the enrollment token is for node {claims.node_id}, and not for {node_id}",
            details={"cause": "node"},
        )
    if current is None:
        return
    if current.spec.revoked_at_ns is not None:
        raise PermissionDenied(
            f"node {node_id} was revoked; `fleetplane edge readmit {node_id}` lets it enrol again",
            details={"cause": "revoked"},
        )
    vacant = not current.spec.public_key and claims.node_id == node_id
    if vacant or current.spec.public_key == candidate.public_key or claims.replace:
        return
    raise PermissionDenied(
        f"node {node_id} exists with another key; taking its place needs a token made with "
        f"`fleetplane edge token --node {node_id} --replace`",
        details={"cause": "exists"},
    )


def _action(before: EdgeNode | None, candidate: EnrolmentCandidate) -> str:
    """As the audit log has it."""
    if before is None:
        return "edge.enrol"
    return "edge.enrol_again" if before.spec.public_key == candidate.public_key else "edge.replace"


def _use_up(draft: Draft, candidate: EnrolmentCandidate, claims: EnrollmentClaims) -> Redemption:
    scope = tenant_scope(claims.tenant)
    record = draft.get(ENROLLMENT, scope, claims.jti)
    if record is None or record.spec.revoked:
        raise Unauthenticated("the enrollment token was revoked", details={"cause": "revoked"})
    redemption = redeem(
        draft,
        purpose=PURPOSE,
        token_digest=digest(claims.jti),
        key_digest=digest(candidate.node_id.encode() + candidate.public_key),
        expires_at_ns=claims.expires_at_ns,
    )
    if record.spec.redeemed_at_ns is None:
        spec = msgspec.structs.replace(
            record.spec, redeemed_at_ns=draft.now_ns, redeemed_by=candidate.node_id
        )
        draft.put(ENROLLMENT, scope, claims.jti, spec=spec)
    return redemption


def _holds(current: EdgeNode | None, candidate: EnrolmentCandidate) -> bool:
    return (
        current is not None
        and current.spec.revoked_at_ns is None
        and current.spec.public_key == candidate.public_key
    )


def _spec(
    current: EdgeNode | None,
    candidate: EnrolmentCandidate,
    claims: EnrollmentClaims,
    issued: EnrolmentToken,
    *,
    now_ns: int,
) -> NodeSpec:
    """A machine that enrols again keeps its name and tags, and what it used up; nothing of its former key."""
    if current is None:
        return NodeSpec(
            display_name=claims.label,
            public_key=candidate.public_key,
            token_id=issued.jti,
            token_expires_at_ns=issued.expires_at_ns,
            enrolled_at_ns=now_ns,
        )
    spec = current.spec
    return msgspec.structs.replace(
        spec,
        display_name=claims.label or spec.display_name,
        public_key=candidate.public_key,
        previous_public_key=b"",
        previous_token_id="",
        previous_key_until_ns=0,
        earlier=(),
        key_version=spec.key_version + (spec.public_key != candidate.public_key),
        token_id=issued.jti,
        token_expires_at_ns=issued.expires_at_ns,
        enrolled_at_ns=now_ns,
        desired=Desired.ACTIVE,
    )


def _status(current: EdgeNode | None, *, now_ns: int) -> NodeStatus:
    if current is not None and current.status is not None:
        return current.status
    return NodeStatus(state=NodeState.DISCONNECTED, since_ns=now_ns)
