"""What the arguments of a directive may be: one check for each kind of value. Pure.

A check returns why the arguments are refused, or nothing. NGINX itself judges numbers and units;
here it is decided what a value can reach: files, sockets, programs, other machines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from fleetplane.domains.proxies.nginx.paths import GUARD, PathPolicy

Check = Callable[[Sequence[str], PathPolicy], str]

OWN_VARIABLES: Final = "$fleetplane"
"""Set by the agent alone: one of them keeps requests inside document roots."""

_WORD: Final = re.compile(r"[A-Za-z0-9_.=:|+%*,!@-][A-Za-z0-9_.=:|+%*,!@/-]*")
_HOST: Final = r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251})|\[[0-9A-Fa-f:.]{2,45}\])"
_AUTHORITY: Final = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
_NETWORK: Final = re.compile(r"all|[0-9A-Fa-f:.]{2,45}(?:/[0-9]{1,3})?")
_URL: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL
)
_UNWRITABLE: Final = re.compile(r"[\s\"'`;{}\\]")
_TRIED: Final = re.compile(r"=[0-9]{3}|@[A-Za-z0-9_-]+|(?:/|\$(?:document_)?uri\b)[^?]*(?:\?.*)?")
_VARIABLE: Final = re.compile(r"\$\{?([A-Za-z0-9_]+)\}?")
_URI_VARIABLES: Final = frozenset({"uri", "document_uri"})
_INSIDE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_KEY_SCHEMES: Final = ("engine:", "store:", "data:")


# Parts of values.


def names_socket(text: str) -> bool:
    """Whether a text names a Unix socket as NGINX spells it, in any letter case."""
    return "unix:" in text.lower()


def climbs(path: str) -> bool:
    """Whether a path has a segment that leads upwards."""
    return ".." in path.partition("?")[0].split("/")


def authority_fault(text: str, *, port: bool = False) -> str:
    """Why a text is not the `host` or `host:port` of another machine; empty if it is."""
    if "$" in text:
        return (
            "must not have a variable in the host or port: whoever sends a request would choose where it goes"
        )
    if text.lower() == "unix" or names_socket(text):
        return "must not name a Unix socket"
    if "@" in text:
        return "must not name a user: send an Authorization header instead"
    found = _AUTHORITY.fullmatch(text)
    if (
        found is None
        or (found["port"] and not 1 <= int(found["port"]) <= 65535)
        or (port and not found["port"])
    ):
        return "must be host:port or [v6]:port" if port else "must be a host, or host:port"
    return ""


def url_fault(text: str, *schemes: str) -> str:
    """Why a text is not a URL that requests may be passed on to; empty if it is."""
    words = " or ".join(schemes)
    found = _URL.fullmatch(text)
    if found is None or found["scheme"] not in schemes or _UNWRITABLE.search(text):
        return "must not name a Unix socket" if names_socket(text) else f"must be an {words} URL"
    return authority_fault(found["authority"])


def index_fault(names: Sequence[str]) -> str:
    if not names:
        return "must name a file"
    for name in names:
        if "$" in name or climbs(name) or "\\" in name:
            return f"{name[:80]!r} must be the name of a file, without variables or '..'"
    return ""


def replacement_fault(text: str) -> str:
    return f"{text[:80]!r} must not contain the segment '..'" if climbs(text) else ""


# Checks of arguments.


def nothing(arguments: Sequence[str], paths: PathPolicy) -> str:
    return "takes no arguments" if arguments else ""


def words(arguments: Sequence[str], paths: PathPolicy) -> str:
    """Switches, numbers, sizes, times, names: no variables, no paths."""
    for one in arguments:
        if not _WORD.fullmatch(one):
            return f"{one[:80]!r} is not a plain value"
    return ""


def text(arguments: Sequence[str], paths: PathPolicy) -> str:
    """What NGINX sends, compares or shows, and never opens or connects to. Variables are meant."""
    return ""


def assignment(arguments: Sequence[str], paths: PathPolicy) -> str:
    target = arguments[0] if arguments else ""
    if not re.fullmatch(r"\$[A-Za-z0-9_]+", target) or target.startswith(OWN_VARIABLES):
        return f"{target[:80]!r} is not a variable that may be set"
    return ""


def networks(arguments: Sequence[str], paths: PathPolicy) -> str:
    for one in arguments:
        if not _NETWORK.fullmatch(one):
            return f"{one[:80]!r} must be an address, a network or all"
    return ""


def proxy_url(arguments: Sequence[str], paths: PathPolicy) -> str:
    return url_fault(arguments[0], "http", "https") if len(arguments) == 1 else "takes one URL"


def grpc_url(arguments: Sequence[str], paths: PathPolicy) -> str:
    if len(arguments) != 1:
        return "takes one address"
    if "://" in arguments[0]:
        return url_fault(arguments[0], "grpc", "grpcs")
    return authority_fault(arguments[0])


def authority(arguments: Sequence[str], paths: PathPolicy) -> str:
    return authority_fault(arguments[0]) if len(arguments) == 1 else "takes one address"


def server_address(arguments: Sequence[str], paths: PathPolicy) -> str:
    if not arguments:
        return "takes an address"
    return authority_fault(arguments[0]) or words(arguments[1:], paths)


def resolvers(arguments: Sequence[str], paths: PathPolicy) -> str:
    for one in arguments:
        if "=" not in one and (fault := authority_fault(one)):
            return fault
    return words([one for one in arguments if "=" in one], paths)


def bound_address(arguments: Sequence[str], paths: PathPolicy) -> str:
    if list(arguments) == ["off"]:
        return ""
    return authority_fault(arguments[0]) if len(arguments) == 1 else "takes one address"


def root(arguments: Sequence[str], paths: PathPolicy) -> str:
    return paths.fault(arguments[0].removeprefix(GUARD)) if len(arguments) == 1 else "takes one path"


def file(arguments: Sequence[str], paths: PathPolicy) -> str:
    if len(arguments) != 1:
        return "takes one path"
    if arguments[0].startswith(_KEY_SCHEMES):
        return "must be the path of a file"
    return paths.fault(arguments[0])


def index(arguments: Sequence[str], paths: PathPolicy) -> str:
    return index_fault(arguments)


def tried(arguments: Sequence[str], paths: PathPolicy) -> str:
    for one in arguments:
        path = one.partition("?")[0]
        unknown = set(_VARIABLE.findall(path)) - _URI_VARIABLES
        if not _TRIED.fullmatch(one) or unknown or ".." in path or ".$" in path:
            return f"{one[:80]!r} must be a path made of text and $uri, =CODE or @name"
    return ""


def rewriting(arguments: Sequence[str], paths: PathPolicy) -> str:
    return next((fault for one in arguments[1:] if (fault := replacement_fault(one))), "")


def uris(arguments: Sequence[str], paths: PathPolicy) -> str:
    return next((fault for one in arguments if (fault := replacement_fault(one))), "")


def listening(arguments: Sequence[str], paths: PathPolicy) -> str:
    if not arguments:
        return "takes an address"
    port = arguments[0].isdecimal()
    return ("" if port else authority_fault(arguments[0].removeprefix("*:"))) or words(arguments[1:], paths)


def scratch(arguments: Sequence[str], paths: PathPolicy) -> str:
    """What NGINX would write: nowhere, or into the folder of a test."""
    if not arguments or not (arguments[0] in ("off", "stderr") or _INSIDE.fullmatch(arguments[0])):
        return "must be a relative path, off or stderr"
    return words(arguments[1:], paths)


def exactly(*allowed: str) -> Check:
    def check(arguments: Sequence[str], paths: PathPolicy) -> str:
        return "" if " ".join(arguments) in allowed else f"must be {' or '.join(allowed)}"

    return check


# Of directives that only the agent writes.


def own_listening(arguments: Sequence[str], paths: PathPolicy) -> str:
    if arguments and arguments[0].startswith("unix:"):
        return paths.own_fault(arguments[0].removeprefix("unix:"))
    return listening(arguments, paths)


def own_path(arguments: Sequence[str], paths: PathPolicy) -> str:
    return paths.own_fault(arguments[0]) if arguments else "takes a path"


def own_key(arguments: Sequence[str], paths: PathPolicy) -> str:
    good = len(arguments) == 1 and re.fullmatch(r"certs/[A-Za-z0-9_-]+\.(?:pem|key)", arguments[0])
    return "" if good else "must be a file of the release"


def own_target(arguments: Sequence[str], paths: PathPolicy) -> str:
    """A group, or a host, that the agent chose among by a variable of its own."""
    good = len(arguments) == 1 and re.fullmatch(
        r"(?:https?|grpcs?)://\$fleetplane_(?:split|to)_[0-9a-f]{12}", arguments[0]
    )
    return "" if good else "must be a URL"


def own_group(arguments: Sequence[str], paths: PathPolicy) -> str:
    """A group of servers of the `stream` context, or a variable of the agent's that names one."""
    good = len(arguments) == 1 and re.fullmatch(
        r"fps_[A-Za-z0-9_-]+|\$fleetplane_sni_[0-9a-f]{12}", arguments[0]
    )
    return "" if good else "must be a group of servers"


def own_trust(arguments: Sequence[str], paths: PathPolicy) -> str:
    return own_path(arguments, paths) if own_key(arguments, paths) else ""


def own_log(arguments: Sequence[str], paths: PathPolicy) -> str:
    return "" if list(arguments) == ["off"] else own_path(arguments, paths)


def own_include(arguments: Sequence[str], paths: PathPolicy) -> str:
    return "" if list(arguments) == ["conf.d/*.conf"] else own_path(arguments, paths)


def own_symlinks(arguments: Sequence[str], paths: PathPolicy) -> str:
    return "" if list(arguments[:1]) == ["on"] else "must be on"
