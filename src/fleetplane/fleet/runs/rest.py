"""REST of runs, the same for every domain that had none before: start, preview, list, show, follow, cancel.

A domain says what a request asks for (`RunRequests`) and how a target's result reads. Edge has routes of
its own, whose shapes clients know.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, assert_never

import msgspec

from fleetplane.fleet.runs.channel import C, RunOrder
from fleetplane.fleet.runs.events import RunEnded, RunEvent, Started, TargetEnded, TargetOutput, TargetStarted
from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.fleet.runs.records import Run, RunState, S, Summary, TargetOutcome, in_turn, outcome_of
from fleetplane.fleet.runs.runs import Runs
from fleetplane.fleet.runs.targets import RunTarget, SkipReason
from fleetplane.kernel.access import Permission
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import BY_CURSOR, CursorPage, cursor_page
from fleetplane.web.rest.routes import Answer, Call, Query, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM, event

ACCEPTED = 202
NAMES_SHOWN = 100
"""Of a target, with each run: a page of runs that name ten thousand agents each would be megabytes."""


# What clients send.


class TargetBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names, a selector or both, which must then both fit; or all."""

    names: list[str] = []
    selector: str = ""
    all: bool = False

    def target(self) -> RunTarget:
        found = RunTarget(names=tuple(dict.fromkeys(self.names)), selector=self.selector, everyone=self.all)
        found.check()
        return found


class PolicyBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    mode: Mode = Mode.SEQUENTIAL
    batch: int | None = None
    max_concurrency: int | None = None
    on_failure: OnFailure = OnFailure.FAIL_FAST
    stop_after: int | None = None
    require_min: int = 0
    deadline_seconds: float | None = None
    deliver_within_seconds: float = 0.0

    def policy(self, *, deadline_seconds: float) -> RunPolicy:
        """`deadline_seconds` counts when the client gives none."""
        if self.mode is Mode.ROLLING and self.batch is None:
            raise InvalidArgument("is required for a rolling run: how many at a time", field="policy.batch")
        if self.on_failure is OnFailure.STOP_AFTER and self.stop_after is None:
            raise InvalidArgument("is required: after how many failures to stop", field="policy.stop_after")
        if self.deliver_within_seconds < 0:
            raise InvalidArgument("must not be negative", field="policy.deliver_within_seconds")
        made = RunPolicy(
            mode=self.mode,
            batch=1 if self.batch is None else self.batch,
            max_concurrency=self.max_concurrency,
            on_failure=self.on_failure,
            stop_after=1 if self.stop_after is None else self.stop_after,
            require_min=self.require_min,
            deadline_seconds=deadline_seconds if self.deadline_seconds is None else self.deadline_seconds,
            wait=self.deliver_within_seconds > 0,
            deliver_within_seconds=self.deliver_within_seconds or RunPolicy().deliver_within_seconds,
        )
        made.check({name: f"policy.{name}" for name in PolicyBody.__struct_fields__})
        return made


class RunBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every domain's request for a run has; the domain adds what is to be run."""

    target: TargetBody
    policy: PolicyBody = PolicyBody()


class PreviewBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    target: TargetBody
    wait: bool = False
    """Whether agents that are away would be waited for."""


# What they are told.


class SkippedView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    reason: SkipReason


class PreviewView(msgspec.Struct, frozen=True, kw_only=True):
    resolved: Sequence[str]
    skipped: Sequence[SkippedView]


class RunTargetView(msgspec.Struct, frozen=True, kw_only=True):
    names: Sequence[str]
    """The first hundred."""
    named: int
    """How many there are."""
    selector: str
    all: bool


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: RunState
    command: str
    args: Sequence[str]
    target: RunTargetView
    policy: RunPolicy
    started_by: str
    started_at: str
    ended_at: str | None
    targets: int
    """That take part."""
    skipped: int
    """That were meant and left out."""
    summary: Summary


class ResultView(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one target."""

    name: str
    outcome: TargetOutcome
    message: str
    told_to_stop: bool = False
    """It was cancelled while the agent was at it, and may still finish."""
    exit_code: int | None = None
    duration_seconds: float | None = None
    stdout: str = ""
    stderr: str = ""


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    run: RunView
    results: Sequence[ResultView]
    skipped: Sequence[SkippedView]
    """The first thousand."""


class CancelView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    cancelled: int
    told_to_stop: int
    """Targets that are at it and cannot stop: what they say later is their outcome."""
    already_ended: bool


class TargetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a domain knows of a target beside its outcome."""

    message: str = ""
    exit_code: int | None = None
    duration_seconds: float | None = None
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequests(Generic[S, C]):
    """The domain's part of the routes."""

    base: str
    """The path above `/runs`."""
    tag: str
    read: Permission
    operate: Permission
    body: type[RunBody]
    order: Callable[[Call[Any]], RunOrder[RunTarget, C]]
    """What a request asks for; raises `InvalidArgument`."""
    target: Callable[[S], RunTarget]
    program: Callable[[S], tuple[str, Sequence[str]]]
    """What a run does, in a word and arguments."""
    result: Callable[[CommandTarget], TargetResult]
    actor: Callable[[Call[Any]], str]
    started_by: Callable[[str], str] = str
    """How the name of who started a run is shown."""
    anywhere: bool = False
    """Whether every server on a shared database answers: the domain's agents may be at any of them."""


class RunRoutes(Generic[S, C]):
    def __init__(self, runs: Runs[S, RunTarget, C], requests: RunRequests[S, C]) -> None:
        self._runs = runs
        self._requests = requests

    def routes(self) -> Sequence[Route]:
        asked = self._requests
        every, one = f"{asked.base}/runs", f"{asked.base}/runs/{{run_id}}"
        reads = Needs.STORE if asked.anywhere else Needs.ACTIVE
        writes = Needs.WRITES if asked.anywhere else Needs.ACTIVE
        return (
            Route(
                method="POST",
                path=every,
                handler=self.start,
                needs=writes,
                tag=asked.tag,
                permission=asked.operate,
                summary="Run a command on many agents; follow it at /runs/{run_id}/events",
                body=asked.body,
                answer=RunView,
                status=ACCEPTED,
            ),
            Route(
                method="POST",
                path=f"{every}/preview",
                handler=self.preview,
                needs=writes,
                tag=asked.tag,
                permission=asked.read,
                summary="Preview which targets a run selects, and why others are left out",
                body=PreviewBody,
                answer=PreviewView,
            ),
            Route(
                method="GET",
                path=every,
                handler=self.list,
                needs=reads,
                tag=asked.tag,
                permission=asked.read,
                summary="List runs, newest first",
                answer=CursorPage[RunView],
                query=(
                    Query(name="state", summary="Only in this state", choices=tuple(RunState)),
                    *BY_CURSOR,
                ),
            ),
            Route(
                method="GET",
                path=one,
                handler=self.show,
                needs=reads,
                tag=asked.tag,
                permission=asked.read,
                summary="Get a run, with the outcome of each target",
                answer=RunDetails,
            ),
            Route(
                method="GET",
                path=f"{one}/events",
                handler=self.events,
                needs=reads,
                tag=asked.tag,
                streams=True,
                permission=asked.read,
                answer=None,
                summary="Follow a run as server-sent events; `Last-Event-ID` resumes",
            ),
            Route(
                method="POST",
                path=f"{one}/cancel",
                handler=self.cancel,
                needs=writes,
                tag=asked.tag,
                permission=asked.operate,
                answer=CancelView,
                summary="Cancel a run: held targets are dropped, the others are asked to stop",
            ),
        )

    async def start(self, call: Call[Any]) -> Answer[RunView]:
        def answer(run: Run[S]) -> Answer[RunView]:
            return Answer(content=self._view(run))

        call.answering(lambda issued: answer(issued.beside))
        return answer(await self._runs.start(self._requests.order(call)))

    async def preview(self, call: Call[Any]) -> Answer[PreviewView]:
        body: PreviewBody = call.body
        found = self._runs.preview(call.scope, body.target.target(), wait=body.wait)
        skipped = [SkippedView(name=one.node_id, reason=one.reason) for one in found.skipped]
        return Answer(content=PreviewView(resolved=found.resolved, skipped=skipped))

    async def list(self, call: Call[Any]) -> Answer[CursorPage[RunView]]:
        state = call.query.get("state")
        if state is not None and state not in tuple(RunState):
            raise InvalidArgument(f"is not one of {', '.join(RunState)}", field="state")
        found = [
            run
            for run in self._runs.list(call.scope)
            if state is None or (run.status is not None and run.status.state == state)
        ]
        return Answer(content=cursor_page(call, found, self._view, newest_first=True))

    async def show(self, call: Call[Any]) -> Answer[RunDetails]:
        run = self._run(call)
        return Answer(
            content=RunDetails(
                run=self._view(run),
                results=[self._result(target) for target in in_turn(self._runs.targets(run))],
                skipped=[SkippedView(name=one.node_id, reason=one.reason) for one in run.spec.skipped],
            )
        )

    async def events(self, call: Call[Any]) -> Stream:
        run, mark = self._run(call), call.headers.get("last-event-id") or ""

        async def chunks() -> AsyncGenerator[bytes]:
            async for happened in self._runs.follow(run, mark=mark):
                yield self._block(run, happened)

        return Stream(chunks=chunks(), content_type=EVENT_STREAM)

    async def cancel(self, call: Call[Any]) -> Answer[CancelView]:
        run = self._run(call)
        done = await self._runs.cancel(call.scope, run.name, actor=self._requests.actor(call))
        return Answer(
            content=CancelView(
                id=run.name,
                cancelled=done.cancelled,
                told_to_stop=done.told_to_stop,
                already_ended=not (done.cancelled or done.told_to_stop),
            )
        )

    def _run(self, call: Call[Any]) -> Run[S]:
        return self._runs.get(call.scope, call.path["run_id"])

    def _view(self, run: Run[S]) -> RunView:
        spec, status = run.spec, run.status
        command, args = self._requests.program(spec)
        target = self._requests.target(spec)
        return RunView(
            id=run.name,
            state=status.state if status is not None else RunState.RUNNING,
            command=command,
            args=args,
            target=RunTargetView(
                names=target.names[:NAMES_SHOWN],
                named=len(target.names),
                selector=target.selector,
                all=target.everyone,
            ),
            policy=spec.policy,
            started_by=self._requests.started_by(spec.actor),
            started_at=spelled(spec.started_at_ns),
            ended_at=spelled_or_null(status.ended_at_ns if status is not None else None),
            targets=spec.targets,
            skipped=spec.skipped_count,
            summary=self._runs.summary(run),
        )

    def _result(self, target: CommandTarget) -> ResultView:
        assert target.status is not None
        found = self._requests.result(target)
        return ResultView(
            name=target.name,
            outcome=outcome_of(target),
            told_to_stop=target.status.told_to_stop,
            **msgspec.structs.asdict(found),
        )

    def _block(self, run: Run[S], happened: RunEvent | None) -> bytes:
        """One server-sent event. Output may be dropped, with a notice; results are always in `show`."""
        about = {"run_id": run.name}
        match happened:
            case None:
                return event("missing", {**about, "message": "older events are not kept any more"})
            case Started():
                data = {**about, "targets": happened.targets, "skipped": happened.skipped}
                return event("run_started", data, mark=happened.mark)
            case TargetStarted():
                return event("target_started", {**about, "name": happened.name}, mark=happened.mark)
            case TargetOutput():
                text = happened.output.decode("utf-8", "replace")
                data = {**about, "name": happened.name, "stream": happened.stream, "text": text}
                return event("target_output", data, mark=happened.mark)
            case TargetEnded():
                told = {**about, **msgspec.to_builtins(self._result(happened.target))}
                return event("target_ended", told, mark=happened.mark)
            case RunEnded():
                data = {**about, "state": happened.state, "summary": happened.summary}
                return event("run_ended", data, mark=happened.mark)
            case _:
                assert_never(happened)
