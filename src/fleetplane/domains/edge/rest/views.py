"""What REST shows of daemons, groups and runs, in both shapes that clients know. Pure.

The documented shapes are the default. The shapes that the first command line was shipped with
differ in four answers; everything else is a superset of both.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET

from fleetplane.domains.edge.identity.enrolment_tokens import Invitation
from fleetplane.domains.edge.kinds import Capabilities, EdgeNode, Enrollment, NodeState, NodeStatus, tenant_of
from fleetplane.domains.edge.nodes.groups import EdgeGroup
from fleetplane.domains.edge.nodes.registry import shown_name
from fleetplane.domains.edge.rest.shapes import (
    EdgeShape,
    IssuedToken,
    NodeOfRun,
    ShownCapabilities,
    ShownGroup,
    ShownHost,
    ShownMember,
    ShownPolicy,
    ShownRun,
    ShownSelector,
    ShownSummary,
    ShownTarget,
    ShownToken,
)
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.channel import EdgeRun
from fleetplane.domains.edge.streams.call_encoding import ToolOutcome, decode_outcome, public_id
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.records import RunState, Summary, TargetOutcome, outcome_of
from fleetplane.kernel.commands import CommandState, CommandTarget, state_of
from fleetplane.kernel.values.times import spelled, spelled_or_null

S = TypeVar("S", bound=EdgeShape)


def invitation(made: Invitation, *, shipped: bool) -> IssuedToken:
    return IssuedToken(
        token=made.token,
        token_id=made.jti,
        expires_at=spelled(made.expires_at_ns),
        controller_endpoint=made.controller_endpoint,
        qr_payload=made.shipped_hint if shipped else made.qr_payload,
        command_hint=made.shipped_hint if shipped else made.command_hint,
    )


def enrollment(found: Enrollment, now_ns: int) -> ShownToken:
    spec = found.spec
    state = "open"
    if spec.redeemed_at_ns is not None:
        state = "redeemed"
    elif spec.revoked:
        state = "revoked"
    elif spec.expires_at_ns <= now_ns:
        state = "expired"
    return ShownToken(
        token_id=found.name,
        tenant_id=tenant_of(found.scope),
        issued_to=spec.issued_to,
        issued_by=spec.issued_by,
        issued_at=spelled(spec.issued_at_ns),
        expires_at=spelled(spec.expires_at_ns),
        state=state,
        redeemed_by=spec.redeemed_by or None,
        node_id=spec.node_id or None,
        replace=spec.replace,
    )


# Daemons.


def host(node: EdgeNode, *, heard_at_ns: int | None) -> ShownHost:
    """One daemon; `heard_at_ns` is what its open stream knows better than the record."""
    status = node.status or NodeStatus(state=NodeState.DISCONNECTED, since_ns=node.spec.enrolled_at_ns)
    heard = spelled_or_null(heard_at_ns or status.last_heartbeat_at_ns)
    return ShownHost(
        node_id=node.name,
        id=node.name,
        name=shown_name(node),
        tenant_id=tenant_of(node.scope),
        status=targets.words(status.state),
        connected=status.state in (NodeState.CONNECTED, NodeState.DRAINING, NodeState.UNHEALTHY),
        since=spelled(status.since_ns),
        last_heartbeat_at=heard,
        last_seen_at=heard,
        enrolled_at=spelled(node.spec.enrolled_at_ns),
        tags=list(node.spec.tags),
        os=status.capabilities.os,
        arch=status.capabilities.arch,
        capabilities=_capabilities(status.capabilities),
        desired=node.spec.desired,
        config_version=status.config_version or None,
        key_version=node.spec.key_version,
    )


def _capabilities(found: Capabilities) -> ShownCapabilities:
    return ShownCapabilities(
        os=found.os,
        arch=found.arch,
        local_tools=list(found.local_tools),
        mount_points=list(found.mount_points),
        labels=found.labels,
    )


def brief(node: EdgeNode) -> ShownMember:
    """A daemon as a member of something."""
    state = node.status.state if node.status is not None else NodeState.DISCONNECTED
    return ShownMember(node_id=node.name, name=shown_name(node), status=targets.words(state))


# Groups.


def selector(found: selectors.Selector) -> ShownSelector:
    return _shaped(selectors.to_json(found), ShownSelector)


def group(found: EdgeGroup, *, members: Sequence[EdgeNode]) -> ShownGroup:
    spec = found.spec
    return ShownGroup(
        id=found.name,
        name=spec.name,
        tenant_id=tenant_of(found.scope),
        selector=selector(spec.selector) if spec.selector is not None else None,
        pinned_members=list(spec.pinned_members),
        created_by=spec.created_by,
        created_at=spelled(spec.created_at_ns),
        resolved_member_count=len(members),
    )


# Runs.


def policy(found: RunPolicy) -> ShownPolicy:
    return ShownPolicy(
        mode=f"rolling={found.batch}" if found.mode == "rolling" else found.mode,
        max_concurrency=found.max_concurrency,
        failure_policy=f"stop-after={found.stop_after}"
        if found.on_failure == "stop-after"
        else found.on_failure,
        require_min_targets=found.require_min,
        per_target_deadline_secs=found.deadline_seconds,
        durable=found.wait,
        deliver_by_secs=found.deliver_within_seconds if found.wait else None,
    )


def run(found: EdgeRun, summary: Summary) -> ShownRun:
    spec, status = found.spec, found.status
    state = status.state if status is not None else RunState.RUNNING
    return ShownRun(
        fleet_command_id=public_id(found.name),
        tool=spec.tool,
        target=_shaped(targets.to_json(spec.target), ShownTarget),
        policy=policy(spec.policy),
        started_by=spec.actor,
        started_at=spelled(spec.started_at_ns),
        ended_at=spelled_or_null(status.ended_at_ns if status is not None else None),
        outcome=state,
        targets_resolved=spec.targets,
        targets_skipped=spec.skipped_count,
        summary=summary_of(summary),
    )


def summary_of(summary: Summary) -> ShownSummary:
    """Counts of how targets ended, and of those that have not while there are any."""
    return ShownSummary(
        ok=summary.ok,
        err=summary.err,
        timed_out=summary.timed_out,
        cancelled=summary.cancelled,
        not_started=summary.not_started,
        running=summary.running or UNSET,
        pending=summary.pending or UNSET,
    )


def node_of_run(target: CommandTarget) -> NodeOfRun:
    assert target.status is not None
    kept = decode_outcome(target.status.result)
    return NodeOfRun(
        node_id=target.name,
        command_id=public_id(target.spec.command),
        outcome=outcome_of(target),
        code=kept.code or (target.status.detail if state_of(target) is CommandState.FAILED else "") or None,
        message=target.status.detail or None,
        told_to_stop=target.status.told_to_stop,
        exit_code=kept.exit_code,
        duration_ms=milliseconds(kept.duration_seconds),
        stdout_tail=text(kept.stdout_tail),
        stderr_tail=text(kept.stderr_tail),
    )


def result(target: CommandTarget, kept: ToolOutcome) -> dict[str, dict[str, str | int | None]]:
    """The outcome of a target, as an object with one key."""
    assert target.status is not None
    detail = target.status.detail
    match outcome_of(target):
        case TargetOutcome.OK:
            return {
                "ok": {"exit_code": kept.exit_code or 0, "duration_ms": milliseconds(kept.duration_seconds)}
            }
        case TargetOutcome.TIMED_OUT:
            return {"timed_out": {"message": detail}}
        case TargetOutcome.CANCELLED:
            return {"cancelled": {"reason": detail}}
        case TargetOutcome.NOT_STARTED:
            return {"not_started": {"reason": detail}}
        case _:
            return {"err": {"code": kept.code or "failed", "message": detail, "exit_code": kept.exit_code}}


def chunk(stream: str, output: bytes) -> dict[str, str]:
    """Some output. What is not text goes in Base64 beside what can be read of it."""
    try:
        return {stream: output.decode()}
    except UnicodeDecodeError:
        return {stream: text(output), f"{stream}_base64": base64.b64encode(output).decode()}


def text(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _shaped(spelled_out: object, shape: type[S]) -> S:
    """What is spelled as JSON already, as a shape."""
    return msgspec.json.decode(msgspec.json.encode(spelled_out), type=shape)
