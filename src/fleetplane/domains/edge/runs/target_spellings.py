"""From what an operator asks for to the daemons that are meant. Pure.

As text: `@NODE` (its id or name), `group:NAME`, `all`, or a selector. In JSON: `{"Node": id}`,
`{"Group": id}`, `{"Selector": {…}}`, `"All"` or `{"All": null}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from fleetplane.domains.edge.kinds import Capabilities, Desired, EdgeNode, NodeState
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs.selectors import Selector
from fleetplane.fleet.runs.targets import Skipped, SkipReason, TargetCandidate
from fleetplane.kernel.errors import InvalidArgument


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
