"""The server side of lamps: registry, gRPC service, REST, and all of it declared in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, ServerContext, Service
from fleetplane.fleet.explain import ExplainedKind, TokenReaders
from fleetplane.kernel.access import Grant, Permission, Role, built_in_grants
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.rpc import Authentication, Authenticator, CallContext, MethodRow, Needs
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyText, RestFamily
from fleetplane.web.rest.gate import OperatorCaller, operator_gate
from fleetplane.web.rest.routes import Answer, Call, RouteGroup, RouteTable
from fleetplane_lamps import contract
from fleetplane_lamps.explain import LampExplainer
from fleetplane_lamps.kinds import LAMP, SCOPE, LampSpec, LampStatus
from fleetplane_lamps.settings import LampSettings

VIEW, REPORT = Permission("lamps.view"), Permission("lamps.report")
VIEWER, LOCAL = Role("lamps.viewer"), Role("local")
READERS = {VIEWER: (Grant(permission=VIEW),), **built_in_grants(viewer=(VIEW,))}
PREFIX = "/v1/lamps"

BLUEPRINT = Blueprint(
    name="lamps",
    kinds=(LAMP,),
    methods=(
        MethodRow(
            path=f"/{contract.SERVICE.full_name}/Report",
            listener="lamps",
            authentication=Authentication.LOCAL,
            permission=REPORT,
        ),
    ),
    grants={LOCAL: (Grant(permission=REPORT),), **READERS},
    operator_roles=tuple(READERS),
    explain={
        "lamp": ExplainedKind(
            summary="why a lamp is dark", permission=VIEW, explainer=lambda domain: domain.explainer
        )
    },
    readers=lambda domain: domain.readers,
)


class Lamps:
    """Every lamp that reported, up to a limit."""

    def __init__(self, store: Store, *, limit: int) -> None:
        self._store = store
        self._limit = limit

    async def report(self, name: str, *, lit: bool, actor: str) -> None:
        def change(draft: Draft) -> None:
            if draft.get(LAMP, SCOPE, name) is None and draft.count(LAMP, SCOPE) >= self._limit:
                raise ResourceExhausted(f"there are {self._limit} lamps; lamps.limit allows no more")
            draft.put(LAMP, SCOPE, name, spec=LampSpec(), status=LampStatus(lit=lit))

        await self._store.transact(
            change, actor=actor, action="lamp.report", touches=[Key(LAMP.name, SCOPE, name)]
        )

    def all(self) -> dict[str, bool]:
        found = self._store.list(LAMP, SCOPE)
        return {lamp.name: lamp.status.lit for lamp in found if lamp.status is not None}


class LampService:
    def __init__(self, lamps: Lamps) -> None:
        self._lamps = lamps

    async def Report(self, request: Any, context: CallContext) -> Any:
        if not request.name:
            raise InvalidArgument("is required; give the lamp a name", field="name")
        await self._lamps.report(request.name, lit=request.lit, actor=context.principal.name)
        return contract.ReportResponse()


class ShownLamp(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    lit: bool


class LampList(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[ShownLamp, ...]


class LampDomain:
    server_names: Sequence[str] = ()
    notices: Sequence[str] = ()
    authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}

    def __init__(self, kernel: Kernel, settings: LampSettings) -> None:
        self._lamps = Lamps(kernel.store, limit=settings.limit)
        self.explainer = LampExplainer(kernel.store, kernel.clock)
        self.readers = TokenReaders(kernel.door, READERS)
        self.services: Sequence[Service] = (
            Service(listener="lamps", descriptor=contract.SERVICE, servicer=LampService(self._lamps)),
        )
        route = RouteGroup("Lamps").get("", self._listed, VIEW, needs=Needs.ACTIVE)
        # Callers show a token of `fleetplane tokens create NAME --role lamps.viewer`.
        self._rest = RestFamily(
            kernel,
            RouteTable(PREFIX, (route,)),
            operator_gate(kernel.door, READERS),
            domain="lamps",
            text=FamilyText(title="Lamps", version="1", description="Lamps.", summary="REST: lamps"),
        )
        self.routes: Sequence[Mount] = self._rest.mounts
        self.collectors: Sequence[Collector] = self._rest.collectors

    async def _listed(self, _call: Call[OperatorCaller]) -> Answer[LampList]:
        """List every lamp."""
        shown = (ShownLamp(name=name, lit=lit) for name, lit in sorted(self._lamps.all().items()))
        return Answer(content=LampList(items=tuple(shown)))

    async def prepare_here(self) -> None:
        """Lamps need nothing loaded."""

    async def take_over(self) -> None:
        await self._rest.take_over()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Lamps need not know where they are found."""

    async def run_here(self) -> None:
        """Nothing: the active server sweeps."""

    async def run_active(self) -> None:
        await self._rest.run_active()

    def drain(self) -> None:
        """There are no streams to end."""


async def build(settings: LampSettings, _context: ServerContext, kernel: Kernel) -> Domain:
    return LampDomain(kernel, settings)
