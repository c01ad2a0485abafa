"""The operators that have a certificate of ours, and the nonces for those that have none yet, as records."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.credentials import PublicKey
from fleetplane.domains.instances.kinds import (
    NONCE,
    OPERATOR,
    OperatorNonce,
    OperatorRecord,
    tenant_scope,
)
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.identity import IssuedCertificate
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store, transact_found

NONCES_LIMIT = 1000
"""Nonces of one tenant that are good at once; each is for one operator."""


async def record_operator(
    store: Store,
    tenant: str,
    name: str,
    *,
    client: str,
    key: PublicKey,
    issued: IssuedCertificate,
    action: str,
    actor: str,
) -> None:
    """Write down which certificate an operator has now; when it came first stays as it was."""
    scope = tenant_scope(tenant)

    def change(draft: Draft) -> None:
        found = draft.get(OPERATOR, scope, name)
        spec = OperatorRecord(
            client=client,
            key_digest=credentials.key_digest(key),
            certificate_serial=str(issued.serial),
            registered_at_ns=found.spec.registered_at_ns if found is not None else draft.now_ns,
            expires_at_ns=round(issued.not_after.timestamp() * 1e9),
            authority=issued.issuer_key_id,
        )
        draft.put(OPERATOR, scope, name, spec=spec)

    await store.transact(change, actor=actor, action=action, touches=[OPERATOR.key(scope, name)])


async def record_nonce(store: Store, tenant: str, nonce_id: str, *, life_seconds: float, actor: str) -> None:
    """Write down that a nonce is handed out, before it is; those that have run out are forgotten."""
    scope = tenant_scope(tenant)

    def every(reader: Store | Draft) -> Sequence[Key]:
        return [found.key for found in reader.list(NONCE, scope)]

    def change(draft: Draft, known: Sequence[Key]) -> None:
        found = draft.list(NONCE, scope)
        over = [one.name for one in found if one.spec.expires_at_ns <= draft.now_ns]
        if len(known) - len(over) >= NONCES_LIMIT:
            raise ResourceExhausted(f"{NONCES_LIMIT} nonces of tenant {tenant!r} have not run out yet")
        for name in over:
            draft.delete(NONCE, scope, name)
        spec = OperatorNonce(
            issued_by=actor,
            issued_at_ns=draft.now_ns,
            expires_at_ns=draft.now_ns + round(life_seconds * 1e9),
        )
        draft.put(NONCE, scope, nonce_id, spec=spec)

    await transact_found(
        store,
        every,
        change,
        actor=actor,
        action="instances.create_nonce",
        touches=[NONCE.key(scope, nonce_id)],
    )
