"""Keeping the leader's address on the machine that this server runs on.

Agents and operators find the server at one address, whichever machine it runs on. Whoever leads asks the
provider to bring the address here, takes it from a machine that had it before, and looks every so often
whether it still is here. It is given up when the document no longer names it, not when the server ends:
a restart in place should cost nobody their connection, and a successor elsewhere takes it anyway.
"""

from __future__ import annotations

from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.providers.contract import LeaderNetwork, ProviderCapability
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.store import Store

KEY = "leader-network"
CHECK_SECONDS = 60.0
"""Between looks at whether the address still is here; asking for what is so changes nothing."""


class LeaderAddress:
    def __init__(
        self, provider: GuardedProvider, groups: Groups, store: Store, clock: Clock, *, machine: str
    ) -> None:
        """`machine` is the provider's id of the machine that this server runs on."""
        self._provider = provider
        self._groups = groups
        self._machine = machine
        self._held: LeaderNetwork | None = None
        self.reconciler = Reconciler("instances/leader-network", self._pass, clock=clock, store=store)

    def __repr__(self) -> str:
        return f"<LeaderAddress {self._held.ip if self._held else 'none'}>"

    async def run(self) -> None:
        """Until cancelled."""
        self.reconciler.enqueue(KEY)
        unsubscribe = self._groups.on_change(lambda _changed: self.reconciler.enqueue(KEY))
        try:
            await self.reconciler.run()
        finally:
            unsubscribe()

    async def _pass(self, _key: str) -> PassResult:
        configured = self._groups.required().shard.leader_network
        wanted = (
            LeaderNetwork(ip=configured.ip, interface_id=configured.interface_id)
            if configured is not None
            else None
        )
        if self._held is not None and self._held != wanted:
            await self._provider.release_leader_network(self._machine, self._held)
            self._held = None
        if wanted is None:
            return PassResult()
        if problem := self._problem():
            return PassResult(
                explanation=(Reason(code="LEADER_NETWORK", message=problem, subject=wanted.ip),)
            )
        await self._provider.assign_leader_network(self._machine, wanted)
        self._held = wanted
        return PassResult(requeue_after_seconds=CHECK_SECONDS)

    def _problem(self) -> str:
        if ProviderCapability.LEADER_NETWORK not in self._provider.describe().capabilities:
            return f"the provider {self._provider.kind!r} moves no addresses"
        if not self._machine:
            return "which machine this is must be said in the setting instances.machine"
        return ""
