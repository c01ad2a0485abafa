"""REST of instances, `/v1/instances`: reads of groups and instances, and what `remote` adds.

`/ui/instances`, the address of a former page, leads to the console.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.instances.access import GRANTS, TENANT_HEADER, VIEW, seeing
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.rest import views
from fleetplane.domains.instances.rest.overview import Overview
from fleetplane.domains.instances.rest.remote import RemoteCalls
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.access import EVERYWHERE
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.rpc import Needs
from fleetplane.web.documents import moved_to
from fleetplane.web.ops import CONSOLE, Mount
from fleetplane.web.rest.family import FamilyText, RestFamily
from fleetplane.web.rest.gate import OperatorCaller, RoleGate, operator_gate
from fleetplane.web.rest.pages import BY_CURSOR, CursorPage, cursor_page, whole_number
from fleetplane.web.rest.routes import Answer, Call, Query, Route, RouteGroup, RouteTable

InstancesCall = Call[OperatorCaller]

ERRORS, ERRORS_LIMIT = 50, 500
ABOUT_LIMIT = 256
_GROUPS = RouteGroup("Groups")
_INSTANCES = RouteGroup("Instances")
_WATCHING = RouteGroup("Watching")


class ViewRoutes:
    def __init__(self, *, overview: Overview, errors: ErrorFeed, gate: RoleGate[OperatorCaller]) -> None:
        self._overview = overview
        self._errors = errors
        self._gate = gate

    def routes(self) -> Sequence[Route]:
        return (
            _GROUPS.get("/groups", self.groups, VIEW),
            _GROUPS.get("/groups/{name}", self.group, VIEW),
            _INSTANCES.get(
                "/instances",
                self.instances,
                VIEW,
                answer=views.InstancePage,
                query=(
                    Query(name="group", summary="Only of this group"),
                    Query(name="state", summary="Only in this state", choices=tuple(rules.State)),
                    *BY_CURSOR,
                ),
            ),
            _INSTANCES.get("/instances/{instance_id}", self.instance, VIEW),
            *self._watching(),
        )

    def _watching(self) -> Sequence[Route]:
        return (
            _WATCHING.get(
                "/explain",
                self.explain,
                VIEW,
                query=(Query(name="about", summary="A group, or an instance's id"),),
                needs=Needs.WRITES,  # a follower asks the leader through the store
            ),
            _WATCHING.get(
                "/errors",
                self.errors,
                VIEW,
                query=(
                    Query(
                        name="limit",
                        summary="Maximum number of rows",
                        kind="integer",
                        default=ERRORS,
                        low=1,
                        high=ERRORS_LIMIT,
                    ),
                ),
            ),
        )

    async def groups(self, call: InstancesCall) -> Answer[views.GroupList]:
        """List groups, with desired and actual state."""
        return Answer(content=views.GroupList(items=self._overview.groups(self._tenant(call))))

    async def group(self, call: InstancesCall) -> Answer[views.ShownGroup]:
        """Get a group."""
        return Answer(content=self._overview.group(self._tenant(call), call.path["name"]))

    async def instances(self, call: InstancesCall) -> Answer[CursorPage[views.ShownInstance]]:
        """List instances, oldest first."""
        state = call.query.get("state")
        if state is not None and state not in tuple(rules.State):
            raise InvalidArgument(f"is not one of {', '.join(rules.State)}", field="state")
        found = self._overview.instances(self._tenant(call), group=call.query.get("group"), state=state)
        return Answer(content=cursor_page(call, found, self._overview.instance))

    async def instance(self, call: InstancesCall) -> Answer[views.InstanceDetail]:
        """Get an instance, with its agent's last report."""
        return Answer(content=self._overview.detail(self._tenant(call), call.path["instance_id"]))

    async def explain(self, call: InstancesCall) -> Answer[views.Explained]:
        """Explain why a group or instance is not in its desired state."""
        about = call.query.get("about", "")
        if not 0 < len(about) <= ABOUT_LIMIT:
            raise InvalidArgument("is required; name a group or an instance", field="about")
        return Answer(content=await self._overview.explain(self._tenant(call), about))

    async def errors(self, call: InstancesCall) -> Answer[views.ErrorList]:
        """List recent errors, newest first."""
        limit = whole_number(call, "limit", default=ERRORS, low=1, high=ERRORS_LIMIT)
        found = self._errors.recent(self._tenant(call), limit)
        return Answer(content=views.ErrorList(items=[views.error(trouble) for trouble in found]))

    def _tenant(self, call: InstancesCall) -> str | None:
        """The tenant that is looked at; None for all of them, by those who may see everybody's."""
        tenant = seeing(call.caller, call.headers)
        if tenant is None:
            self._gate.check(call.caller, VIEW, EVERYWHERE)
        return tenant


PREFIX = "/v1/instances"
PAGE = f"{CONSOLE}/instances"


class InstanceRest:
    def __init__(
        self, kernel: Kernel, *, overview: Overview, errors: ErrorFeed, remote: RemoteCalls, version: str
    ) -> None:
        gate = operator_gate(kernel.door, GRANTS, tenant_headers=(TENANT_HEADER,))
        views = ViewRoutes(overview=overview, errors=errors, gate=gate)
        self.table = RouteTable(PREFIX, (*views.routes(), *remote.routes(gate)))
        gate.require_complete(self.table.permissions)
        self.family = RestFamily(
            kernel,
            self.table,
            gate,
            domain="instances",
            text=FamilyText(
                title="Fleetplane instances",
                version=version,
                description="Groups of machines and their instances: to look at, and what operators do.",
                summary="REST: groups and instances",
            ),
        )

    def __repr__(self) -> str:
        return f"<InstanceRest {PREFIX}>"

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @cached_property
    def routes(self) -> Sequence[Mount]:
        # Browsers keep what stands behind `#`: an old link with a token signs in to the console.
        return *self.family.mounts, Mount(path=PAGE, app=moved_to(f"{CONSOLE}/"), needs=Needs.NOTHING)
