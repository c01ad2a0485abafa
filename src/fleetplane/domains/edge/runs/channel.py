"""The runs of edge: tools on daemons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from fleetplane.domains.edge.kinds import EdgeNode, tenant_of
from fleetplane.domains.edge.nodes.groups import EdgeGroups
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.target_spellings import SpelledTarget, TargetKind
from fleetplane.domains.edge.streams.call_encoding import (
    ANSWER_GRACE_SECONDS,
    Tallies,
    ToolCall,
    decode_outcome,
    encode_call,
    public_id,
)
from fleetplane.fleet.runs import records
from fleetplane.fleet.runs.channel import CommandIssue, RunChannel, RunOrder
from fleetplane.fleet.runs.records import RunKind, RunSpec, RunStatus
from fleetplane.fleet.runs.runs import Runs
from fleetplane.fleet.runs.targets import Skipped, TargetCandidate
from fleetplane.kernel.access import who
from fleetplane.kernel.commands import Commands, CommandTarget
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.values.documents import check_document

ARGS_LIMIT_BYTES = 128 * 1024


class EdgeRunSpec(RunSpec, frozen=True):
    """As it is stored: no field may be renamed."""

    target: SpelledTarget
    tool: str
    args_json: bytes
    security_context: str


EDGE_RUN: RunKind[EdgeRunSpec] = Kind("edge-run", EdgeRunSpec, RunStatus, is_secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """A tool, and what it is given."""

    tool: str
    args_json: bytes
    security_context: str


EdgeRun: TypeAlias = records.Run[EdgeRunSpec]
EdgeOrder: TypeAlias = RunOrder[SpelledTarget, ToolRequest]
EdgeRuns: TypeAlias = Runs[EdgeRunSpec, SpelledTarget, ToolRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOf:
    """How daemons are found; kept small so that runs can be tried without any."""

    list: Callable[[str], Sequence[EdgeNode]]
    get: Callable[[str, str], EdgeNode]
    is_connected: Callable[[str], bool]


def encoded_args(args: Mapping[str, Any]) -> bytes:
    """A tool's arguments as they are stored; raises `InvalidArgument` for what no command could carry."""
    check_document(args, field="args", within=1)
    return msgspec.json.encode(args)


class EdgeChannel(RunChannel[EdgeRunSpec, SpelledTarget, ToolRequest]):
    domain = "edge"
    kind = EDGE_RUN
    nobody = "no daemon that is meant can be reached"
    nobody_cause = "EdgeUnavailable"

    def __init__(
        self,
        *,
        ledger: Commands,
        groups: EdgeGroups,
        nodes: NodesOf,
        check: Callable[[ToolCall], None] = lambda _: None,
    ) -> None:
        """`check` refuses what could not be sent."""
        self.ledger = ledger
        self._groups = groups
        self._nodes = nodes
        self._check = check
        self.tallies = Tallies()

    # Who is meant.

    def candidates(
        self, scope: str, target: SpelledTarget
    ) -> tuple[Sequence[TargetCandidate], Sequence[Skipped]]:
        tenant = tenant_of(scope)
        everyone = self._nodes.list(tenant)
        missing: list[Skipped] = []
        match target.kind:
            case TargetKind.NODE:
                chosen = [self._node(tenant, target.name, everyone)]
            case TargetKind.GROUP:
                group = self._groups.get(tenant, target.name).spec
                chosen, missing = targets.choose(everyone, group.selector, group.pinned_members)
            case TargetKind.SELECTOR | TargetKind.ALL:
                chosen, missing = targets.choose(everyone, target.selector)
        return [targets.candidate(node) for node in chosen], missing

    def _node(self, tenant: str, name: str, everyone: Iterable[EdgeNode]) -> EdgeNode:
        named = [node for node in everyone if node.spec.display_name == name and name]
        if len(named) > 1:
            raise InvalidArgument(f"{len(named)} daemons are named {name!r}; give an id", field="target")
        node = named[0] if named else self._nodes.get(tenant, name)
        if node.spec.revoked_at_ns is not None:
            raise NotFound(f"there is no daemon {name!r}")
        return node

    def is_present(self, name: str) -> bool:
        return self._nodes.is_connected(name)

    # What is run.

    def issue(self, order: EdgeOrder) -> CommandIssue:
        asked, policy = order.call, order.policy
        if not asked.tool:
            raise InvalidArgument("must not be empty", field="tool")
        if len(asked.args_json) > ARGS_LIMIT_BYTES:
            raise InvalidArgument(f"takes more than {ARGS_LIMIT_BYTES} bytes", field="args")
        call = ToolCall(
            tool=asked.tool,
            args_json=asked.args_json,
            security_context=asked.security_context,
            tenant=tenant_of(order.scope),
            actor=who(order.actor),
            deadline_seconds=policy.deadline_seconds,
        )
        self._check(call)
        return CommandIssue(
            verb=asked.tool,
            payload=encode_call(call),
            repeatable=policy.wait,
            run_for_seconds=policy.deadline_seconds + ANSWER_GRACE_SECONDS,
        )

    def spec(self, order: EdgeOrder, common: RunSpec) -> EdgeRunSpec:
        asked = order.call
        return EdgeRunSpec(
            **msgspec.structs.asdict(common),
            target=order.target,
            tool=asked.tool,
            args_json=asked.args_json,
            security_context=asked.security_context,
        )

    def shown_id(self, name: str) -> str:
        return public_id(name)

    # Figures.

    def left_out(self, skipped: Collection[Skipped]) -> None:
        self.tallies.skipped.update(one.reason for one in skipped)

    def printed(self, target: CommandTarget) -> Iterable[tuple[str, bytes]]:
        assert target.status is not None
        kept = decode_outcome(target.status.result)
        return (("stdout", kept.stdout_tail), ("stderr", kept.stderr_tail))

    def target_ended(self, spec: EdgeRunSpec, target: CommandTarget) -> None:
        assert target.status is not None
        self.tallies.ended(spec.tool, target, decode_outcome(target.status.result))
