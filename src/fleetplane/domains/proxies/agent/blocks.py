"""NGINX configuration as a tree, and its text. Every argument passes through `quoting` here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fleetplane.domains.proxies.agent.quoting import Unrenderable, argument, split_arguments

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")

DENIED: Final = frozenset({
    # Run code, or load what runs.
    "load_module", "perl", "perl_set", "perl_modules", "perl_require", "ssl_engine",
    "google_perftools_profiles",
    # Read or write files of the machine at will.
    "include", "error_log", "access_log", "lock_file", "working_directory", "worker_rlimit_core", "pid",
    "ssl_certificate", "ssl_certificate_key", "ssl_password_file", "proxy_ssl_certificate_key",
    "proxy_ssl_password_file", "proxy_store", "proxy_store_access", "fastcgi_store", "uwsgi_store",
    "scgi_store",
    "create_full_put_path", "dav_methods", "dav_access",
    # Are the agent's own business.
    "user", "daemon", "master_process", "debug_points", "env", "events", "http", "server", "location",
    "upstream", "listen", "server_name", "log_format", "stub_status", "types",
})  # fmt: skip
DENIED_PARTS: Final = ("_by_lua", "_temp_path", "_cache_path")
DENIED_PREFIXES: Final = ("js_", "lua_", "perl_")


@dataclass(frozen=True, slots=True)
class Directive:
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    arguments: tuple[str, ...] = ()
    body: list[Node] = field(default_factory=list)


Node = Directive | Block


def directive(name: str, *arguments: str) -> Directive:
    return Directive(name, arguments)


def block(name: str, *arguments: str, body: Iterable[Node]) -> Block:
    return Block(name, arguments, list(body))


def emit(nodes: Iterable[Node], *, depth: int = 0) -> str:
    return "".join(f"{line}\n" for line in _lines(nodes, depth))


def _lines(nodes: Iterable[Node], depth: int) -> Iterator[str]:
    indent = "    " * depth
    for node in nodes:
        head = " ".join([node.name, *(argument(value) for value in node.arguments)])
        match node:
            case Directive():
                yield f"{indent}{head};"
            case Block(body=body):
                yield f"{indent}{head} {{"
                yield from _lines(body, depth + 1)
                yield f"{indent}}}"


def denied(name: str) -> bool:
    return name in DENIED or name.startswith(DENIED_PREFIXES) or any(part in name for part in DENIED_PARTS)


def custom(directives: Mapping[str, str], *, where: str) -> list[Directive]:
    """Directives a user wrote, each checked, taken apart as NGINX would and put together anew."""
    return [_custom(name, text, where) for name, text in sorted(directives.items())]


def _custom(name: str, text: str, where: str) -> Directive:
    if not _NAME.fullmatch(name):
        raise Unrenderable(f"{where}: {name[:80]!r} is not the name of a directive")
    if denied(name):
        raise Unrenderable(f"{where}: the directive {name} is not allowed")
    arguments = split_arguments(text)
    for value in arguments:
        if value.startswith("unix:") or "://unix:" in value:
            raise Unrenderable(f"{where}: {name} must not reach for the machine's own sockets")
    return Directive(name, arguments)
