"""The agents' half of the proxies domain, composed.

Offers what the other half asks for (`ports`), and what the composition root serves and runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from fleetplane.domains.blueprint import Service
from fleetplane.domains.proxies.agents.commands import AgentCommander, CommandAnswers
from fleetplane.domains.proxies.agents.controller import AgentController, AgentPolicy
from fleetplane.domains.proxies.agents.events import AGENT_EVENT
from fleetplane.domains.proxies.agents.identity import LISTENER, REPORT, STREAM_RATE, AgentAuthenticator
from fleetplane.domains.proxies.agents.live import CHANNEL, STREAM, AgentPresences, LiveAgent
from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.records import AgentRoster
from fleetplane.domains.proxies.agents.runs import PROXY_RUN, ProxyChannel, ProxyRuns
from fleetplane.domains.proxies.agents.stream import STREAM_POLICY, AgentStreams
from fleetplane.domains.proxies.agents.telemetry import DiscardReports, Intake
from fleetplane.domains.proxies.grpc.agents import AGENT_ROLE, AgentService
from fleetplane.domains.proxies.grpc.identity import AgentIdentityService
from fleetplane.domains.proxies.rules.alerts import ALERT
from fleetplane.domains.proxies.serving.agent_configs import Configs
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.runs.runs import Runs
from fleetplane.fleet.streams.host import StreamHost, StreamPolicy
from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2
from fleetplane.kernel.access import Grant, Role
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, keep_deadlines
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, Authenticator, MethodRow, Needs, Rate

MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
"""A full configuration with its certificates, or a large batch of log lines."""

ENROL_RATE = Rate(per_second=10.0, burst=512)
"""Per address: each costs a signature; an agent asks once, and then every three weeks."""

_IDENTITY = identity_pb2.DESCRIPTOR.services_by_name["AgentIdentity"]
_SERVICE = agent_pb2.DESCRIPTOR.services_by_name["AgentService"]

KINDS: Sequence[AnyKind] = (ALERT, AGENT_EVENT, PROXY_RUN, COMMAND, COMMAND_TARGET, FREEZE, LEASE)
METHODS: Sequence[MethodRow] = (
    MethodRow(
        path=f"/{_SERVICE.full_name}/Stream",
        listener=LISTENER,
        # The first message has the token; agents need not show it in the connection as well.
        authentication=Authentication.ANONYMOUS,
        permission=None,
        rate=STREAM_RATE,
        max_request_bytes=MESSAGE_LIMIT_BYTES,
        needs=Needs.WRITES,
    ),
    *(
        MethodRow(
            path=f"/{_SERVICE.full_name}/{method}",
            listener=LISTENER,
            authentication=Authentication.TOKEN,
            permission=REPORT,
            max_request_bytes=MESSAGE_LIMIT_BYTES,
            needs=Needs.WRITES,
        )
        for method in ("ReportHealth", "ReportMetrics")
    ),
    *(
        MethodRow(
            path=f"/{_IDENTITY.full_name}/{method}",
            listener=LISTENER,
            # The token, or the key that signed the request, says who asks.
            authentication=Authentication.ANONYMOUS,
            permission=None,
            rate=ENROL_RATE,
            needs=Needs.WRITES,
        )
        for method in ("Enrol", "Renew")
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
        revocations: Revocations,
        intake: Intake | None = None,
        policy: AgentPolicy | None = None,
        stream: StreamPolicy | None = None,
        challenge_address: str = "",
        attention: StallDetector | None = None,
        authority: Authority | None = None,
    ) -> None:
        """`challenge_address` is the `host:port` that answers ACME challenges.

        Without an `authority` agents get no certificates and go on with their tokens.
        """
        self._clock = clock
        self._attention = attention = attention or StallDetector(clock)
        policy = policy or AgentPolicy()
        self.sessions = sessions = Sessions(revocations)
        self.whereabouts = whereabouts = PresenceRegistry(store, clock, channel=CHANNEL)
        roster = AgentRoster(store, whereabouts)
        self.machines = machines = Machines(store, clock)
        self._heard = LastSeen(store, clock, channel=CHANNEL)
        self.presences = AgentPresences(sessions, whereabouts, self._heard, clock)
        self._answers = CommandAnswers(store, clock, vault.master)
        self.commander = AgentCommander(
            store, clock, self.presences, whereabouts=whereabouts, answers=self._answers
        )
        channel = ProxyChannel(store, ledger=self.commander.ledger, is_present=self.presences.is_present)
        self.runs: ProxyRuns = Runs(store, clock, channel)
        self.controller = AgentController(
            store=store,
            clock=clock,
            roster=roster,
            presences=self.presences,
            workspaces=workspaces,
            configs=Configs(vault, challenge_address=challenge_address),
            commands=self.commander.ledger,
            policy=policy,
            whereabouts=whereabouts,
            heard=self._heard,
            attention=attention,
        )
        door = AgentAuthenticator(
            roster=roster, machines=machines, authority=authority, revocations=revocations, clock=clock
        )
        intake = intake or DiscardReports()
        self._streams = AgentStreams(
            roster=roster,
            machines=machines,
            door=door,
            presences=self.presences,
            controller=self.controller,
            commander=self.commander,
            workspaces=workspaces,
            intake=intake,
            clock=clock,
            policy=policy,
            lineage=store.lineage,
        )
        self._host: StreamHost[agent_pb2.AgentMessage, agent_pb2.MasterMessage, LiveAgent] = StreamHost(
            self._streams,
            stream=STREAM,
            presences=self.presences,
            sessions=sessions,
            clock=clock,
            policy=stream or STREAM_POLICY,
            whereabouts=whereabouts,
        )
        service = AgentService(
            streams=self._streams,
            host=self._host,
            roster=roster,
            machines=machines,
            door=door,
            presences=self.presences,
            controller=self.controller,
            intake=intake,
            clock=clock,
        )
        identity = AgentIdentityService(
            roster=roster,
            machines=machines,
            presences=self.presences,
            authority=authority,
            revocations=revocations,
            heartbeat_seconds=float(policy.heartbeat_seconds),
            clock=clock,
        )
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=_SERVICE, servicer=service),
            Service(listener=LISTENER, descriptor=_IDENTITY, servicer=identity),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {
            LISTENER: {Authentication.TOKEN: service.authenticate}
        }

    def __repr__(self) -> str:
        return f"<AgentSide connected={len(self.presences)}>"

    async def prepare_here(self) -> None:
        """Take up what is open, before agents come in."""
        self.commander.ledger.recover()
        await self.runs.prepare_here()

    async def take_over(self) -> None:
        """See to what an earlier server left behind."""
        await self.runs.take_over()
        self.controller.take_over()

    async def run_here(self) -> None:
        """For the agents that are connected to this server, until cancelled."""
        ledger = self.commander.ledger
        async with Boundary() as tasks:
            tasks.keep("proxies/controller", self.controller.run_here)
            tasks.keep("proxies/runs", self.runs.run_here)
            tasks.keep("proxies/commands", ledger.run_here)
            tasks.keep("proxies/places", partial(self.commander.courier.run, ledger, self._attention))
            tasks.keep("proxies/whereabouts", self.whereabouts.run_here)
            if self.whereabouts.shared:
                tasks.keep("proxies/heard", self._heard.run_here)
                tasks.keep("proxies/last-heard", self.presences.follow_heard)

    async def run_active(self) -> None:
        """For those that no server has any more, and what ends by itself, until cancelled."""
        ledger = self.commander.ledger
        async with Boundary() as tasks:
            tasks.keep("proxies/controller", self.controller.run_active)
            tasks.keep("proxies/runs", self.runs.run_active)
            tasks.keep("proxies/deadlines", partial(keep_deadlines, ledger, self._clock, self._attention))
            if self.whereabouts.shared:
                tasks.keep("proxies/answers", self._answers.run_for_all)

    def drain(self) -> None:
        self._host.stop(self._streams.going_away)
