"""Who asks for releases of the instances' agent: an instance, by its certificate."""

from __future__ import annotations

from typing import Any

from fleetplane.domains.instances.credentials import client_of
from fleetplane.domains.instances.kinds import INSTANCE, tenant_scope
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext

LISTENER = "agent"
AS_AGENT = Permission("instances.agent")


class InstanceRegister:
    def __init__(self, store: Store) -> None:
        self._store = store

    def recognise(self, context: CallContext, name: str) -> str:  # noqa: ARG002  # its certificate says it
        """The instance whose certificate it is, as tenant and id."""
        agent = "/".join(client_of(context.principal))
        if self.card(agent) is None:
            raise Unauthenticated("the instance is not known any more")
        return agent

    def card(self, agent: str) -> AgentCard | None:
        """An instance by its tenant and id."""
        tenant, _, instance = agent.partition("/")
        found = self._store.get(INSTANCE, tenant_scope(tenant), instance)
        if found is None:
            return None
        return AgentCard(title=instance, labels={"tenant": tenant, "group": found.spec.group, **found.labels})


def _register(_domain: Any, store: Store) -> InstanceRegister:
    return InstanceRegister(store)


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.CERTIFICATE,
    permission=AS_AGENT,
    register=_register,
)
