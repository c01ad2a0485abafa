"""REST: runs over many daemons, followed as server-sent events.

`documented` writes the events that are documented, `shipped` those that the first command line reads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

import msgspec
from msgspec.structs import asdict

from fleetplane.domains.edge.access import FLEET_MANAGE, FLEET_READ
from fleetplane.domains.edge.kinds import EdgeNode, tenant_scope
from fleetplane.domains.edge.rest import views
from fleetplane.domains.edge.rest.common import EdgeCall, Manner, actor, tenant
from fleetplane.domains.edge.rest.shapes import Cancelled, Preview, RunDetail, RunPage, ShownMember, ShownRun
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.channel import EdgeRun, EdgeRuns, ToolRequest, encoded_args
from fleetplane.domains.edge.runs.target_spellings import PolicyBody, policy_of
from fleetplane.domains.edge.streams.call_encoding import SECURITY_CONTEXT, decode_outcome, public_id
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.events import RunEnded, RunEvent, Started, TargetEnded, TargetOutput, TargetStarted
from fleetplane.fleet.runs.records import RunState, TargetOutcome, outcome_of
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.rest.pages import BY_CURSOR, cursor_page
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup, Stream
from fleetplane.web.streaming import EVENT_STREAM
from fleetplane.web.streaming import event as block


def documented(run: EdgeRun, event: RunEvent | None) -> Iterator[bytes]:
    """Events with names, of which a reader may miss output but never a result."""
    run_id = public_id(run.name)
    match event:
        case None:
            yield block("error", {"code": "OutputMissing", "message": "some output is not kept any more"})
        case Started():
            data = {
                "fleet_command_id": run_id,
                "targets_resolved": event.targets,
                "targets_skipped": event.skipped,
                "tool": run.spec.tool,
            }
            yield block("fleet_started", data, mark=event.mark)
        case TargetStarted():
            yield block("command_started", _about(run_id, event), mark=event.mark)
        case TargetOutput():
            chunk = views.chunk(event.stream, event.output)
            yield block("command_progress", {**_about(run_id, event), "chunk": chunk}, mark=event.mark)
        case TargetEnded(target=target):
            assert target.status is not None
            result = views.result(target, decode_outcome(target.status.result))
            yield block("command_result", {**_about(run_id, event), "result": result}, mark=event.mark)
        case RunEnded():
            yield from _over(run, event)
        case _:
            assert_never(event)


def _about(run_id: str, event: TargetStarted | TargetOutput | TargetEnded) -> dict[str, object]:
    return {"node_id": event.name, "command_id": run_id}


def _over(run: EdgeRun, event: RunEnded) -> Iterator[bytes]:
    if event.state is RunState.HALTED:
        yield block("error", {"code": "Halted", "message": "too much failed; the rest was taken back"})
    yield block(
        "fleet_result",
        {
            "fleet_command_id": public_id(run.name),
            "outcome": event.state,
            "targets_resolved": run.spec.targets,
            "targets_skipped": run.spec.skipped_count,
            "summary": views.summary_of(event.summary),
        },
        mark=event.mark,
    )


def shipped(run: EdgeRun, event: RunEvent | None) -> Iterator[bytes]:
    """Data only, each an object with one key that says what it is."""
    if event is None:
        return
    run_id = public_id(run.name)
    data: dict[str, object] = {"fleet_command_id": run_id}
    match event:
        case Started():
            kind = "Started"
            data |= {
                "resolved": event.targets,
                "skipped": [{"node_id": one.node_id, "reason": one.reason} for one in run.spec.skipped],
            }
        case TargetStarted():
            kind, data = "NodeStarted", {**data, "node_id": event.name, "command_id": run_id}
        case TargetOutput():
            kind = "NodeProgress"
            data |= {"node_id": event.name, "stream": event.stream, "chunk": views.text(event.output)}
        case TargetEnded():
            kind = "NodeCompleted"
            data |= {"node_id": event.name, **_legacy(event.target)}
        case RunEnded():
            if event.state is RunState.CANCELLED:
                # Without a mark: whoever is cut off after it has not been told everything of this event.
                yield block("", {"Cancelled": {"fleet_command_id": run_id}})
            kind = "Done"
            data |= {"summary": views.summary_of(event.summary)}
        case _:
            assert_never(event)
    yield block("", {kind: data}, mark=event.mark)


def _legacy(target: CommandTarget) -> dict[str, object]:
    one = views.node_of_run(target)
    ok = outcome_of(target) is TargetOutcome.OK
    return {
        "ok": ok,
        "exit_code": one.exit_code if one.exit_code is not None else (0 if ok else -1),
        "stdout": one.stdout_tail,
        "stderr": one.stderr_tail,
        "error_kind": None if ok else one.code or one.outcome,
        "error_message": None if ok else one.message,
    }


_ONE = "/fleet/runs/{run_id}"
_ROUTES = RouteGroup("Fleet")
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
    """Sent by the first command line. It cannot be verified here, so it is not passed on."""
    policy: PolicyBody | None = None


class FleetRoutes:
    def __init__(
        self,
        *,
        runs: EdgeRuns,
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
            _ROUTES.post("/fleet/preview", self.preview, FLEET_READ, body=PreviewBody),
            _ROUTES.post(
                "/fleet/invoke",
                self.invoke,
                FLEET_MANAGE,
                streams=True,
                begins_once=True,
                body=InvokeBody,
                answer=ShownRun,
            ),
            _ROUTES.post("/fleet/{run_id}/cancel", self.cancel, FLEET_MANAGE),
            _ROUTES.get(
                "/fleet/runs",
                self.list,
                FLEET_READ,
                query=(
                    Query(name="tool", summary="Only of this tool"),
                    Query(name="outcome", summary="Only with this outcome", choices=tuple(RunState)),
                    *BY_CURSOR,
                ),
            ),
            _ROUTES.get(_ONE, self.show, FLEET_READ),
            _ROUTES.get(f"{_ONE}/events", self.events, FLEET_READ, streams=True),
        )

    async def preview(self, call: EdgeCall) -> Answer[Preview]:
        """Preview which daemons a target selects, and why others are left out."""
        body: PreviewBody = call.body
        of = tenant(call)
        found = self._runs.preview(tenant_scope(of), targets.from_json(body.target), wait=body.durable)
        resolved: Sequence[ShownMember | str] = found.resolved
        if not self._manner.is_shipped(call.headers):
            known = (self._find(of, name) for name in found.resolved)
            resolved = [views.brief(node) for node in known if node is not None]
        return Answer(content=Preview(resolved=resolved, skipped=found.skipped))

    async def invoke(self, call: EdgeCall) -> Answer[ShownRun] | Stream:
        """Run a tool on daemons and stream the run; `Accept: application/json` only starts it."""
        body: InvokeBody = call.body
        if body.target is None:
            raise InvalidArgument('is required; give a node, a group, a selector or "all"', field="target")
        order = RunOrder(
            scope=tenant_scope(tenant(call)),
            target=targets.from_json(body.target),
            call=ToolRequest(
                tool=body.tool or body.tool_name,
                args_json=encoded_args(body.args or {}),
                security_context=body.security_context_name,
            ),
            policy=policy_of(body.policy or body, deadline_seconds=self._deadline_seconds),
            actor=actor(call),
        )

        def answer(run: EdgeRun) -> Answer[ShownRun]:
            return Answer(content=views.run(run, self._runs.summary(run)), headers=_named(run))

        call.answering(lambda issued: answer(issued.beside))
        run = await self._runs.start(order)
        begun = answer(run)
        if (call.headers.get("accept") or "").startswith("application/json"):
            return begun
        return replace(self._followed(call, run), beginning=begun)

    async def events(self, call: EdgeCall) -> Stream:
        """Follow a run as server-sent events; `Last-Event-ID` resumes."""
        return self._followed(call, self._run(call), mark=call.headers.get("last-event-id") or "")

    def _followed(self, call: EdgeCall, run: EdgeRun, *, mark: str = "") -> Stream:
        tell = shipped if self._manner.is_shipped(call.headers) else documented

        async def chunks() -> AsyncGenerator[bytes]:
            async for event in self._runs.follow(run, mark=mark):
                if blocks := b"".join(tell(run, event)):
                    yield blocks

        return Stream(chunks=chunks(), content_type=EVENT_STREAM, headers=_named(run))

    async def cancel(self, call: EdgeCall) -> Answer[Cancelled]:
        """Cancel a run. Targets already sent are asked to stop; held targets are dropped."""
        run = self._run(call)
        done = await self._runs.cancel(run.scope, run.name, actor=actor(call))
        return Answer(
            content=Cancelled(
                fleet_command_id=public_id(run.name),
                cancelled=done.cancelled,
                told_to_stop=done.told_to_stop,
                already_terminal=not (done.cancelled or done.told_to_stop),
            )
        )

    async def list(self, call: EdgeCall) -> Answer[RunPage]:
        """List runs, newest first."""
        outcome, tool = call.query.get("outcome"), call.query.get("tool")
        if outcome is not None and outcome not in tuple(RunState):
            raise InvalidArgument(f"is not one of {', '.join(RunState)}", field="outcome")
        found = [
            run
            for run in self._runs.list(tenant_scope(tenant(call)))
            if tool in (None, run.spec.tool)
            and (outcome is None or (run.status is not None and run.status.state == outcome))
        ]
        told = cursor_page(
            call, found, lambda run: views.run(run, self._runs.summary(run)), newest_first=True
        )
        return Answer(content=RunPage(items=told.items, next_cursor=told.next_cursor, runs=told.items))

    async def show(self, call: EdgeCall) -> Answer[RunDetail]:
        """Get a run, with the outcome of each daemon."""
        run = self._run(call)
        per_node = [views.node_of_run(target) for target in self._runs.targets(run)]
        shown = asdict(views.run(run, self._runs.summary(run)))
        return Answer(content=RunDetail(**shown, per_node=per_node, skipped=run.spec.skipped))

    def _run(self, call: EdgeCall) -> EdgeRun:
        return self._runs.get(tenant_scope(tenant(call)), call.path["run_id"])


def _named(run: EdgeRun) -> dict[str, str]:
    return {RUN_HEADER: public_id(run.name)}
