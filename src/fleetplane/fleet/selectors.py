"""The selector language of every fleet: which agents are meant.

    selector     = requirement {"," requirement}
    requirement  = key ("=" | "==" | "!=") value | key | "!" key
                 | key ("in" | "notin") "(" value {"," value} ")"

A comma means "and". `!=` and `notin` also hold for agents without the key. Each domain turns what it knows
of an agent into facts. A fact is one text, or several (tags, tools): `=` and `in` then ask for one that
fits, `!=` and `notin` for none. Domains with spellings of their own parse them into requirements. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleetplane.kernel.errors import InvalidArgument

SELECTOR_LIMIT = 2048
"""Characters; with the shortest requirement this is a thousand of them, which is plenty."""
REQUIREMENTS_LIMIT = 64
"""Of a selector in a request, which is compared with every agent while others wait: 10,000 agents and 64
requirements took 0.06 s, 527 requirements 0.5 s."""
SHORT_LIMIT = 256
"""Characters of what people write. Parsed, a selector takes up to 70 times the bytes of its text: 1024 short
ones are 18 MB, and 128 of the longest as much again."""
LABELS_LIMIT = 32
KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"[A-Za-z0-9._-]{0,63}")

_SET = re.compile(r"(?P<key>\S+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARED = re.compile(r"(?P<key>[^=!\s]+)\s*(?P<op>==|!=|=)\s*(?P<value>.*)", re.DOTALL)
_SPLIT = re.compile(r",(?![^()]*\))")


Facts = Mapping[str, str | Collection[str]]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on one key. `values` is None where only presence counts."""

    key: str
    wanted: bool
    """Whether the key should be so (present, or one of the values), or should not."""
    values: frozenset[str] | None

    def holds(self, facts: Facts) -> bool:
        """Whether an agent with these facts meets the requirement."""
        found = facts.get(self.key)
        if self.values is None:
            return (found is not None) is self.wanted
        if found is None or isinstance(found, str):
            return (found in self.values) is self.wanted
        return (not self.values.isdisjoint(found)) is self.wanted


@dataclass(frozen=True, slots=True)
class Selector:
    """All requirements must hold; one without any matches every agent."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, facts: Facts) -> bool:
        """Whether an agent with these facts is meant."""
        return all(requirement.holds(facts) for requirement in self.requirements)

    def may_meet(self, other: Selector) -> bool:
        """Whether some agent, with whatever labels, could match both. Each key counts as one text."""
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


def parse(text: str, *, field: str = "label_selector") -> Selector:
    """A selector; `InvalidArgument` quotes the part that is none. The latest ones are remembered."""
    return (_parsed_short if len(text) <= SHORT_LIMIT else _parsed_long)(text, field)


def check(text: str, *, field: str) -> None:
    """Refuse a selector in a request that is none, or asks for more than a request may."""
    number = len(parse(text, field=field).requirements)
    if number > REQUIREMENTS_LIMIT:
        raise InvalidArgument(
            f"has {number} requirements; a selector has at most {REQUIREMENTS_LIMIT}", field=field
        )


def _parsed(text: str, field: str) -> Selector:
    if len(text) > SELECTOR_LIMIT:
        raise InvalidArgument(f"Longer than {SELECTOR_LIMIT} characters", field=field)
    if not text.strip():
        raise InvalidArgument("Must not be empty", field=field)
    return Selector(tuple(_requirement(part.strip(), field) for part in _SPLIT.split(text)))


_parsed_short = lru_cache(maxsize=1024)(_parsed)
_parsed_long = lru_cache(maxsize=128)(_parsed)


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


LABEL = "label/"
"""Before the key of a label, where a fact of the agent itself has the same name."""


def facts_of(labels: Mapping[str, str], own: Facts) -> dict[str, str | Collection[str]]:
    """What an agent can be selected by: its labels, and what it is by the server's knowledge.

    A key of `own` is never answered by a label, also where its value is empty, which means absent: agents
    choose their labels themselves.
    """
    facts: dict[str, str | Collection[str]] = {
        key: value for key, value in labels.items() if key not in own and not key.startswith(LABEL)
    }
    facts |= {LABEL + key: value for key, value in labels.items()}
    return facts | {key: value for key, value in own.items() if value}


def label_problems(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is wrong with labels, as (key, message)."""
    if len(labels) > LABELS_LIMIT:
        yield "", f"More than {LABELS_LIMIT} labels"
    for key, value in labels.items():
        if not KEY.fullmatch(key):
            yield key, "The key must be 1 to 63 of letters, digits, '.', '_', '/', '-'"
        if not VALUE.fullmatch(value):
            yield key, "The value must be 0 to 63 of letters, digits, '.', '_', '-'"
