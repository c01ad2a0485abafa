"""Secrets in what is shown to whoever may not read them: masked, and known again when it is given back. Pure.

Whatever is called, or looks, like a secret is masked: it can be seen that there is one, not what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from fleetplane.web.rest.problems import Problem

T = TypeVar("T")
MASK: Final = "***"
_ALL_MASKED: Final = frozenset({"env", "env_vars", "environment"})
"""Whose values are for programs, and are what programs get their secrets by."""
_SECRET_NAME: Final = re.compile(
    r"passw|passphrase|secret|token|credential|authorization|auth_basic|cookie|private|signature"
    r"|api[-_]?key|(?:^|[-_.\s])key(?:$|[\s=\"'])",
    re.IGNORECASE,
)
_SECRET_TEXTS: Final = (
    (re.compile(r"(://)[^/\s@\"']+@"), r"\1***@"),
    (re.compile(r"\b(bearer|basic)\s+[\w+/=.~-]{4,}", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"\b(nxmesh_[a-z]+_|fp_)[\w+/=-]{8,}"), r"\1***"),
    (re.compile(r"\beyJ[\w-]{8,}(?:\.[\w-]*)*"), MASK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), MASK),
    (re.compile(r"([?&][a-z_-]*(?:token|key|sig|secret|password)=)[^&\s\"']+", re.IGNORECASE), r"\1***"),
)


def masked(value: Any, name: str = "") -> Any:
    """The value with secrets masked; `name` is its key where it was found."""
    if value is None or isinstance(value, bool):
        return value
    if _SECRET_NAME.search(name):
        return MASK
    if isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return _masked_mapping(value, name)
    if isinstance(value, list | tuple):
        if name in _ALL_MASKED:
            return [_masked_variable(one) for one in value]
        return [masked(one, name) for one in value]
    return _masked_text(str(value))


def _masked_mapping(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name in _ALL_MASKED:
        return dict.fromkeys(value, MASK)
    if name.endswith("directives"):  # such as `proxy_set_header`: `X-Api-Key "..."`
        return {
            key: MASK if _SECRET_NAME.search(str(one)) else masked(one, key) for key, one in value.items()
        }
    if "name" in value and "value" in value:  # a header
        return {**value, "value": masked(value["value"], str(value["name"]))}
    return {key: masked(one, key) for key, one in value.items()}


def _masked_variable(one: Any) -> Any:
    """Of a list: `NAME=value`, or an object with a name and a value."""
    if isinstance(one, dict):
        return {key: value if key == "name" else MASK for key, value in one.items()}
    name, equals, _ = str(one).partition("=")
    return f"{name}={MASK}" if equals else MASK


def _masked_text(text: str) -> str:
    for pattern, instead in _SECRET_TEXTS:
        text = pattern.sub(instead, text)
    return text


def masked_values(value: Any, field: str = "") -> Iterator[Problem]:
    """Values that are nothing but a mask: of a document that was exported by one who may not read them."""
    value = msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from masked_values(one, f"{field}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from masked_values(one, f"{field}.{index}")
    elif isinstance(value, str) and MASK in value:
        yield Problem(field=field, message="Masked: export it as somebody who may read secrets")


def without_secrets(value: T) -> T:
    """The document with secrets masked."""
    return msgspec.convert(masked(msgspec.to_builtins(value)), type(value))


def with_known_secrets(spec: Any, before: Any) -> Any:
    """What was shown masked and given back so is what it was."""
    real, shown = msgspec.to_builtins(before), msgspec.to_builtins(without_secrets(before))
    return msgspec.convert(_restored(msgspec.to_builtins(spec), shown, real), type(spec))


def _restored(given: Any, shown: Any, real: Any) -> Any:
    if given == shown:
        return real
    if isinstance(given, dict) and isinstance(shown, dict):
        return {
            key: _restored(value, shown[key], real[key]) if key in shown and key in real else value
            for key, value in given.items()
        }
    if isinstance(given, list) and isinstance(shown, list):
        known = list(zip(shown, real, strict=False))
        return [
            _restored(value, *known[number]) if number < len(known) else value
            for number, value in enumerate(given)
        ]
    return given
