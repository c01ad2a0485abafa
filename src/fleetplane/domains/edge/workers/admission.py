"""Which nodes may join the cluster as workers, and as what.

Each comes with a token that was made for its id, works once and is kept as a hash; or with the key
that it was let in with before, so that renewing its membership needs no new token. The token says which
role the node has and for which tenants it acts; what the node says itself must agree.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from functools import partial

import msgspec

from fleetplane.domains.edge.identity.challenges import EnrolmentCandidate
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import EnrolmentToken, NodeTokens, blacklist
from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    EVERY_TENANT,
    WORKER,
    WORKER_TOKEN,
    Worker,
    WorkerRole,
    WorkerSpec,
    WorkerToken,
    WorkerTokenSpec,
    check_tenant,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, InvalidArgument, PermissionDenied
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import check_uuid, new_uuid

SECRET_BYTES = 32
TOKEN_LIMIT_SECONDS = 7 * 86_400.0
ATTEMPTS = 3
"""At a transaction whose node was changed under it."""
SWEEP_BATCH = 256
TENANTS_LIMIT = 256
"""Of one worker; one that serves more serves all."""


class WorkerAdmission:
    def __init__(self, store: Store, clock: Clock, tokens: NodeTokens, policy: IdentityPolicy) -> None:
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._policy = policy

    # Operators.

    async def issue(
        self,
        node_id: str,
        *,
        role: WorkerRole = WorkerRole.WORKER,
        tenants: Sequence[str] = (),
        life_seconds: float,
        actor: str,
    ) -> str:
        """A token for one node; the only time it is shown."""
        node_id = check_uuid(node_id, field="node_id")
        for tenant in tenants:
            if tenant != EVERY_TENANT:
                check_tenant(tenant, field="tenants")
        if len(tenants) > TENANTS_LIMIT:
            raise InvalidArgument(f"at most {TENANTS_LIMIT} tenants, or {EVERY_TENANT!r}", field="tenants")
        if not 0 < life_seconds <= TOKEN_LIMIT_SECONDS:
            raise InvalidArgument(
                f"a worker's token lives up to {TOKEN_LIMIT_SECONDS:g} s", field="ttl_seconds"
            )
        token_id = new_uuid(self._clock)
        secret = self._clock.token_bytes(SECRET_BYTES).hex()
        now_ns = self._clock.now_ns()
        spec = WorkerTokenSpec(
            node_id=node_id,
            secret_hash=_hash(secret),
            issued_by=actor,
            issued_at_ns=now_ns,
            expires_at_ns=now_ns + round(life_seconds * 1e9),
            role=role,
            tenants=tuple(tenants),
        )
        await self._store.transact(
            lambda draft: draft.put(WORKER_TOKEN, "", token_id, spec=spec),
            actor=actor,
            action="edge.issue_worker_token",
            touches=[WORKER_TOKEN.key("", token_id)],
        )
        return f"{token_id}.{secret}"

    async def sweep(self, *, actor: str = "system/edge") -> int:
        """Forget tokens that have expired; how many."""
        now_ns = self._clock.now_ns()
        ended = [found.name for found in self._store.list(WORKER_TOKEN) if found.spec.expires_at_ns < now_ns]
        for start in range(0, len(ended), SWEEP_BATCH):
            names = ended[start : start + SWEEP_BATCH]
            await self._store.transact(
                partial(_forget, names=names),
                actor=actor,
                action="edge.sweep_worker_tokens",
                touches=[WORKER_TOKEN.key("", name) for name in names],
            )
        return len(ended)

    # Nodes.

    def check(self, candidate: EnrolmentCandidate) -> None:
        """Refuse at once who could not be admitted later; uses nothing up."""
        self._place(candidate)

    def _place(self, candidate: EnrolmentCandidate) -> tuple[WorkerRole, tuple[str, ...]]:
        """The role and tenants that a node was let in with, or is to be; refuses another role."""
        known = self._store.get(WORKER, "", candidate.node_id)
        if known is not None and known.spec.public_key == candidate.public_key:
            role, tenants = known.spec.role, known.spec.tenants
        else:
            record = self._store.get(WORKER_TOKEN, "", _token_id(candidate))
            self._check_token(candidate, record)
            assert record is not None
            role, tenants = record.spec.role, record.spec.tenants
        if candidate.role is not role:
            raise _denied(f"the node is a {role.value}, and not a {candidate.role}")
        return role, tenants

    def _check_token(self, candidate: EnrolmentCandidate, record: WorkerToken | None) -> None:
        if not candidate.enrolment_token:
            raise _denied("an enrolment token is required")
        found = record.spec if record is not None else None
        secret = candidate.enrolment_token.partition(".")[2]
        expected = found.secret_hash if found is not None else b"\0" * 32
        # The same work for tokens that do not exist, so that the time it takes tells nothing.
        right = hmac.compare_digest(_hash(secret), expected)
        if found is None or not right or found.node_id != candidate.node_id:
            raise _denied("the enrolment token is not good for this node")
        if found.redeemed_at_ns is not None:
            raise _denied("the enrolment token was used already")
        if found.expires_at_ns <= self._clock.now_ns():
            raise _denied("the enrolment token has expired")

    async def admit(self, candidate: EnrolmentCandidate) -> EnrolmentToken:
        """Use the token up, unless the key is known, and give the node one of its own."""
        for _ in range(ATTEMPTS):
            role, tenants = self._place(candidate)
            issued = self._tokens.issue_worker(
                candidate.node_id,
                role,
                candidate.public_key,
                capabilities=candidate.capabilities,
                tags=candidate.tags,
                life_seconds=self._policy.worker_token_seconds,
            )
            before = self._store.get(WORKER, "", candidate.node_id)
            touches = [WORKER.key("", candidate.node_id), WORKER_TOKEN.key("", _token_id(candidate))]
            if before is not None:
                touches.append(BLACKLISTED.key("", before.spec.token_id))
            try:
                await self._store.transact(
                    partial(
                        self._bind,
                        candidate=candidate,
                        issued=issued,
                        before=before,
                        role=role,
                        tenants=tenants,
                    ),
                    actor=f"worker/{candidate.node_id}",
                    action="edge.admit_worker",
                    touches=touches,
                )
            except Conflict:
                await self._store.settled(WORKER, "", candidate.node_id)
                continue
            return issued
        raise Conflict("the node is being admitted by someone else")

    def _bind(
        self,
        draft: Draft,
        *,
        candidate: EnrolmentCandidate,
        issued: EnrolmentToken,
        before: Worker | None,
        role: WorkerRole,
        tenants: tuple[str, ...],
    ) -> None:
        node_id = candidate.node_id
        current = draft.get(WORKER, "", node_id)
        if (current.spec.token_id if current else None) != (before.spec.token_id if before else None):
            raise Conflict("the node's token was replaced")
        rekeyed = current is None or current.spec.public_key != candidate.public_key
        if rekeyed:
            self._redeem(draft, candidate)
        if current is not None and rekeyed:
            # With its key unchanged the former token may live on for the calls that are under way.
            blacklist(
                draft,
                current.spec.token_id,
                node_id=node_id,
                reason="admitted again",
                expires_at_ns=current.spec.token_expires_at_ns,
            )
        spec = WorkerSpec(
            role=role,
            tenants=tenants,
            public_key=candidate.public_key,
            attested_at_ns=draft.now_ns,
            token_id=issued.jti,
            token_expires_at_ns=issued.expires_at_ns,
            capabilities=candidate.capabilities,
            tags=candidate.tags,
            grpc_address=candidate.grpc_address,
        )
        if current is not None:
            spec = msgspec.structs.replace(
                spec,
                registered_at_ns=current.spec.registered_at_ns,
                draining=current.spec.draining,
                grpc_address=candidate.grpc_address or current.spec.grpc_address,
            )
        draft.put(WORKER, "", node_id, spec=spec, status=current.status if current else None)

    def _redeem(self, draft: Draft, candidate: EnrolmentCandidate) -> None:
        record = draft.get(WORKER_TOKEN, "", _token_id(candidate))
        self._check_token(candidate, record)
        assert record is not None
        spec = msgspec.structs.replace(record.spec, redeemed_at_ns=draft.now_ns)
        draft.put(WORKER_TOKEN, "", record.name, spec=spec)


def _forget(draft: Draft, names: list[str]) -> None:
    for name in names:
        if draft.get(WORKER_TOKEN, "", name) is not None:
            draft.delete(WORKER_TOKEN, "", name)


def _token_id(candidate: EnrolmentCandidate) -> str:
    return candidate.enrolment_token.partition(".")[0] or "none"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _denied(why: str) -> PermissionDenied:
    return PermissionDenied(f"Cluster admission denied: {why}", hint="ask for an enrolment token")
