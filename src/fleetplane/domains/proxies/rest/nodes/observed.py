"""REST: the NGINX that an agent found on its machine, and its change of hands."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies.access import ADMINISTER, RAW
from fleetplane.domains.proxies.agents.handover import Handovers, ShownConfiguration, TakeoverPlan
from fleetplane.domains.proxies.agents.ports import AgentResult
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import Certificate
from fleetplane.domains.proxies.kinds.unique import refuse
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.agents import CommandView
from fleetplane.domains.proxies.rest.common import CREATED, ProxyCall, actor, commander, created
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import number
from fleetplane.web.rest.problems import Problem
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

LINES = 100
LINES_LIMIT = 1000
_ROUTES = RouteGroup("Agents")
_ONE = "/agents/{agent_id}"


class ShownLog(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    lines: tuple[str, ...]


class ConfirmTakeover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plan: str
    """The id of the plan that was looked at."""


class FetchCertificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str
    """Its file, as the observed configuration spells it."""
    domain: str | None = None
    """The certificate's first name, unless another is given."""


class ObservedRoutes:
    def __init__(
        self, clock: Clock, agents: Agents, handovers: Handovers, certificates: Certificates
    ) -> None:
        self._certificates = certificates
        self._clock = clock
        self._agents = agents
        self._handovers = handovers

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(f"{_ONE}/observed", self.observed, RAW, needs=Needs.WRITES),
            _ROUTES.get(
                f"{_ONE}/observed/log",
                self.log,
                RAW,
                query=(
                    Query(name="name", summary="One of the logs that the agent reports"),
                    Query(
                        name="lines",
                        summary="How many",
                        kind="integer",
                        default=LINES,
                        low=1,
                        high=LINES_LIMIT,
                    ),
                ),
                needs=Needs.WRITES,
            ),
            _ROUTES.post(
                f"{_ONE}/observed/certificates",
                self.certificate,
                ADMINISTER,
                body=FetchCertificate,
                status=CREATED,
            ),
            _ROUTES.get(f"{_ONE}/takeover", self.plan, ADMINISTER, needs=Needs.WRITES),
            _ROUTES.post(f"{_ONE}/takeover", self.take_over, ADMINISTER, body=ConfirmTakeover),
            _ROUTES.post(f"{_ONE}/give-back", self.give_back, ADMINISTER),
        )

    async def observed(self, call: ProxyCall) -> Answer[ShownConfiguration]:
        """Get the configuration of the NGINX that an agent observes."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=await self._handovers.shown(agent, actor=commander(call)))

    async def log(self, call: ProxyCall) -> Answer[ShownLog]:
        """Get the last lines of a log of the NGINX that an agent observes."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        problems: list[Problem] = []
        lines = number(call.query, "lines", LINES, low=1, high=LINES_LIMIT, problems=problems)
        refuse(problems)
        name = call.query.get("name", "")
        text = await self._handovers.log(agent, name, lines, actor=commander(call))
        return Answer(content=ShownLog(name=name, lines=tuple(text.splitlines())))

    async def certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Import a certificate with its key from the NGINX that an agent observes."""
        agent, body = self._agents.get(call.scope, call.path["agent_id"]), call.body
        answer = call.answering(self._created)
        sent = await self._handovers.certificate(agent, body.certificate, actor=commander(call))
        return answer(
            await self._certificates.bring(
                call.scope, body.domain, sent.certificate, sent.private_key, actor=actor(call)
            )
        )

    def _created(self, made: Certificate) -> Answer[views.CertificateView]:
        return created(views.certificate(made, now_ns=self._clock.now_ns()), made, "certificates")

    async def plan(self, call: ProxyCall) -> Answer[TakeoverPlan]:
        """Plan to take over the NGINX that an agent observes; changes nothing."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=await self._handovers.plan(agent, actor=commander(call)))

    async def take_over(self, call: ProxyCall) -> Answer[CommandView]:
        """Take over the NGINX that an agent observes, as a plan says."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return self._done(await self._handovers.take_over(agent, call.body.plan, actor=commander(call)))

    async def give_back(self, call: ProxyCall) -> Answer[CommandView]:
        """Start the NGINX again that was taken over, as it was started before."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return self._done(await self._handovers.give_back(agent, actor=commander(call)))

    def _done(self, result: AgentResult) -> Answer[CommandView]:
        view = CommandView(
            success=result.success, message=result.message, timestamp=spelled(self._clock.now_ns())
        )
        return Answer(content=view)
