"""Leases of providers as records, where several servers hear them.

On a database file leases are in memory (`providers.py`), and nothing of this is written. Servers that share a
database must agree on who holds a lease and who is silent, so that both are stored; the heartbeats themselves
are not, see `kernel/presence/last_seen.py`. Pure: functions of a draft.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.kinds import SCOPE
from fleetplane.domains.gpus.rules import GpuPolicy, HeldLease
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored: no field may be renamed."""

    silent: bool = False
    """It has run out, and its holder was not heard since."""
    expiries: int = 0


StoredLease = Resource[Nothing, LeaseStatus]
PROVIDER_LEASE: Kind[Nothing, LeaseStatus] = Kind(name="gpu-provider-lease", spec=Nothing, status=LeaseStatus)


def lease_key(provider: str) -> Key:
    return PROVIDER_LEASE.key(SCOPE, provider)


def status_of(lease: StoredLease) -> LeaseStatus:
    assert lease.status is not None, "a lease is never put without a status"
    return lease.status


def is_silent(lease: StoredLease | None) -> bool:
    return lease is not None and status_of(lease).silent


def revive(draft: Draft, provider: str) -> None:
    """Its holder was heard: a lease that had run out holds again."""
    lease = draft.get(PROVIDER_LEASE, SCOPE, provider)
    if lease is not None and is_silent(lease):
        status = msgspec.structs.replace(status_of(lease), silent=False)
        draft.put(PROVIDER_LEASE, SCOPE, provider, spec=lease.spec, status=status)


def expire(draft: Draft, provider: str, *, judged: int) -> bool:
    """The lease has run out, unless it was written since the revision that was judged."""
    lease = draft.get(PROVIDER_LEASE, SCOPE, provider)
    if lease is None or lease.revision != judged or is_silent(lease):
        return False
    status = LeaseStatus(silent=True, expiries=status_of(lease).expiries + 1)
    draft.put(PROVIDER_LEASE, SCOPE, provider, spec=lease.spec, status=status)
    return True


def grant(
    draft: Draft, provider: str, *, spoken: Collection[str], known: Collection[str], policy: GpuPolicy
) -> None:
    """A lease for a provider, in the place of another's if there are too many.

    `spoken` are those that have said something about a GPU; `known` those that may lose their lease here.
    """
    if draft.get(PROVIDER_LEASE, SCOPE, provider) is not None:
        revive(draft, provider)
        return
    held = [
        HeldLease(
            provider=lease.name,
            alive=not is_silent(lease),
            spoken=lease.name in spoken,
            heard_at_ns=lease.updated_at_ns,
        )
        for lease in draft.list(PROVIDER_LEASE, SCOPE)
    ]
    going = rules.giving_way(held, spoken=provider in spoken, policy=policy)
    if going:
        if going not in known:  # another server has granted it just now
            raise Unavailable("leases have changed meanwhile", hint="send the heartbeat again")
        draft.delete(PROVIDER_LEASE, SCOPE, going)
    draft.put(PROVIDER_LEASE, SCOPE, provider, spec=Nothing(), status=LeaseStatus())
