"""The spellings of selectors that clients of edge use, in JSON and as text; each means requirements of
`fleet.selectors`, which decide. Pure.

As text, terms are separated by white space and all must hold:

    os=linux  arch=aarch64  tools=docker,git
    labels=site=berlin,rack=7   labels=Exists(gpu)   labels=In(site,berlin,paris)
    tags=prod,web               tags=AnyOf(a,b)   tags=AllOf(a,b)   tags=NoneOf(a,b)

or, after `where:`, the language that all domains share:

    where:site in (berlin,paris),os=linux,tags notin (db),!gpu

In JSON two spellings of a label's value are understood, keys may be left out, and `where` has that language.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from fleetplane.domains.edge.kinds import Capabilities
from fleetplane.fleet import selectors as fleet_selectors
from fleetplane.fleet.selectors import LABEL, Facts, Requirement
from fleetplane.kernel.errors import InvalidArgument

TERMS_LIMIT = 64
"""In one selector, and values in one term."""
TEXT_LIMIT = 256
"""Of one value."""
SAME_OS = {"darwin": "macos"}
"""Two names of one system; daemons in the field say the second."""

WHERE = "where:"
_CALL = re.compile(r"(Exists|In|AnyOf|AllOf|NoneOf|Has)\(([^()]*)\)")


class LabelOp(StrEnum):
    EQUALS = "Equals"
    EXISTS = "Exists"
    IN = "In"


class TagOp(StrEnum):
    HAS = "Has"
    ANY_OF = "AnyOf"
    ALL_OF = "AllOf"
    NONE_OF = "NoneOf"


class LabelMatch(msgspec.Struct, frozen=True, kw_only=True):
    op: LabelOp
    key: str
    values: tuple[str, ...] = ()

    @property
    def requirement(self) -> Requirement:
        values = None if self.op is LabelOp.EXISTS else frozenset(self.values)
        return Requirement(LABEL + self.key, True, values)


class TagMatch(msgspec.Struct, frozen=True, kw_only=True):
    op: TagOp
    tags: tuple[str, ...]

    @property
    def requirements(self) -> Iterator[Requirement]:
        match self.op:
            case TagOp.ANY_OF:
                yield Requirement("tags", True, frozenset(self.tags))
            case TagOp.NONE_OF:
                yield Requirement("tags", False, frozenset(self.tags))
            case _:
                yield from (Requirement("tags", True, frozenset({tag})) for tag in self.tags)


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored. An empty one matches every daemon."""

    os: str = ""
    arch: str = ""
    tools: tuple[str, ...] = ()
    labels: tuple[LabelMatch, ...] = ()
    tags: tuple[TagMatch, ...] = ()
    where: str = ""
    """More, in the language that all domains share."""

    def requirements(self) -> Iterator[Requirement]:
        if self.os:
            yield Requirement("os", True, frozenset({_system(self.os)}))
        if self.arch:
            yield Requirement("arch", True, frozenset({self.arch}))
        for tool in self.tools:
            yield Requirement("tools", True, frozenset({tool}))
        for label in self.labels:
            yield label.requirement
        for tags in self.tags:
            yield from tags.requirements
        if self.where:
            for one in fleet_selectors.parse(self.where, field="selector").requirements:
                yield _one_system(one) if one.key == "os" else one

    def matches(self, capabilities: Capabilities, tags: Collection[str]) -> bool:
        """Whether it means a daemon with these capabilities and tags."""
        return meaning(self).matches(facts(capabilities, tags))


def facts(capabilities: Capabilities, tags: Collection[str]) -> Facts:
    """What a daemon can be selected by: its labels, `os`, `arch`, `tools` and `tags`."""
    own = {
        "os": _system(capabilities.os),
        "arch": capabilities.arch,
        "tools": capabilities.local_tools,
        "tags": tags,
    }
    return fleet_selectors.facts_of(capabilities.labels, own)


@lru_cache(maxsize=256)
def meaning(selector: Selector) -> fleet_selectors.Selector:
    """The selector in the one language."""
    return fleet_selectors.Selector(tuple(selector.requirements()))


def _system(name: str) -> str:
    return SAME_OS.get(name, name)


def _one_system(asked: Requirement) -> Requirement:
    values = asked.values
    return Requirement(asked.key, asked.wanted, values and frozenset(map(_system, values)))


# As text.


def parse(text: str) -> Selector:
    """A selector as people type it."""
    if text.startswith(WHERE):
        return Selector(where=_where(text.removeprefix(WHERE)))
    found: dict[str, list[Any]] = {"os": [], "arch": [], "tools": [], "labels": [], "tags": []}
    terms = text.split()
    if len(terms) > TERMS_LIMIT:
        raise InvalidArgument(f"a selector has at most {TERMS_LIMIT} terms", field="selector")
    for term in terms:
        name, equals, value = term.partition("=")
        if name not in found or not equals or not value:
            raise InvalidArgument(
                f"{term[:80]!r} is no term; os=, arch=, tools=, labels= and tags= are", field="selector"
            )
        match name:
            case "labels":
                found[name] += _labels(value)
            case "tags":
                found[name] += _tags(value)
            case "tools":
                found[name] += _values(value)
            case _:
                if found[name]:
                    raise InvalidArgument(f"{name} is given twice", field="selector")
                found[name].append(_word(value))
    return Selector(
        os="".join(found["os"]),
        arch="".join(found["arch"]),
        tools=tuple(found["tools"]),
        labels=tuple(found["labels"]),
        tags=tuple(found["tags"]),
    )


def _where(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidArgument("where must be a text", field="selector")
    text = text.strip()
    fleet_selectors.check(text, field="selector")
    return text


def _labels(value: str) -> Iterator[LabelMatch]:
    if (call := _CALL.fullmatch(value)) is not None:
        op, inside = call[1], _values(call[2])
        if op == LabelOp.EXISTS and len(inside) == 1:
            yield LabelMatch(op=LabelOp.EXISTS, key=inside[0])
        elif op == LabelOp.IN and len(inside) > 1:
            yield LabelMatch(op=LabelOp.IN, key=inside[0], values=inside[1:])
        else:
            raise InvalidArgument(
                f"{value[:80]!r} is no condition on labels; Exists(key) and In(key,value,…) are",
                field="selector",
            )
        return
    for pair in value.split(","):
        key, equals, wanted = pair.partition("=")
        if not key or not equals:
            raise InvalidArgument(f"{pair[:80]!r} is not of the form key=value", field="selector")
        yield LabelMatch(op=LabelOp.EQUALS, key=_word(key), values=(_word(wanted, empty=True),))


def _tags(value: str) -> Iterator[TagMatch]:
    if (call := _CALL.fullmatch(value)) is None:
        yield from (TagMatch(op=TagOp.HAS, tags=(tag,)) for tag in _values(value))
        return
    try:
        op = TagOp(call[1])
    except ValueError:
        raise InvalidArgument(
            f"{value[:80]!r} is no condition on tags; AnyOf(), AllOf() and NoneOf() are", field="selector"
        ) from None
    yield TagMatch(op=op, tags=_values(call[2]))


def _values(text: str) -> tuple[str, ...]:
    values = tuple(_word(value.strip()) for value in text.split(","))
    if len(values) > TERMS_LIMIT:
        raise InvalidArgument(f"a term has at most {TERMS_LIMIT} values", field="selector")
    return values


def _word(text: object, *, empty: bool = False) -> str:
    if not isinstance(text, str) or len(text) > TEXT_LIMIT or (not text and not empty):
        raise InvalidArgument(
            f"{str(text)[:80]!r} is no value: it needs 1 to {TEXT_LIMIT} characters", field="selector"
        )
    return text


# In JSON.


def from_json(value: object) -> Selector:
    """A selector as programs send it; what is misspelt is refused, not ignored."""
    if isinstance(value, str):
        return parse(value)
    given = _object(value, "selector")
    if unknown := given.keys() - {"os", "arch", "tools", "labels", "tags", "where"}:
        raise InvalidArgument(f"a selector has no {min(unknown)[:80]!r}", field="selector")
    return Selector(
        os=_word(given.get("os") or "", empty=True),
        arch=_word(given.get("arch") or "", empty=True),
        tools=tuple(_word(tool) for tool in _list(given, "tools")),
        labels=tuple(match for entry in _list(given, "labels") for match in _label_of_json(entry)),
        tags=tuple(_tag_of_json(entry) for entry in _list(given, "tags")),
        where=_where(given["where"]) if given.get("where") else "",
    )


def to_json(selector: Selector) -> dict[str, object]:
    told: dict[str, object] = {
        "os": selector.os or None,
        "arch": selector.arch or None,
        "tools": list(selector.tools),
        "labels": [_label_to_json(match) for match in selector.labels],
        "tags": [
            {match.op: match.tags[0] if match.op is TagOp.HAS else list(match.tags)}
            for match in selector.tags
        ],
    }
    return told | ({"where": selector.where} if selector.where else {})


def _label_to_json(match: LabelMatch) -> dict[str, object]:
    match match.op:
        case LabelOp.EQUALS:
            return {match.op: [match.key, match.values[0]]}
        case LabelOp.EXISTS:
            return {match.op: match.key}
        case LabelOp.IN:
            return {match.op: [match.key, list(match.values)]}


def _label_of_json(entry: object) -> Iterator[LabelMatch]:
    ((op, value),) = _single(entry, "labels")
    match op, value:
        case (LabelOp.EXISTS, str()):
            yield LabelMatch(op=LabelOp.EXISTS, key=_word(value))
        case (LabelOp.EQUALS, [key, wanted]):
            yield LabelMatch(op=LabelOp.EQUALS, key=_word(key), values=(_word(wanted, empty=True),))
        case (LabelOp.EQUALS, dict()):
            for key, wanted in value.items():
                yield LabelMatch(op=LabelOp.EQUALS, key=_word(key), values=(_word(wanted, empty=True),))
        case (LabelOp.IN, [key, list() as values]):
            yield LabelMatch(op=LabelOp.IN, key=_word(key), values=_words(values))
        case (LabelOp.IN, dict()):
            for key, values in value.items():
                yield LabelMatch(op=LabelOp.IN, key=_word(key), values=_words(values))
        case _:
            raise InvalidArgument(
                f"{op[:80]!r} is no condition on labels, or its values are wrong", field="selector.labels"
            )


def _tag_of_json(entry: object) -> TagMatch:
    if isinstance(entry, str):
        return TagMatch(op=TagOp.HAS, tags=(_word(entry),))
    ((op, value),) = _single(entry, "tags")
    if op not in tuple(TagOp):
        raise InvalidArgument(f"{op[:80]!r} is no condition on tags", field="selector.tags")
    return TagMatch(op=TagOp(op), tags=_words([value] if isinstance(value, str) else value))


def _words(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not 1 <= len(values) <= TERMS_LIMIT:
        raise InvalidArgument(f"a condition needs 1 to {TERMS_LIMIT} values", field="selector")
    return tuple(_word(value) for value in values)


def _single(entry: object, where: str) -> list[tuple[str, Any]]:
    given = _object(entry, f"selector.{where}")
    if len(given) != 1:
        raise InvalidArgument("a condition is an object with one key", field=f"selector.{where}")
    return list(given.items())


def _list(given: dict[str, Any], name: str) -> list[Any]:
    value = given.get(name) or []
    if not isinstance(value, list) or len(value) > TERMS_LIMIT:
        raise InvalidArgument(f"must be a list of at most {TERMS_LIMIT}", field=f"selector.{name}")
    return value


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("must be an object", field=field)
    return value
