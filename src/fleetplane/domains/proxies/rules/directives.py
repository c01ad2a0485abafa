"""Raw NGINX text that callers may add: one directive a name, and nothing that escapes it.

There is one allow-list and one reading of such text, `nginx`, which the agents use again. What they
would not write into a configuration is refused here, at its field, before any of them sees it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fleetplane.domains.proxies.nginx import blocks, judging, rendering
from fleetplane.domains.proxies.nginx.blocks import Directive
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.table import DirectiveContext, TextAuthor
from fleetplane.web.rest.problems import Code, Problem

DIRECTIVES_LIMIT = 64


def problems(
    directives: Mapping[str, str], *, field: str, contexts: Collection[DirectiveContext]
) -> Iterator[Problem]:
    """`contexts` are where they would stand."""
    if len(directives) > DIRECTIVES_LIMIT:
        yield Problem(field=field, message=f"More than {DIRECTIVES_LIMIT} directives", code=Code.TOO_MANY)
    for name, value in directives.items():
        where = f"{field}.{name}"
        if judging.not_allowed(name, contexts):
            yield Problem(field=where, message="This directive is not allowed here", code=Code.INCOMPATIBLE)
        elif fault := value_fault(value, name=name, contexts=contexts):
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
        blocks.argument(text)
    except blocks.Unrenderable:
        return f"Longer than {blocks.ARGUMENT_LIMIT_BYTES} bytes"
    return ""


def value_fault(value: str, *, name: str, contexts: Collection[DirectiveContext]) -> str:
    """Why a value is not the arguments of the directive `name`; empty if it is."""
    if fault := text_fault(value):
        return fault
    try:
        judging.raw({name: value}, contexts, ANYWHERE, where="")
    except blocks.Unrenderable as error:
        return capital(error.message.removeprefix(": ").removeprefix(f"{name}: "))
    return ""


def written_fault(name: str, *arguments: str) -> str:
    """Why an agent would not write this directive, of typed fields, into a location; empty if it would."""
    node = Directive(name, arguments)
    fault = judging.directive_fault(node, {DirectiveContext.LOCATION}, ANYWHERE, author=TextAuthor.RAW)
    return next(filter(None, map(text_fault, arguments)), "") or capital(fault)


def capital(text: str) -> str:
    """A fault as the sentence of a problem."""
    return text[:1].upper() + text[1:]
