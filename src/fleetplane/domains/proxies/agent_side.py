"""The half of the proxies domain that talks to agents, put together.

Offers what the other half asks for (`ports`), and what the composition root serves and runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from fleetplane.domains.blueprint import Service
from fleetplane.domains.proxies.alerts import ALERT
from fleetplane.domains.proxies.commander import Commander
from fleetplane.domains.proxies.configs import Configs
from fleetplane.domains.proxies.controller import AgentController, AgentPolicy
from fleetplane.domains.proxies.intake import Discard, Intake
from fleetplane.domains.proxies.presence import Presences
from fleetplane.domains.proxies.roster import Roster
from fleetplane.domains.proxies.service import AGENT_ROLE, AgentService
from fleetplane.domains.proxies.vault import Vault
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, run
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, Authenticator, MethodRow, Rate

LISTENER = "proxy-agents"
REPORT = Permission("proxies.report")
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
"""A full configuration with its certificates, or a large batch of log lines."""
STREAM_RATE = Rate(per_second=100.0, burst=4096)
"""Per address: a fleet that comes back behind one address must get in, a guesser must not get far."""

_SERVICE = agent_pb2.DESCRIPTOR.services_by_name["AgentService"]

KINDS: Sequence[AnyKind] = (ALERT, COMMAND, COMMAND_TARGET, LEASE)
METHODS: Sequence[MethodRow] = (
    MethodRow(
        path=f"/{_SERVICE.full_name}/Stream",
        listener=LISTENER,
        # The first message has the token; agents need not show it in the connection as well.
        authentication=Authentication.ANONYMOUS,
        permission=None,
        rate=STREAM_RATE,
        max_request_bytes=MESSAGE_LIMIT_BYTES,
    ),
    *(
        MethodRow(
            path=f"/{_SERVICE.full_name}/{method}",
            listener=LISTENER,
            authentication=Authentication.TOKEN,
            permission=REPORT,
            max_request_bytes=MESSAGE_LIMIT_BYTES,
        )
        for method in ("ReportHealth", "ReportMetrics")
    ),
)
GRANTS: Mapping[Role, Iterable[Grant]] = {AGENT_ROLE: (Grant(permission=REPORT),)}


class AgentSide:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        workspaces: Workspaces,
        vault: Vault,
        intake: Intake | None = None,
        policy: AgentPolicy | None = None,
        challenge_address: str = "",
    ) -> None:
        """`challenge_address` is `host:port` of whoever answers certificate authorities."""
        self._clock = clock
        policy = policy or AgentPolicy()
        self.sessions = sessions = Sessions()
        roster = Roster(store)
        self.presences = Presences(sessions)
        self.commander = Commander(store, clock, self.presences)
        self.controller = AgentController(
            store=store, clock=clock, roster=roster, presences=self.presences, workspaces=workspaces,
            configs=Configs(vault, challenge_address=challenge_address),
            commands=self.commander.ledger, policy=policy,
        )  # fmt: skip
        self._service = AgentService(
            roster=roster, presences=self.presences, sessions=sessions, controller=self.controller,
            commander=self.commander, workspaces=workspaces, intake=intake or Discard(), clock=clock,
            policy=policy,
        )  # fmt: skip
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=_SERVICE, servicer=self._service),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {
            LISTENER: {Authentication.TOKEN: self._service.authenticate}
        }

    def __repr__(self) -> str:
        return f"<AgentSide connected={len(self.presences)}>"

    def prepare(self) -> None:
        """Take up what an earlier run left behind, before agents come in."""
        self.commander.ledger.recover()
        self.controller.take_up()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.run(), name="proxies/controller")
            tasks.create_task(run(self.commander.ledger, self._clock), name="proxies/commands")

    def drain(self) -> None:
        self._service.going_away()
