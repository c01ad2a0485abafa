"""A run as server-sent events, in the documented words and in those of the first command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from fleetplane.domains.edge import views
from fleetplane.domains.edge.calls import decode_outcome, public_id
from fleetplane.domains.edge.fleet import FleetRuns
from fleetplane.domains.edge.run_feed import RunEvent
from fleetplane.domains.edge.runs import Outcome, Run, RunState, Summary, outcome_of
from fleetplane.kernel.commands import OPEN, CommandTarget, state_of
from fleetplane.web.streaming import event as block

STORED = "stored"
"""The epoch of what is told from the store."""


async def events(runs: FleetRuns, run: Run, *, mark: str) -> AsyncIterator[RunEvent | None]:
    """What happened and happens in a run after a reader's mark; None where something is missing.

    A mark from before a restart means nothing any more, and everything known is told again. Of a
    run that ended before the restart, the results are told from what is stored.
    """
    epoch, _, number = mark.rpartition("-")
    seen = int(number) if number.isdecimal() and len(number) <= 12 else 0
    feed = runs.feed(run)
    if feed is not None:
        async for event in feed.after(seen if epoch == feed.epoch else 0):
            yield event
        return
    seen = seen if epoch == STORED else 0
    for place, event in enumerate(_stored(runs, run), 1):
        if place > seen:
            yield msgspec.structs.replace(event, number=place, epoch=STORED)


def _stored(runs: FleetRuns, run: Run) -> Iterator[RunEvent]:
    for target in runs.targets(run):
        if state_of(target) not in OPEN:
            assert target.status is not None
            kept = decode_outcome(target.status.result)
            yield RunEvent(
                number=0, kind="result", node_id=target.name, data={"target": target, "outcome": kept}
            )
    if run.status is not None and run.status.ended_at_ns is not None:
        data = {"summary": runs.summary(run), "state": run.status.state}
        yield RunEvent(number=0, kind="done", data=data)


def documented(run: Run, event: RunEvent | None) -> Iterator[bytes]:
    """Events with names, of which a reader may miss output but never a result."""
    run_id = public_id(run.name)
    if event is None:
        yield block("error", {"code": "OutputMissing", "message": "some output is not kept any more"})
        return
    about = {"node_id": event.node_id, "command_id": run_id}
    match event.kind:
        case "started":
            yield block("fleet_started", {"fleet_command_id": run_id, **event.data}, mark=event.mark)
        case "node_started":
            yield block("command_started", about, mark=event.mark)
        case "progress":
            chunk = views.chunk(event.data["stream"], event.data["output"])
            yield block("command_progress", {**about, "chunk": chunk}, mark=event.mark)
        case "result":
            result = views.result(event.data["target"], event.data["outcome"])
            yield block("command_result", {**about, "result": result}, mark=event.mark)
        case "done":
            yield from _over(run, event)


def _over(run: Run, event: RunEvent) -> Iterator[bytes]:
    summary: Summary = event.data["summary"]
    state: RunState = event.data["state"]
    if state is RunState.HALTED:
        yield block("error", {"code": "Halted", "message": "too much failed; the rest was taken back"})
    yield block(
        "fleet_result",
        {
            "fleet_command_id": public_id(run.name),
            "outcome": state,
            "targets_resolved": run.spec.targets,
            "targets_skipped": run.spec.skipped_count,
            "summary": views.summary_of(summary),
        },
        mark=event.mark,
    )


def shipped(run: Run, event: RunEvent | None) -> Iterator[bytes]:
    """Data only, each an object with one key that says what it is."""
    if event is None:
        return
    run_id = public_id(run.name)
    data: dict[str, Any] = {"fleet_command_id": run_id}
    match event.kind:
        case "started":
            kind = "Started"
            data |= {
                "resolved": event.data["targets_resolved"],
                "skipped": [{"node_id": one.node_id, "reason": one.reason} for one in run.spec.skipped],
            }
        case "node_started":
            kind, data = "NodeStarted", {**data, "node_id": event.node_id, "command_id": run_id}
        case "progress":
            kind = "NodeProgress"
            output = views.text(event.data["output"])
            data |= {"node_id": event.node_id, "stream": event.data["stream"], "chunk": output}
        case "result":
            kind = "NodeCompleted"
            data |= {"node_id": event.node_id, **_legacy(event.data["target"])}
        case _:
            cancelled = event.data["state"] is RunState.CANCELLED
            if cancelled:
                yield block("", {"Cancelled": {"fleet_command_id": run_id}}, mark=event.mark)
            kind = "Done"
            data |= {"summary": views.summary_of(event.data["summary"])}
    yield block("", {kind: data}, mark=event.mark)


def _legacy(target: CommandTarget) -> dict[str, Any]:
    one = views.node_of_run(target)
    ok = outcome_of(target) is Outcome.OK
    return {
        "ok": ok,
        "exit_code": one["exit_code"] if one["exit_code"] is not None else (0 if ok else -1),
        "stdout": one["stdout_tail"],
        "stderr": one["stderr_tail"],
        "error_kind": None if ok else one["code"] or one["outcome"],
        "error_message": None if ok else one["message"],
    }
