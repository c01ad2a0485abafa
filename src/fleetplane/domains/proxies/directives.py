"""Raw NGINX text that callers may add: one directive a name, and nothing that escapes it.

Quoting is a security boundary. A value is read the way NGINX reads it; if it could end its
directive, open a block, start a comment or break out of its line, it is refused. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fleetplane.web.problems import Code, Problem

DIRECTIVES_LIMIT = 64
VALUE_LIMIT_BYTES = 4096
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

DENIED = frozenset({
    "include", "load_module", "user", "pid", "error_log", "daemon", "master_process", "working_directory",
    "ssl_engine", "lock_file", "worker_rlimit_core", "env", "events", "http", "server", "location",
    "upstream", "ssl_certificate", "ssl_certificate_key", "ssl_password_file", "debug_points", "perl",
    "perl_set", "perl_modules", "perl_require", "js_import", "js_content", "js_set", "js_path", "js_include",
})  # fmt: skip
"""What could run code, read files of the machine, or take the agent's own directives from it."""
_DENIED_PART = "_by_lua"


def problems(directives: Mapping[str, str], *, field: str) -> Iterator[Problem]:
    if len(directives) > DIRECTIVES_LIMIT:
        yield Problem(field=field, message=f"More than {DIRECTIVES_LIMIT} directives", code=Code.TOO_MANY)
    for name, value in directives.items():
        where = f"{field}.{name}"
        if not _NAME.fullmatch(name):
            yield Problem(field=where, message="Not the name of a directive")
        elif name in DENIED or _DENIED_PART in name:
            yield Problem(field=where, message="This directive is not allowed", code=Code.INCOMPATIBLE)
        elif fault := value_fault(value):
            yield Problem(field=where, message=fault)


def variable_problems(variables: Mapping[str, str], *, field: str) -> Iterator[Problem]:
    """Environment variables of the NGINX process."""
    if len(variables) > DIRECTIVES_LIMIT:
        yield Problem(field=field, message=f"More than {DIRECTIVES_LIMIT} variables", code=Code.TOO_MANY)
    for name, value in variables.items():
        where = f"{field}.{name}"
        if not _VARIABLE.fullmatch(name):
            yield Problem(field=where, message="Not the name of a variable")
        elif fault := text_fault(value):
            yield Problem(field=where, message=fault)


def text_fault(text: str) -> str:
    """Why a text cannot be written into a configuration even between quotes; empty if it can."""
    if len(text.encode("utf-8", "replace")) > VALUE_LIMIT_BYTES:
        return f"Longer than {VALUE_LIMIT_BYTES} bytes"
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        return "Must not contain control characters"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return "Not valid Unicode text"
    return ""


def value_fault(value: str) -> str:
    """Why a value is not the arguments of one directive; empty if it is."""
    if fault := text_fault(value):
        return fault
    quote, escaped, at_start = "", False, True
    for character in value:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and at_start:
            quote = character
        elif character in ";{}":
            return f"Must not contain {character!r} outside quotes"
        elif character == "#" and at_start:
            return "Must not start a comment"
        at_start = not quote and not escaped and character == " "
    if quote or escaped:
        return "Ends inside quotes or after a backslash"
    return ""
