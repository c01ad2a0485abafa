"""Level-triggered controllers: a queue of keys, one owner by lease, and why nothing happens."""

from fleetplane.kernel.reconcile.explanation import Explanation, Explanations, PassResult, Reason
from fleetplane.kernel.reconcile.lease import LEASE, Lease, LeaseLost, LeaseSpec
from fleetplane.kernel.reconcile.reconciler import Reconciler, ReconcilerStatistics, WorkQueue

__all__ = [
    "LEASE",
    "Explanation",
    "Explanations",
    "Lease",
    "LeaseLost",
    "LeaseSpec",
    "PassResult",
    "Reason",
    "Reconciler",
    "ReconcilerStatistics",
    "WorkQueue",
]
