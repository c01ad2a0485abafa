"""Label selectors: which agents are meant.

    selector     = requirement {"," requirement}
    requirement  = key ("=" | "==" | "!=") value | key | "!" key
                 | key ("in" | "notin") "(" value {"," value} ")"

A comma means "and". `!=` and `notin` also hold for agents without the key. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleetplane.kernel.errors import InvalidArgument

SELECTOR_LIMIT = 2048
"""Characters; with the shortest requirement this is a thousand of them, which is plenty."""
LABELS_LIMIT = 32
KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"[A-Za-z0-9._-]{0,63}")

_SET = re.compile(r"(?P<key>\S+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARED = re.compile(r"(?P<key>[^=!\s]+)\s*(?P<op>==|!=|=)\s*(?P<value>.*)", re.DOTALL)
_SPLIT = re.compile(r",(?![^()]*\))")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on one key. `values` is None where only presence counts."""

    key: str
    wanted: bool
    """Whether the key should be so (present, or one of the values), or should not."""
    values: frozenset[str] | None

    def holds(self, labels: Mapping[str, str]) -> bool:
        found = labels.get(self.key)
        if self.values is None:
            return (found is not None) is self.wanted
        return (found in self.values) is self.wanted


@dataclass(frozen=True, slots=True)
class Selector:
    requirements: tuple[Requirement, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.holds(labels) for requirement in self.requirements)

    def may_meet(self, other: Selector) -> bool:
        """Whether some agent, with whatever labels, could match both."""
        by_key: dict[str, list[Requirement]] = {}
        for requirement in (*self.requirements, *other.requirements):
            by_key.setdefault(requirement.key, []).append(requirement)
        return all(_satisfiable(requirements) for requirements in by_key.values())


def _satisfiable(requirements: Sequence[Requirement]) -> bool:
    """Whether one key can be such that all of these hold: absent, or present with some value."""
    if all(_holds_when_absent(requirement) for requirement in requirements):
        return True
    if any(requirement.values is None and not requirement.wanted for requirement in requirements):
        return False
    allowed = [r.values for r in requirements if r.values is not None and r.wanted]
    if not allowed:
        return True  # forbidden values are few, possible ones are not
    forbidden = frozenset[str]().union(*(r.values for r in requirements if r.values and not r.wanted))
    return bool(frozenset.intersection(*allowed) - forbidden)


def _holds_when_absent(requirement: Requirement) -> bool:
    return not requirement.wanted


@lru_cache(maxsize=4096)
def parse(text: str, *, field: str = "label_selector") -> Selector:
    """A selector; `InvalidArgument` quotes the part that is none."""
    if len(text) > SELECTOR_LIMIT:
        raise InvalidArgument(f"Longer than {SELECTOR_LIMIT} characters", field=field)
    if not text.strip():
        raise InvalidArgument("Must not be empty", field=field)
    return Selector(tuple(_requirement(part.strip(), field) for part in _SPLIT.split(text)))


def _requirement(part: str, field: str) -> Requirement:
    if in_set := _SET.fullmatch(part):
        values = frozenset(value.strip() for value in in_set["values"].split(","))
        made = Requirement(in_set["key"], in_set["op"] == "in", values)
    elif compared := _COMPARED.fullmatch(part):
        made = Requirement(
            compared["key"].strip(), compared["op"] != "!=", frozenset({compared["value"].strip()})
        )
    elif part.startswith("!"):
        made = Requirement(part[1:].strip(), False, None)
    else:
        made = Requirement(part, True, None)
    if not KEY.fullmatch(made.key) or not all(VALUE.fullmatch(value) for value in made.values or ()):
        raise InvalidArgument(f"Not a requirement: {part!r}", field=field)
    return made


def label_problems(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is wrong with labels, as (key, message)."""
    if len(labels) > LABELS_LIMIT:
        yield "", f"More than {LABELS_LIMIT} labels"
    for key, value in labels.items():
        if not KEY.fullmatch(key):
            yield key, "The key must be 1 to 63 of letters, digits, '.', '_', '/', '-'"
        if not VALUE.fullmatch(value):
            yield key, "The value must be 0 to 63 of letters, digits, '.', '_', '-'"
