"""The operators that have a certificate of ours, as records."""

from __future__ import annotations

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.credentials import PublicKey
from fleetplane.domains.instances.kinds import OPERATOR, OperatorRecord, tenant_scope
from fleetplane.kernel.identity import Issued
from fleetplane.kernel.store import Draft, Store


async def record_operator(
    store: Store, tenant: str, name: str, *, client: str, key: PublicKey, issued: Issued, action: str,
    actor: str,
) -> None:  # fmt: skip
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
        )
        draft.put(OPERATOR, scope, name, spec=spec)

    await store.transact(change, actor=actor, action=action, touches=[OPERATOR.key(scope, name)])
