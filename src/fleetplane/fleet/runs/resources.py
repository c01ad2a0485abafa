"""Runs of every domain as one resource of the API, and the Prometheus metrics of one domain's runs.

Edge has metric names of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    LogCall,
    LogLine,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.fleet.runs.channel import C, RunOrder, T
from fleetplane.fleet.runs.events import TargetEnded, TargetOutput
from fleetplane.fleet.runs.records import Run, RunKind, RunState, S, in_turn, outcome_of
from fleetplane.fleet.runs.runs import Runs
from fleetplane.kernel.access import Permission
from fleetplane.kernel.commands import OPEN, CommandTarget, state_of
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.times import spelled, spelled_or_null


class RunCollector(Collector):
    def __init__(self, runs: Runs[Any, Any, Any], *, domain: str) -> None:
        self._runs = runs
        self._prefix = f"fleetplane_{domain}_"

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            self._prefix + "runs_open", "Runs that have not ended", value=self._runs.open_count
        )
        ended = CounterMetricFamily(self._prefix + "runs", "Runs that ended, by how", labels=["outcome"])
        for state in RunState:
            if state is not RunState.RUNNING:
                ended.add_metric([state], self._runs.ended[state])
        yield ended


class RunSpecView(ResourceShape, frozen=True):
    domain: str
    command: str
    """What is run, in a word."""
    target: str
    """On whom, as a selector or a list of names."""
    mode: str
    batch: int
    max_concurrency: int | None
    on_failure: str
    stop_after: int
    require_min: int
    deadline: str
    """For one target."""
    deliver_within: str | None
    """How long targets that are away are waited for; null if they are not."""
    started_by: str


class RunStatusView(ResourceShape, frozen=True):
    state: str
    """`running`, `complete` (every target is ok), `partly_failed`, `failed` (no target is ok), `halted` or
    `cancelled`."""
    started_at: str
    ended_at: str | None
    targets: int
    skipped: int
    ok: int | None
    """Counted when the run has ended; so for the next three."""
    failed: int | None
    timed_out: int | None
    not_started: int | None


def run_view(
    run: Run[S], *, domain: str, command: Callable[[S], str], target: Callable[[S], str]
) -> ResourceView[RunSpecView, RunStatusView]:
    """What is shown of a run: neither its input nor its output."""
    spec, policy, status = run.spec, run.spec.policy, run.status
    summary = status.summary if status is not None else None
    return ResourceView(
        spec=RunSpecView(
            domain=domain,
            command=command(spec),
            target=target(spec),
            mode=policy.mode,
            batch=policy.batch,
            max_concurrency=policy.max_concurrency,
            on_failure=policy.on_failure,
            stop_after=policy.stop_after,
            require_min=policy.require_min,
            deadline=durations.format(policy.deadline_seconds),
            deliver_within=durations.format(policy.deliver_within_seconds) if policy.wait else None,
            started_by=spec.actor.partition("?")[0],
        ),
        status=RunStatusView(
            state=status.shown if status is not None else RunState.RUNNING,
            started_at=spelled(spec.started_at_ns),
            ended_at=spelled_or_null(status.ended_at_ns if status is not None else None),
            targets=spec.targets,
            skipped=spec.skipped_count,
            ok=None if summary is None else summary.ok,
            failed=None if summary is None else summary.err,
            timed_out=None if summary is None else summary.timed_out,
            not_started=None if summary is None else summary.not_started,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """What became of one target, in its own words."""

    stdout: str = ""
    stderr: str = ""
    message: str = ""


async def run_lines(
    runs: Any, call: LogCall, printed: Callable[[Any, CommandTarget], Printed]
) -> AsyncGenerator[LogLine, None]:
    """What a run's targets printed, each line with the target's name; with `follow`, until the run is over.

    What was told as it was printed is not told again with the target's outcome.
    """
    query, told = call.query, set[str]()

    def lines(name: str, level: str, text: str, at: str) -> Iterator[LogLine]:
        for line in text.splitlines():
            if query.source in ("", name) and query.contains.lower() in line.lower():
                yield LogLine(at=at, level=level, source=name, message=line)

    def ended(target: CommandTarget) -> Iterator[LogLine]:
        found, at = printed(call.domain, target), spelled(target.updated_at_ns)
        if target.name not in told:
            yield from lines(target.name, "", found.stdout, at)
            yield from lines(target.name, "stderr", found.stderr, at)
        if found.message:
            yield from lines(target.name, str(outcome_of(target)), found.message, at)

    if not query.follow:
        there = [
            line
            for target in in_turn(runs.targets(call.stored))
            if state_of(target) not in OPEN
            for line in ended(target)
        ]
        for line in there[len(there) - min(query.tail, len(there)) :]:
            yield line
        return
    async with aclosing(runs.follow(call.stored)) as events:
        async for happened in events:
            if isinstance(happened, TargetOutput):
                told.add(happened.name)
                text, level = happened.output.decode("utf-8", "replace"), happened.stream
                for line in lines(happened.name, "" if level == "stdout" else level, text, ""):
                    yield line
            elif isinstance(happened, TargetEnded):
                for line in ended(happened.target):
                    yield line


async def begin(
    call: ActionCall, runs: Runs[Any, T, C], order: RunOrder[T, C], *, scope: str | None = None
) -> Begun:
    """Start a run for an action; the same action asked for again with its key names the same run."""

    def named(run: Run[Any]) -> Begun:
        return Begun(resource="runs", name=run.name, scope=call.scope if scope is None else scope)

    actor = call.promise(lambda issued: named(issued.beside))
    return named(await runs.start(replace(order, actor=actor)))


def run_resource(
    kind: RunKind[S],
    *,
    domain: str,
    place: Callable[[AnyResource, ViewReader], str],
    read: Permission,
    operate: Permission,
    command: Callable[[S], str],
    target: Callable[[S], str],
    runs: Callable[[Any], Any],
    printed: Callable[[Any, CommandTarget], Printed],
    anywhere: bool = False,
) -> PublicResource[RunSpecView, RunStatusView]:
    """The runs of one domain; `runs` finds its `Runs` in the running domain, and `printed` what one target
    printed. `anywhere`: its agents are served by every server, so any of them cancels a run."""

    async def cancel(call: ActionCall) -> Begun | None:
        await runs(call.domain).cancel(call.stored.scope, call.stored.name, actor=call.actor)
        return None

    return PublicResource(
        name="run",
        plural="runs",
        summary="A command on many agents",
        kind=kind,
        spec=RunSpecView,
        status=RunStatusView,
        view=lambda run, _reading: run_view(run, domain=domain, command=command, target=target),
        place=place,
        permission=read,
        columns=COLUMNS,
        verbs=READING | {ResourceVerb.LOGS},
        logs=lambda call: run_lines(runs(call.domain), call, printed),
        actions=(
            ResourceAction(
                name="cancel",
                summary="Drop held targets, and ask the others to stop",
                permission=operate,
                run=cancel,
                anywhere=anywhere,
            ),
        ),
        search=(".metadata.name", ".spec.command", ".spec.startedBy"),
    )


COLUMNS = (
    Column(title="NAME", value=".metadata.name"),
    Column(title="DOMAIN", value=".spec.domain"),
    Column(title="COMMAND", value=".spec.command"),
    Column(title="STATE", value=".status.state"),
    Column(title="TARGETS", value=".status.targets", type="number"),
    Column(title="STARTED", value=".status.startedAt", type="age"),
    Column(title="TARGET", value=".spec.target", wide=True),
    Column(title="BY", value=".spec.startedBy", wide=True),
)
