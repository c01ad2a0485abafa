"""What a location may say: its path, where it leads to, its headers and rewrites. Pure.

Refused is what NGINX would refuse wherever it runs. What depends on the machine, such as a name that
must resolve or a variable that another directive may define, is left to the agents.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from urllib.parse import SplitResult, urlsplit

from msgspec import UNSET

from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules import directives
from fleetplane.web.rest.problems import Code, Problem

HEADERS_LIMIT = 64
REWRITES_LIMIT = 64
BLANK_OR_QUOTE = re.compile(r"[\s\"'`;{}\\]")

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_PATH = re.compile(r"(?:(?:=|\^~)\s+)?/\S*|~\*?\s+\S+")
_LITERAL = re.compile(r"\\Q.*?(?:\\E|$)|\\.|\(\?#[^)]*\)?")
"""Of a regular expression, what opens and closes nothing: quoted text, escapes, comments."""
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*(?P<end>\])?")
_NOTHING_TO_REPEAT = re.compile(r"(?:^|\|)[*+?]")
_EXTENDED = re.compile(r"\(\?[a-zA-Z^]*x")


def location_problems(location: Location, field: str, upstreams: Collection[str]) -> Iterator[Problem]:
    """`upstreams` are those that there are."""
    yield from _path_problems(location.path, f"{field}.path")
    ways = ("upstream_id", "proxy_pass", "root", "respond")
    served = [name for name in ways if getattr(location, name) is not UNSET]
    if len(served) != 1:
        yield Problem(
            field=field,
            message="Exactly one of upstream_id, proxy_pass, root and respond is required",
            code=Code.INCOMPATIBLE if served else Code.REQUIRED,
        )
    if location.upstream_id is not UNSET and location.upstream_id not in upstreams:
        yield Problem(
            field=f"{field}.upstream_id",
            message="There is no such upstream in this workspace",
            code=Code.UNKNOWN_REFERENCE,
        )
    if location.streaming is not UNSET and location.root is not UNSET:
        yield Problem(
            field=f"{field}.streaming", message="Only of a location that proxies", code=Code.INCOMPATIBLE
        )
    yield from _header_problems(location, field)
    yield from reach_problems(location, field)
    if location.root is not UNSET and "root" in (location.custom_directives or {}):
        yield Problem(
            field=f"{field}.custom_directives.root",
            message="The location has a root already",
            code=Code.INCOMPATIBLE,
        )


def reach_problems(location: Location, field: str) -> Iterator[Problem]:
    """What of a location may not reach NGINX, wherever and whenever it was accepted."""
    yield from _proxy_pass_problems(location, f"{field}.proxy_pass")
    if location.root is not UNSET and (fault := directives.written_fault("root", location.root)):
        yield Problem(field=f"{field}.root", message=fault)
    if location.index is not UNSET and (fault := directives.written_fault("index", *location.index.split())):
        yield Problem(field=f"{field}.index", message=fault)
    yield from _rewrite_problems(location, field)
    own = location.custom_directives or {}
    yield from directives.problems(
        own, field=f"{field}.custom_directives", contexts={DirectiveContext.LOCATION}
    )
    if (
        "alias" in own
        and not location.path.startswith("=")
        and (_is_regex(location.path) or not location.path.endswith("/"))
    ):
        yield Problem(
            field=f"{field}.custom_directives.alias",
            message="Needs a location whose path ends with '/'",
            code=Code.INCOMPATIBLE,
        )


def place(path: str) -> tuple[str, str]:
    """What NGINX tells locations apart by: `^~` is a prefix like any other, asked first."""
    modifier, _, rest = " ".join(path.split()).rpartition(" ")
    return ("" if modifier == "^~" else modifier, rest)


def _is_regex(path: str) -> bool:
    return path.startswith("~")


def _path_problems(path: str, field: str) -> Iterator[Problem]:
    fault = directives.text_fault(path)
    if fault or not _PATH.fullmatch(path):
        yield Problem(field=field, message=fault or "Must start with '/', '= /', '^~ /' or '~ '")
    elif _is_regex(path) and (fault := regex_fault(place(path)[1])):
        yield Problem(field=field, message=fault)


def regex_fault(pattern: str) -> str:
    """Why it is no regular expression in any dialect; empty if that cannot be told from here."""
    if _EXTENDED.search(pattern):
        return ""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        return "Ends after a backslash"
    rest, depth = pattern, 0
    bare = ""
    while rest:
        skipped = _LITERAL.match(rest) or _CLASS.match(rest)
        if skipped is None:
            depth += {"(": 1, ")": -1}.get(rest[0], 0)
            bare += rest[0]
            rest = rest[1:]
        else:
            if skipped[0].startswith("[") and not skipped["end"]:
                return "A '[' is not closed"
            bare += "x"
            rest = rest[skipped.end() :]
        if depth < 0:
            return "A ')' closes nothing"
    if depth:
        return "A '(' is not closed"
    return "Nothing to repeat" if _NOTHING_TO_REPEAT.search(bare) else ""


def _proxy_pass_problems(location: Location, field: str) -> Iterator[Problem]:
    if location.proxy_pass is UNSET:
        return
    url = _url(location.proxy_pass)
    if fault := directives.written_fault("proxy_pass", location.proxy_pass):
        yield Problem(field=field, message=fault)
    elif url is None:
        yield Problem(field=field, message="Must be an http or https URL")
    elif _is_regex(location.path) and (url.path or url.query) and "$" not in location.proxy_pass:
        yield Problem(
            field=field,
            message="Must have no path where the location is a regular expression",
            code=Code.INCOMPATIBLE,
        )


def _url(text: str) -> SplitResult | None:
    if directives.text_fault(text) or BLANK_OR_QUOTE.search(text):
        return None
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if good else None


def _header_problems(location: Location, field: str) -> Iterator[Problem]:
    headers = location.custom_headers or ()
    if len(headers) > HEADERS_LIMIT:
        yield Problem(
            field=f"{field}.custom_headers", message=f"More than {HEADERS_LIMIT} headers", code=Code.TOO_MANY
        )
    for index, header in enumerate(headers):
        where = f"{field}.custom_headers.{index}"
        if not _HEADER.fullmatch(header.name):
            yield Problem(field=f"{where}.name", message="Not the name of a header")
        if fault := directives.text_fault(header.value):
            yield Problem(field=f"{where}.value", message=fault)


def _rewrite_problems(location: Location, field: str) -> Iterator[Problem]:
    rules = location.rewrite_rules or ()
    if len(rules) > REWRITES_LIMIT:
        yield Problem(
            field=f"{field}.rewrite_rules", message=f"More than {REWRITES_LIMIT} rules", code=Code.TOO_MANY
        )
    for index, rule in enumerate(rules):
        where = f"{field}.rewrite_rules.{index}"
        for name in ("pattern", "replacement"):
            text = getattr(rule, name)
            # The other argument is one that nothing is wrong with.
            arguments = (text, "/") if name == "pattern" else ("^", text)
            if fault := directives.written_fault("rewrite", *arguments) or (
                "" if text else "Must not be empty"
            ):
                yield Problem(field=f"{where}.{name}", message=fault)
        if fault := regex_fault(rule.pattern):
            yield Problem(field=f"{where}.pattern", message=fault)
