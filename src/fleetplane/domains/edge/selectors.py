"""Which daemons are meant: selectors, in JSON and as people type them. Pure.

As text, terms are separated by white space and all must hold:

    os=linux  arch=aarch64  tools=docker,git
    labels=site=berlin,rack=7   labels=Exists(gpu)   labels=In(site,berlin,paris)
    tags=prod,web               tags=AnyOf(a,b)   tags=AllOf(a,b)   tags=NoneOf(a,b)

In JSON two spellings of a label's value are understood, and keys may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Any

import msgspec

from fleetplane.domains.edge.kinds import Capabilities
from fleetplane.kernel.errors import InvalidArgument

TERMS_LIMIT = 64
"""In one selector, and values in one term."""
TEXT_LIMIT = 256
"""Of one value."""
SAME_OS = {"darwin": "macos"}
"""Two names of one system; daemons in the field say the second."""

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

    def holds(self, labels: dict[str, str]) -> bool:
        found = labels.get(self.key)
        return found is not None and (self.op is LabelOp.EXISTS or found in self.values)


class TagMatch(msgspec.Struct, frozen=True, kw_only=True):
    op: TagOp
    tags: tuple[str, ...]

    def holds(self, tags: Collection[str]) -> bool:
        present = [tag in tags for tag in self.tags]
        match self.op:
            case TagOp.ANY_OF:
                return any(present)
            case TagOp.NONE_OF:
                return not any(present)
            case _:
                return all(present)


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """An empty one matches every daemon."""

    os: str = ""
    arch: str = ""
    tools: tuple[str, ...] = ()
    labels: tuple[LabelMatch, ...] = ()
    tags: tuple[TagMatch, ...] = ()

    def matches(self, capabilities: Capabilities, tags: Collection[str]) -> bool:
        return (
            (not self.os or _system(self.os) == _system(capabilities.os))
            and (not self.arch or self.arch == capabilities.arch)
            and all(tool in capabilities.local_tools for tool in self.tools)
            and all(match.holds(capabilities.labels) for match in self.labels)
            and all(match.holds(tags) for match in self.tags)
        )


def _system(name: str) -> str:
    return SAME_OS.get(name, name)


# As text.


def parse(text: str) -> Selector:
    """A selector as people type it."""
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
        os="".join(found["os"]), arch="".join(found["arch"]), tools=tuple(found["tools"]),
        labels=tuple(found["labels"]), tags=tuple(found["tags"]),
    )  # fmt: skip


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
    if unknown := given.keys() - {"os", "arch", "tools", "labels", "tags"}:
        raise InvalidArgument(f"a selector has no {min(unknown)[:80]!r}", field="selector")
    return Selector(
        os=_word(given.get("os") or "", empty=True),
        arch=_word(given.get("arch") or "", empty=True),
        tools=tuple(_word(tool) for tool in _list(given, "tools")),
        labels=tuple(match for entry in _list(given, "labels") for match in _label_of_json(entry)),
        tags=tuple(_tag_of_json(entry) for entry in _list(given, "tags")),
    )


def to_json(selector: Selector) -> dict[str, object]:
    return {
        "os": selector.os or None,
        "arch": selector.arch or None,
        "tools": list(selector.tools),
        "labels": [_label_to_json(match) for match in selector.labels],
        "tags": [
            {match.op: match.tags[0] if match.op is TagOp.HAS else list(match.tags)}
            for match in selector.tags
        ],
    }


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
