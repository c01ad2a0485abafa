"""How a run is said to have ended: `complete` only where every target is ok."""

from __future__ import annotations

import msgspec
import pytest

from fleetplane.cli.running.run_view import shown_state, state_cell
from fleetplane.fleet.runs.records import RunState, RunStatus, Summary


@pytest.mark.parametrize(
    ("state", "summary", "shown", "style"),
    [
        (RunState.COMPLETE, Summary(ok=3), "complete", "green"),
        (RunState.COMPLETE, Summary(err=3), "failed", "red"),
        (RunState.COMPLETE, Summary(timed_out=1, not_started=2), "failed", "red"),
        (RunState.COMPLETE, Summary(ok=2, err=1), "partly_failed", "yellow"),
        (RunState.COMPLETE, Summary(ok=2, not_started=1), "partly_failed", "yellow"),
        (RunState.HALTED, Summary(err=1, not_started=2), "halted", ""),
        (RunState.CANCELLED, Summary(cancelled=2), "cancelled", ""),
    ],
)
def test_a_run_that_failed_is_not_called_complete(
    state: RunState, summary: Summary, shown: str, style: str
) -> None:
    assert RunStatus(state=state, summary=summary, ended_at_ns=1).shown == shown
    cell = state_cell(state, msgspec.structs.asdict(summary))
    assert (cell.text, cell.style) == (shown, style)
    assert RunStatus().shown == "running"
    assert shown_state("running", {"ok": 0, "running": 2}) == "running"
