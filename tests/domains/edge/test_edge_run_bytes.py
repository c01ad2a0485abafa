# ruff: noqa: E501  # lines as clients see them
"""What clients and stored records know of edge's runs, byte for byte as servers before `fleet.runs` had it."""

from __future__ import annotations

import msgspec

from fleetplane.domains.edge.rest import runs
from fleetplane.domains.edge.runs.channel import EDGE_RUN, EdgeRun, EdgeRunSpec
from fleetplane.domains.edge.runs.target_spellings import SpelledTarget, TargetKind
from fleetplane.domains.edge.streams.call_encoding import ToolOutcome, encode_outcome
from fleetplane.fleet.runs.events import RunEnded, RunEvent, Started, TargetEnded, TargetOutput, TargetStarted
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.records import RunState, RunStatus, Summary
from fleetplane.fleet.runs.targets import Skipped, SkipReason
from fleetplane.kernel.commands import COMMAND_TARGET, CommandState, CommandTarget
from fleetplane.kernel.commands.rules import CommandTargetSpec, TargetStatus
from fleetplane.kernel.resources import Kind, Resource

RUN_ID, NODE = "00000000000000000000000000000007", "11111111-1111-1111-1111-111111111111"
STORED = {
    "target": {
        "kind": "Group",
        "name": "prod",
        "selector": {"os": "", "arch": "", "tools": [], "labels": [], "tags": []},
    },
    "tool": "cmd.run",
    "args_json": b"{}",
    "security_context": "zaru-free",
    "policy": {
        "mode": "rolling",
        "batch": 2,
        "max_concurrency": None,
        "on_failure": "stop-after",
        "stop_after": 3,
        "require_min": 1,
        "deadline_seconds": 60.0,
        "wait": False,
        "deliver_within_seconds": 3600.0,
    },
    "actor": "operator/ops",
    "targets": 1,
    "skipped_count": 1,
    "skipped": [{"node_id": "gone", "reason": "NotFound"}],
    "started_at_ns": 1_700_000_000_000_000_000,
}
SPEC = EdgeRunSpec(
    target=SpelledTarget(kind=TargetKind.GROUP, name="prod"),
    tool="cmd.run",
    args_json=b"{}",
    security_context="zaru-free",
    policy=RunPolicy(
        mode="rolling",  # type: ignore[arg-type]
        batch=2,
        on_failure="stop-after",  # type: ignore[arg-type]
        stop_after=3,
        require_min=1,
    ),
    actor="operator/ops",
    targets=1,
    skipped_count=1,
    skipped=(Skipped(node_id="gone", reason=SkipReason.NOT_FOUND),),
    started_at_ns=1_700_000_000_000_000_000,
)


def test_a_run_that_an_earlier_server_stored_decodes_and_no_field_has_another_name() -> None:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(STORED), type=EdgeRunSpec)
    assert msgspec.to_builtins(found) == msgspec.to_builtins(SPEC)
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(SPEC))
    assert written.keys() == STORED.keys()
    assert written["policy"].keys() == STORED["policy"].keys()  # type: ignore[attr-defined]
    assert EDGE_RUN.name == "edge-run"


def made(kind: Kind[object, object], spec: object, status: object, name: str) -> Resource[object, object]:
    return Resource(
        kind=kind.name,
        scope="tenant/acme",
        name=name,
        uid="u",
        labels={},
        spec=spec,
        status=status,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=1,
        updated_at_ns=1,
    )


def run() -> EdgeRun:
    return made(EDGE_RUN, SPEC, RunStatus(), RUN_ID)  # type: ignore[arg-type,return-value]


def target() -> CommandTarget:
    kept = ToolOutcome(
        code="nonzero_exit", exit_code=3, duration_seconds=0.25, stdout_tail=b"out", stderr_tail=b"err"
    )
    spec = CommandTargetSpec(
        command=RUN_ID,
        command_scope="tenant/acme",
        channel="edge",
        verb="cmd.run",
        target=NODE,
        deliver_by_ns=1,
    )
    status = TargetStatus(
        state=CommandState.FAILED, changed_at_ns=1, deliveries=1, detail="exit 3", result=encode_outcome(kept)
    )
    return made(COMMAND_TARGET, spec, status, NODE)  # type: ignore[arg-type,return-value]


EVENTS: list[RunEvent] = [
    Started(number=1, epoch="e", targets=1, skipped=1),
    TargetStarted(number=2, epoch="e", name=NODE),
    TargetOutput(number=3, epoch="e", name=NODE, stream="stdout", output=b"a\xff"),
    TargetEnded(number=4, epoch="e", target=target()),
    RunEnded(number=5, epoch="e", summary=Summary(err=1, running=1), state=RunState.HALTED),
    RunEnded(number=6, epoch="e", summary=Summary(err=1), state=RunState.CANCELLED),
]
DOCUMENTED = b"".join(
    (
        b"id: e-1\n",
        b"event: fleet_started\n",
        b'data: {"fleet_command_id":"00000000-0000-0000-0000-000000000007","targets_resolved":1,"targets_skipped":1,"tool":"cmd.run"}\n',
        b"\n",
        b"id: e-2\n",
        b"event: command_started\n",
        b'data: {"node_id":"11111111-1111-1111-1111-111111111111","command_id":"00000000-0000-0000-0000-000000000007"}\n',
        b"\n",
        b"id: e-3\n",
        b"event: command_progress\n",
        b'data: {"node_id":"11111111-1111-1111-1111-111111111111","command_id":"00000000-0000-0000-0000-000000000007","chunk":{"stdout":"a\xef\xbf\xbd","stdout_base64":"Yf8="}}\n',
        b"\n",
        b"id: e-4\n",
        b"event: command_result\n",
        b'data: {"node_id":"11111111-1111-1111-1111-111111111111","command_id":"00000000-0000-0000-0000-000000000007","result":{"err":{"code":"nonzero_exit","message":"exit 3","exit_code":3}}}\n',
        b"\n",
        b"event: error\n",
        b'data: {"code":"Halted","message":"too much failed; the rest was taken back"}\n',
        b"\n",
        b"id: e-5\n",
        b"event: fleet_result\n",
        b'data: {"fleet_command_id":"00000000-0000-0000-0000-000000000007","outcome":"halted","targets_resolved":1,"targets_skipped":1,"summary":{"ok":0,"err":1,"timed_out":0,"cancelled":0,"not_started":0,"running":1}}\n',
        b"\n",
        b"id: e-6\n",
        b"event: fleet_result\n",
        b'data: {"fleet_command_id":"00000000-0000-0000-0000-000000000007","outcome":"cancelled","targets_resolved":1,"targets_skipped":1,"summary":{"ok":0,"err":1,"timed_out":0,"cancelled":0,"not_started":0}}\n',
        b"\n",
        b"event: error\n",
        b'data: {"code":"OutputMissing","message":"some output is not kept any more"}\n',
        b"\n",
    )
)
SHIPPED = b"".join(
    (
        b"id: e-1\n",
        b'data: {"Started":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","resolved":1,"skipped":[{"node_id":"gone","reason":"NotFound"}]}}\n',
        b"\n",
        b"id: e-2\n",
        b'data: {"NodeStarted":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","node_id":"11111111-1111-1111-1111-111111111111","command_id":"00000000-0000-0000-0000-000000000007"}}\n',
        b"\n",
        b"id: e-3\n",
        b'data: {"NodeProgress":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","node_id":"11111111-1111-1111-1111-111111111111","stream":"stdout","chunk":"a\xef\xbf\xbd"}}\n',
        b"\n",
        b"id: e-4\n",
        b'data: {"NodeCompleted":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","node_id":"11111111-1111-1111-1111-111111111111","ok":false,"exit_code":3,"stdout":"out","stderr":"err","error_kind":"nonzero_exit","error_message":"exit 3"}}\n',
        b"\n",
        b"id: e-5\n",
        b'data: {"Done":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","summary":{"ok":0,"err":1,"timed_out":0,"cancelled":0,"not_started":0,"running":1}}}\n',
        b"\n",
        b'data: {"Cancelled":{"fleet_command_id":"00000000-0000-0000-0000-000000000007"}}\n',
        b"\n",
        b"id: e-6\n",
        b'data: {"Done":{"fleet_command_id":"00000000-0000-0000-0000-000000000007","summary":{"ok":0,"err":1,"timed_out":0,"cancelled":0,"not_started":0}}}\n',
        b"\n",
    )
)


def test_events_are_told_byte_for_byte_as_before() -> None:
    told = [b"".join(runs.documented(run(), event)) for event in (*EVENTS, None)]
    assert b"".join(told) == DOCUMENTED
    assert b"".join(b"".join(runs.shipped(run(), event)) for event in (*EVENTS, None)) == SHIPPED
