"""Read what a request asks for: which daemons, and the policy of the run. Pure.

A target as text: `@NODE` (its id or name), `group:NAME`, `all`, or a selector. In JSON: `{"Node": id}`,
`{"Group": id}`, `{"Selector": {…}}`, `"All"` or `{"All": null}`. A policy is read in every spelling that
clients use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from fleetplane.domains.edge.kinds import Capabilities, Desired, EdgeNode, NodeState
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs.selectors import Selector
from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.fleet.runs.targets import Skipped, SkipReason, TargetCandidate
from fleetplane.kernel.errors import InvalidArgument

_WITH_NUMBER = re.compile(r"([a-z-]+)[=(](\d{1,6})\)?")
_MODES = {"sequential": Mode.SEQUENTIAL, "parallel": Mode.PARALLEL, "rolling": Mode.ROLLING}
SPELLED = {
    "require_min": "require_min_targets",
    "deadline_seconds": "deadline_secs",
    "deliver_within_seconds": "deliver_by_secs",
}
"""What clients of edge call fields of a policy."""
_FAILURES = {
    "fail-fast": OnFailure.FAIL_FAST,
    "failfast": OnFailure.FAIL_FAST,
    "continue": OnFailure.CONTINUE,
    "continue-on-error": OnFailure.CONTINUE,
    "continueonerror": OnFailure.CONTINUE,
    "stop-after": OnFailure.STOP_AFTER,
    "stopafter": OnFailure.STOP_AFTER,
}


class PolicyBody(msgspec.Struct, forbid_unknown_fields=True):
    """The documented place of a policy, and the fields that may stand flat beside the target."""

    mode: Any = None
    batch: int | None = None
    max_concurrency: int | None = None
    failure_policy: Any = None
    stop_after: int | None = None
    require_min_targets: int | None = None
    per_target_deadline_secs: float | None = None
    deadline_secs: float | None = None
    durable: bool = False
    deliver_by_secs: float | None = None


def policy_of(asked: PolicyBody, *, deadline_seconds: float) -> RunPolicy:
    """`deadline_seconds` counts when the client says nothing."""
    mode, batch = _read(asked.mode, _MODES, Mode.SEQUENTIAL, field="mode")
    on_failure, stop_after = _read(
        asked.failure_policy, _FAILURES, OnFailure.FAIL_FAST, field="failure_policy"
    )
    deadline = asked.per_target_deadline_secs or asked.deadline_secs or deadline_seconds
    policy = RunPolicy(
        mode=mode,
        batch=_first(batch, asked.batch, 1),
        max_concurrency=asked.max_concurrency,
        on_failure=on_failure,
        stop_after=_first(stop_after, asked.stop_after, 1),
        require_min=asked.require_min_targets or 0,
        deadline_seconds=deadline,
        wait=asked.durable,
        deliver_within_seconds=_first(asked.deliver_by_secs, RunPolicy().deliver_within_seconds),
    )
    if policy.mode is Mode.ROLLING and batch is None and asked.batch is None:
        raise InvalidArgument("rolling needs a number of targets at a time: rolling=N", field="mode")
    if policy.on_failure is OnFailure.STOP_AFTER and stop_after is None and asked.stop_after is None:
        raise InvalidArgument("stop-after needs a number of failures: stop-after=N", field="failure_policy")
    policy.check(SPELLED)
    return policy


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _read(value: object, words: dict[str, Any], default: Any, *, field: str) -> tuple[Any, int | None]:
    """A word, a word with its number (`rolling=5`), or an object with one key (`{"Rolling": …}`)."""
    number: object = None
    if isinstance(value, dict) and len(value) == 1:
        ((value, number),) = value.items()
        if isinstance(number, dict) and len(number) == 1:
            (number,) = number.values()
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise InvalidArgument("its number must be a whole one", field=field)
    if value is None:
        return default, None
    word = str(value).strip().lower().replace("_", "-")
    if (found := _WITH_NUMBER.fullmatch(word)) is not None:
        word, number = found[1], int(found[2])
    if word not in words:
        raise InvalidArgument(f"{str(value)[:80]!r} is not one of {', '.join(words)}", field=field)
    return words[word], number if isinstance(number, int) else None


class TargetKind(StrEnum):
    NODE = "Node"
    GROUP = "Group"
    SELECTOR = "Selector"
    ALL = "All"


class SpelledTarget(msgspec.Struct, frozen=True, kw_only=True):
    kind: TargetKind
    name: str = ""
    """Of the node or group: its id, or what it is called."""
    selector: Selector = Selector()


def parse(text: str) -> SpelledTarget:
    text = text.strip()
    if text.lower() == "all":
        return SpelledTarget(kind=TargetKind.ALL)
    if text.startswith("@"):
        return SpelledTarget(kind=TargetKind.NODE, name=_name(text[1:]))
    if text.startswith("group:"):
        return SpelledTarget(kind=TargetKind.GROUP, name=_name(text.removeprefix("group:")))
    if not text:
        raise InvalidArgument("is required; give @NODE, group:NAME, all or a selector", field="target")
    return SpelledTarget(kind=TargetKind.SELECTOR, selector=selectors.parse(text))


def from_json(value: object) -> SpelledTarget:
    if isinstance(value, str):
        return parse(value)
    if not isinstance(value, dict) or len(value) != 1:
        raise InvalidArgument("must be Node, Group, Selector or All, and one of them", field="target")
    ((kind, inside),) = value.items()
    match kind, inside:
        case (TargetKind.ALL, None):
            return SpelledTarget(kind=TargetKind.ALL)
        case (TargetKind.NODE | TargetKind.GROUP, str()):
            return SpelledTarget(kind=TargetKind(kind), name=_name(inside))
        case (TargetKind.SELECTOR, _):
            return SpelledTarget(kind=TargetKind.SELECTOR, selector=selectors.from_json(inside))
        case _:
            raise InvalidArgument("must be Node, Group, Selector or All, and one of them", field="target")


def to_json(target: SpelledTarget) -> object:
    match target.kind:
        case TargetKind.ALL:
            return {"All": None}
        case TargetKind.SELECTOR:
            return {"Selector": selectors.to_json(target.selector)}
        case _:
            return {target.kind: target.name}


def _name(text: str) -> str:
    if not 0 < len(text) <= selectors.TEXT_LIMIT:
        raise InvalidArgument(f"needs 1 to {selectors.TEXT_LIMIT} characters", field="target")
    return text


def choose(
    nodes: Iterable[EdgeNode], selector: Selector | None, pinned: Sequence[str] = ()
) -> tuple[list[EdgeNode], list[Skipped]]:
    """A tenant's daemons that a selector means, and those pinned beside it; oldest first.

    Without a selector only the pinned ones are meant.
    """
    alive = {node.name: node for node in nodes if node.spec.revoked_at_ns is None}
    wanted = {name: node for name, node in alive.items() if selector is not None and _fits(node, selector)}
    missing = [
        Skipped(node_id=name, reason=SkipReason.NOT_FOUND)
        for name in dict.fromkeys(pinned)
        if name not in alive
    ]
    wanted |= {name: alive[name] for name in pinned if name in alive}
    return sorted(wanted.values(), key=lambda node: (node.spec.enrolled_at_ns, node.name)), missing


def _fits(node: EdgeNode, selector: Selector) -> bool:
    capabilities = node.status.capabilities if node.status is not None else Capabilities()
    return selector.matches(capabilities, node.spec.tags)


def candidate(node: EdgeNode) -> TargetCandidate:
    """A daemon that is meant."""
    return TargetCandidate(name=node.name, is_draining=node.spec.desired is not Desired.ACTIVE)


def words(state: NodeState) -> str:
    """A daemon's state as it is documented."""
    return _WORDS[state]


_WORDS: Mapping[NodeState, str] = {state: state.value.capitalize() for state in NodeState}
