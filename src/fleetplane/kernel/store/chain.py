"""The audit chain's key: that the chain was made with it, and how an older chain comes under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.store.draft import Draft
from fleetplane.kernel.store.engine import Engine

if TYPE_CHECKING:
    from fleetplane.kernel.store.store import Store

log = structlog.get_logger(__name__)

KEYED = "audit.keyed"
"""The first entry under a key, of a chain that began without: it names every secret with its digest, which
entries before it did not have."""


async def adopt(engine: Engine, store: Store, key: bytes) -> None:
    """Make sure that the chain ends under this key, or bring it there; refuse one of another key."""
    head = store.audit_head()
    if head.seq == 0:
        return
    last, before = await engine.audit_row(head.seq), await engine.audit_row(head.seq - 1)
    previous = audit.GENESIS if head.seq == 1 else None if before is None else before.hash
    if last is None or previous is None:
        raise IntegrityError(f"the end of the audit log is missing, at entry {head.seq}")
    if audit.link(previous, last.entry, key) == last.hash:
        return
    if audit.link(previous, last.entry) != last.hash:
        raise IntegrityError(
            "the audit log was not made with this master key",
            hint="start with the master key that this data directory was made with",
        )
    log.warning("audit.keyed", entries=head.seq)
    held = {name: await engine.secret(name) for name in await engine.secret_names("")}

    def change(draft: Draft) -> None:
        for name, blob in held.items():
            if blob is not None:
                draft.put_secret(name, blob)

    if held:  # else the next entry, whatever it is, begins the keyed chain
        await store.transact(change, actor="system", action=KEYED, touches=())
