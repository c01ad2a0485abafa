"""What one listener wants to hear of: subscriptions with patterns and filters. Pure.

    pattern = segment {"." segment}      segment = [a-z0-9_]+ | "*"

`*` stands for one segment, as the last for one or more; alone it stands for everything. A
listener that never subscribed hears everything that it may; its first subscription replaces
that. Several subscriptions are joined by "or", the keys of a filter by "and".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.kernel.errors import InvalidArgument

FILTER_VALUES_LIMIT = 100
PATTERN_LIMIT = 128
"""Characters."""
FILTERS = ("workspace_id", "organization_id", "agent_id", "severity")
EVERYTHING = "*"

_PATTERN = re.compile(r"(?:[a-z0-9_]+|\*)(?:\.(?:[a-z0-9_]+|\*))*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLimits:
    """Limits of event subscribers; each is a setting."""

    sockets: int = 1000
    """Open at once; each takes about 100 KB with its compression window, 100 MB."""
    sockets_per_caller: int = 10
    patterns: int = 50
    """Of one listener, in all its subscriptions together."""
    subscriptions: int = 20


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    events: tuple[str, ...]
    filter: dict[str, tuple[str, ...]] = {}

    def wants(self, kind: str, facts: Mapping[str, str]) -> bool:
        if not all(facts.get(name) in values for name, values in self.filter.items()):
            return False
        return any(matches(pattern, kind) for pattern in self.events)


def matches(pattern: str, kind: str) -> bool:
    wanted, found = pattern.split("."), kind.split(".")
    if wanted[-1] == EVERYTHING:
        if len(found) < len(wanted):
            return False
        wanted, found = wanted[:-1], found[: len(wanted) - 1]
    return len(wanted) == len(found) and all(
        want in (EVERYTHING, segment) for want, segment in zip(wanted, found, strict=True)
    )


def check_pattern(pattern: object) -> str:
    if not isinstance(pattern, str) or len(pattern) > PATTERN_LIMIT or not _PATTERN.fullmatch(pattern):
        raise InvalidArgument(f"not an event pattern: {str(pattern)[:64]!r}", field="events")
    return pattern


def check_filter(given: object) -> dict[str, tuple[str, ...]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument("filter must be an object", field="filter")
    made = {}
    for name, value in given.items():
        if name not in FILTERS:
            raise InvalidArgument(f"filter knows {', '.join(FILTERS)}; not {name[:64]!r}", field="filter")
        values = (value,) if isinstance(value, str) else value
        if (
            not isinstance(values, Sequence)
            or not 0 < len(values) <= FILTER_VALUES_LIMIT
            or not all(isinstance(one, str) for one in values)
        ):
            raise InvalidArgument(f"filter.{name} must be a text or a list of texts", field=f"filter.{name}")
        made[name] = tuple(values)
    return made


class Interests:
    """The subscriptions of one listener."""

    def __init__(self, limits: EventLimits | None = None) -> None:
        self._limits = limits or EventLimits()
        self._subscriptions: dict[str, Subscription] | None = None
        self._made = 0

    def __repr__(self) -> str:
        return f"<Interests {'everything' if self._subscriptions is None else len(self._subscriptions)}>"

    @property
    def subscriptions(self) -> Sequence[Subscription]:
        return tuple((self._subscriptions or {}).values())

    def wants(self, kind: str, facts: Mapping[str, str]) -> bool:
        if self._subscriptions is None:
            return True
        return any(one.wants(kind, facts) for one in self._subscriptions.values())

    def subscribe(self, events: object, filter_: object) -> Subscription:
        if not isinstance(events, list) or not events:
            raise InvalidArgument("events must be a list of patterns", field="events")
        held = self._subscriptions or {}
        patterns = sum(len(one.events) for one in held.values()) + len(events)
        limits = self._limits
        if patterns > limits.patterns or len(held) >= limits.subscriptions:
            raise InvalidArgument(
                f"at most {limits.patterns} patterns in {limits.subscriptions} subscriptions", field="events"
            )
        made = Subscription(
            id=f"sub-{self._made + 1}",
            events=tuple(check_pattern(pattern) for pattern in events),
            filter=check_filter(filter_),
        )
        self._made += 1
        self._subscriptions = {**held, made.id: made}
        return made

    def unsubscribe(self, identity: object, events: object) -> Subscription:
        """End one subscription, or some patterns of all, or (with neither) everything."""
        held = dict(self._subscriptions or {})
        if identity is not None:
            if not isinstance(identity, str) or identity not in held:
                raise InvalidArgument("there is no such subscription", field="id")
            ended = held.pop(identity)
        elif events is not None:
            if not isinstance(events, list):
                raise InvalidArgument("events must be a list of patterns", field="events")
            gone = {check_pattern(pattern) for pattern in events}
            ended = Subscription(id="", events=tuple(sorted(gone)))
            held = {
                one.id: msgspec.structs.replace(one, events=kept)
                for one in held.values()
                if (kept := tuple(pattern for pattern in one.events if pattern not in gone))
            }
        else:
            ended, held = Subscription(id="", events=(EVERYTHING,)), {}
        self._subscriptions = held
        return ended
