"""Raw NGINX text that callers may add: one directive a name, and nothing that escapes it.

Quoting is a security boundary, and there is one reading of such text: the agents'. What they would
not write into a configuration is refused here, at its field, before any of them sees it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fleetplane.domains.proxies.agent import blocks, quoting, rendering
from fleetplane.web.problems import Code, Problem

DIRECTIVES_LIMIT = 64
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


def problems(directives: Mapping[str, str], *, field: str) -> Iterator[Problem]:
    if len(directives) > DIRECTIVES_LIMIT:
        yield Problem(field=field, message=f"More than {DIRECTIVES_LIMIT} directives", code=Code.TOO_MANY)
    for name, value in directives.items():
        where = f"{field}.{name}"
        if not _NAME.fullmatch(name):
            yield Problem(field=where, message="Not the name of a directive")
        elif blocks.denied(name):
            yield Problem(field=where, message="This directive is not allowed", code=Code.INCOMPATIBLE)
        elif fault := value_fault(value, name=name):
            yield Problem(field=where, message=fault)


def variable_problems(variables: Mapping[str, str], *, field: str) -> Iterator[Problem]:
    """Environment variables of the NGINX process."""
    if len(variables) > DIRECTIVES_LIMIT:
        yield Problem(field=field, message=f"More than {DIRECTIVES_LIMIT} variables", code=Code.TOO_MANY)
    for name, value in variables.items():
        where = f"{field}.{name}"
        if not rendering.may_be_set(name):
            yield Problem(field=where, message="Not the name of a variable that may be set")
        elif fault := text_fault(value):
            yield Problem(field=where, message=fault)


def text_fault(text: str) -> str:
    """Why a text cannot be written into a configuration even between quotes; empty if it can."""
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        return "Must not contain control characters"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return "Not valid Unicode text"
    try:
        quoting.argument(text)
    except quoting.Unrenderable:
        return f"Longer than {quoting.ARGUMENT_LIMIT_BYTES} bytes"
    return ""


def value_fault(value: str, *, name: str = "x") -> str:
    """Why a value is not the arguments of the directive `name`; empty if it is."""
    if fault := text_fault(value):
        return fault
    try:
        blocks.emit(blocks.custom({name: value}, where="value"))
    except quoting.Unrenderable as error:
        text = error.message.removeprefix("value: ")
        return text[0].upper() + text[1:]
    return ""
