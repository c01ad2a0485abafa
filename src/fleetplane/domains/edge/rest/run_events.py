"""A run as server-sent events, in the documented words and in those of the first command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from fleetplane.domains.edge.rest import views
from fleetplane.domains.edge.runs.channel import EdgeRun
from fleetplane.domains.edge.streams.call_encoding import decode_outcome, public_id
from fleetplane.fleet.runs.events import RunEnded, RunEvent, Started, TargetEnded, TargetOutput, TargetStarted
from fleetplane.fleet.runs.records import RunState, TargetOutcome, outcome_of
from fleetplane.kernel.commands import CommandTarget
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
