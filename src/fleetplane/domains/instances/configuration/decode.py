"""From parsed JSON to the types of `schema`, noting everything that does not fit.

Knows types, not meanings. A value that does not fit is reported and replaced by the emptiest value of its
type, so that one mistake does not hide the next; `validate` keeps silent about paths already reported.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fleetplane.domains.instances.configuration.jsonc import Path
from fleetplane.domains.instances.configuration.problems import ProblemReport
from fleetplane.domains.instances.configuration.schema import DocumentPart
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations

P = TypeVar("P", bound=DocumentPart)

MAX_INTEGER = (1 << 31) - 1  # sizes and ports travel as int32

RENAMED = {"gcp": "google", "gcp-secret-manager": "google-secret-manager"}


def nearest(word: str, known: Collection[str]) -> str:
    """A sentence that helps who misspelt `word`."""
    if not known:
        return "there are none"
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known)[:20])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StructField:
    name: str
    type: Any
    required: bool
    default: object


@lru_cache(maxsize=64)
def _fields(part: type[DocumentPart]) -> Mapping[str, _StructField]:
    """The part's fields by the key they have in the document."""
    hints = get_type_hints(part, include_extras=True)
    return {
        field.encode_name: _StructField(
            name=field.name, type=hints[field.name], required=field.required, default=_default(field)
        )
        for field in msgspec.structs.fields(part)
    }


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def decode(part: type[P], value: object, report: ProblemReport) -> P:
    """The document as a `part`, with its problems in `report`."""
    return _Decoder(report=report).part(part, value, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    report: ProblemReport

    def part(self, part: type[P], value: object, path: Path) -> P:
        if not isinstance(value, dict):
            self.report.reject(path, f"must be an object, not {_kind(value)}")
            return _empty_part(part)
        fields = _fields(part)
        for key in value:
            if key not in fields:
                self.report.add((*path, key), f"unknown key {key!r}; {nearest(key, fields)}", at_key=True)
        return part(**{field.name: self.field(key, field, value, path) for key, field in fields.items()})

    def field(self, key: str, field: _StructField, members: dict[str, object], path: Path) -> object:
        value = members.get(key)
        if value is None:  # null is the same as leaving it out
            if field.required:
                self.report.reject((*path, key), f"{key!r} is required", at_key=key in members)
                return _empty(field.type)
            return field.default
        if value == "" and field.type is str and field.required:
            self.report.add((*path, key), "must not be empty")
        decoded = self.value(field.type, value, (*path, key))
        is_number = isinstance(decoded, (int, float)) and not isinstance(decoded, bool)
        if is_number and not decoded and field.default:
            return field.default
        return decoded

    def value(self, wanted: Any, value: object, path: Path) -> object:
        origin, arguments = get_origin(wanted), get_args(wanted)
        if path in self.report.rejected:
            return _empty(wanted)
        if origin is Annotated:
            return self.duration(value, path)
        if origin in (types.UnionType, Union):
            return self.value(next(option for option in arguments if option is not type(None)), value, path)
        if origin is Literal:
            return self.choice(arguments, value, path)
        if origin is dict:
            return self.mapping(arguments[1], value, path)
        if origin is tuple:
            return self.sequence(arguments[0], value, path)
        if wanted is object:
            return value
        if isinstance(wanted, type) and issubclass(wanted, DocumentPart):
            return self.part(wanted, value, path)
        return self.scalar(wanted, value, path)

    def scalar(self, wanted: type, value: object, path: Path) -> object:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if wanted is float and is_number:
            return float(value)  # type: ignore[arg-type]
        if wanted is int and is_number and not isinstance(value, int):
            self.report.reject(path, "must be a whole number")
            return 0
        if wanted is int and is_number and abs(value) > MAX_INTEGER:  # type: ignore[arg-type]
            self.report.reject(path, f"must be at most {MAX_INTEGER}")
            return 0
        if type(value) is wanted:
            return value
        advice = f'; write "{value}"' if wanted is str and is_number else ""
        self.report.reject(path, f"must be {_NAMES[wanted]}, not {_kind(value)}{advice}")
        return _empty(wanted)

    def duration(self, value: object, path: Path) -> float:
        if not isinstance(value, str):
            advice = f'; for {value} seconds write "{value}s"' if type(value) in (int, float) else ""
            self.report.reject(
                path, f'must be a duration in quotes such as "30s", not {_kind(value)}{advice}'
            )
            return 0.0
        try:
            seconds = durations.parse(value)
        except InvalidArgument as error:
            self.report.reject(path, error.message)
            return 0.0
        if seconds < 0:
            self.report.reject(path, "must not be negative")
            return 0.0
        return seconds

    def choice(self, options: tuple[str, ...], value: object, path: Path) -> object:
        if value in options:
            return value
        named = [option for option in options if option]
        if isinstance(value, str) and RENAMED.get(value) in options:
            self.report.reject(path, f"{value!r} is called {RENAMED[value]!r} now")
        else:
            self.report.reject(path, f"must be one of {', '.join(named)}, not {value!r}")
        return _empty(Literal)

    def mapping(self, item: Any, value: object, path: Path) -> dict[str, object]:
        if not isinstance(value, dict):
            self.report.reject(path, f"must be an object, not {_kind(value)}")
            return {}
        for key in value:
            if not key:
                self.report.reject((*path, key), "a name must not be empty", at_key=True)
        return {key: self.value(item, entry, (*path, key)) for key, entry in value.items()}

    def sequence(self, item: Any, value: object, path: Path) -> tuple[object, ...]:
        if not isinstance(value, list):
            self.report.reject(path, f"must be a list, not {_kind(value)}")
            return ()
        return tuple(self.value(item, entry, (*path, index)) for index, entry in enumerate(value))


_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


def _empty(wanted: Any) -> Any:
    """The emptiest value of a type: what stands in for one that was reported."""
    origin = get_origin(wanted)
    if origin is dict:
        return {}
    if origin is tuple:
        return ()
    if origin is Annotated or wanted is float:
        return 0.0
    if isinstance(wanted, type) and issubclass(wanted, DocumentPart):
        return _empty_part(wanted)
    return {int: 0, bool: False}.get(wanted, "")


def _empty_part(part: type[P]) -> P:
    fields = _fields(part).values()
    return part(**{f.name: _empty(f.type) if f.required else f.default for f in fields})
