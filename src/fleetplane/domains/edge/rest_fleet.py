"""REST: runs over many daemons, followed live."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from fleetplane.domains.edge import run_stream, targets, views
from fleetplane.domains.edge.access import FLEET_MANAGE, FLEET_READ
from fleetplane.domains.edge.calls import public_id
from fleetplane.domains.edge.fleet import FleetRuns, Order
from fleetplane.domains.edge.kinds import EdgeNode
from fleetplane.domains.edge.rest import EdgeCall, Manner, actor, tenant
from fleetplane.domains.edge.run_orders import PolicyBody, policy_of
from fleetplane.domains.edge.runs import Run, RunState
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.cursors import PAGING, page
from fleetplane.web.routes import Answer, Query, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM

SECURITY_CONTEXT = "zaru-free"
"""Which every daemon knows unless it was told otherwise."""
_ONE = "/fleet/runs/{run_id}"
_TAG = "Fleet"
RUN_HEADER = "x-fleet-command-id"


class PreviewBody(msgspec.Struct, forbid_unknown_fields=True):
    target: Any
    durable: bool = False


class InvokeBody(PolicyBody, forbid_unknown_fields=True):
    """The policy's fields may stand here, or in `policy`."""

    target: Any = None
    tool: str = ""
    tool_name: str = ""
    args: dict[str, Any] | None = None
    security_context_name: str = SECURITY_CONTEXT
    user_security_token: str = ""
    policy: PolicyBody | None = None


class FleetRoutes:
    def __init__(
        self,
        *,
        runs: FleetRuns,
        node: Callable[[str, str], EdgeNode | None],
        manner: Manner,
        deadline_seconds: float,
    ) -> None:
        """`node` finds one of a tenant's daemons."""
        self._runs = runs
        self._find = node
        self._manner = manner
        self._deadline_seconds = deadline_seconds

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path="/fleet/preview", handler=self.preview, tag=_TAG, permission=FLEET_READ,
                summary="Who would be meant, and who left out and why", body=PreviewBody,
                answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/fleet/invoke", handler=self.invoke, tag=_TAG, streams=True,
                begins_once=True,
                summary="Run a tool on daemons, and follow it; `Accept: application/json` only starts it",
                permission=FLEET_MANAGE, body=InvokeBody, answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/fleet/{run_id}/cancel", handler=self.cancel, tag=_TAG,
                summary="Take a run back, also from those who are at it", permission=FLEET_MANAGE,
                answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/fleet/runs", handler=self.list, tag=_TAG, summary="Runs, newest first",
                permission=FLEET_READ, answer=dict[str, Any],
                query=(
                    Query(name="tool", summary="Of this tool"),
                    Query(name="outcome", summary="With this outcome", choices=tuple(RunState)),
                    *PAGING,
                ),
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=FLEET_READ,
                summary="One run, with what became of each daemon", answer=dict[str, Any],
            ),
            Route(
                method="GET", path=f"{_ONE}/events", handler=self.events, tag=_TAG, permission=FLEET_READ,
                summary="Follow a run; `Last-Event-ID` goes on where a reader was cut off", streams=True,
                answer=dict[str, Any],
            ),
        )  # fmt: skip

    async def preview(self, call: EdgeCall) -> Answer[Any]:
        body: PreviewBody = call.body
        of = tenant(call)
        found = self._runs.preview(of, targets.from_json(body.target), wait=body.durable)
        resolved: Sequence[Any] = found.resolved
        if not self._manner.is_shipped(call.headers):
            known = (self._find(of, name) for name in found.resolved)
            resolved = [views.brief(node) for node in known if node is not None]
        return Answer(content={"resolved": resolved, "skipped": found.skipped})

    async def invoke(self, call: EdgeCall) -> Answer[Any] | Stream:
        body: InvokeBody = call.body
        if body.target is None:
            raise InvalidArgument("say whom", field="target")
        order = Order(
            tenant=tenant(call),
            target=targets.from_json(body.target),
            tool=body.tool or body.tool_name,
            args_json=msgspec.json.encode(body.args or {}),
            security_context=body.security_context_name,
            policy=policy_of(body.policy or body, deadline_seconds=self._deadline_seconds),
            actor=actor(call),
            user_security_token=body.user_security_token,
        )
        run = await self._runs.start(order)
        begun = Answer(content=views.run(run, self._runs.summary(run)), headers=_named(run))
        if (call.headers.get("accept") or "").startswith("application/json"):
            return begun
        return replace(self._followed(call, run), beginning=begun)

    async def events(self, call: EdgeCall) -> Stream:
        return self._followed(call, self._run(call), mark=call.headers.get("last-event-id") or "")

    def _followed(self, call: EdgeCall, run: Run, *, mark: str = "") -> Stream:
        shipped = self._manner.is_shipped(call.headers)

        async def chunks() -> AsyncGenerator[bytes]:
            tell = run_stream.shipped if shipped else run_stream.documented
            async for event in run_stream.events(self._runs, run, mark=mark):
                for block in tell(run, event):
                    yield block

        return Stream(chunks=chunks(), content_type=EVENT_STREAM, headers=_named(run))

    async def cancel(self, call: EdgeCall) -> Answer[Any]:
        run = self._run(call)
        number = await self._runs.cancel(tenant(call), run.name, actor=actor(call))
        return Answer(
            content={
                "fleet_command_id": public_id(run.name),
                "cancelled": number,
                "already_terminal": not number,
            }
        )

    async def list(self, call: EdgeCall) -> Answer[Any]:
        outcome, tool = call.query.get("outcome"), call.query.get("tool")
        if outcome is not None and outcome not in tuple(RunState):
            raise InvalidArgument(f"is not one of {', '.join(RunState)}", field="outcome")
        found = [
            run
            for run in self._runs.list(tenant(call))
            if tool in (None, run.spec.tool)
            and (outcome is None or (run.status is not None and run.status.state == outcome))
        ]
        told = page(call, found, lambda run: views.run(run, self._runs.summary(run)), newest_first=True)
        return Answer(content={**told, "runs": told["items"]})

    async def show(self, call: EdgeCall) -> Answer[Any]:
        run = self._run(call)
        per_node = [views.node_of_run(target) for target in self._runs.targets(run)]
        skipped = [{"node_id": one.node_id, "reason": one.reason} for one in run.spec.skipped]
        summary = self._runs.summary(run)
        return Answer(content={**views.run(run, summary), "per_node": per_node, "skipped": skipped})

    def _run(self, call: EdgeCall) -> Run:
        return self._runs.get(tenant(call), call.path["run_id"])


def _named(run: Run) -> dict[str, str]:
    return {RUN_HEADER: public_id(run.name)}
