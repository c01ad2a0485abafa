"""The revisioned store: transactions, claims, the memory view and watches over one database."""

from fleetplane.kernel.store.commit_hooks import CommitHook, HookedChange
from fleetplane.kernel.store.draft import ABSENT, Committed, Draft, Expect, UndeclaredChange
from fleetplane.kernel.store.engine import Claim
from fleetplane.kernel.store.following import follow
from fleetplane.kernel.store.settings import StoreSettings, StoreStatistics
from fleetplane.kernel.store.store import Store
from fleetplane.kernel.store.transaction import Delete, Put, ReleaseClaim, Take, Transaction, transact_found

__all__ = [
    "ABSENT",
    "Claim",
    "CommitHook",
    "Committed",
    "Delete",
    "Draft",
    "Expect",
    "HookedChange",
    "Put",
    "ReleaseClaim",
    "Store",
    "StoreSettings",
    "StoreStatistics",
    "Take",
    "Transaction",
    "UndeclaredChange",
    "follow",
    "transact_found",
]
