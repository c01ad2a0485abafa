"""Upstreams of a configuration. Pure."""

from __future__ import annotations

import re
from typing import Any

from fleetplane.domains.proxies.importing.reading import Statement
from fleetplane.domains.proxies.importing.report import Imported, StatementOutcome, seconds


def group(one: Statement, made: Imported, *, identity: str) -> dict[str, Any] | None:
    """Add a group of servers to an import; None if it has no server that was understood."""
    algorithms = {"least_conn": "least_connections", "ip_hash": "ip_hash"}
    found: dict[str, Any] = {"id": identity, "name": _unique(one.arguments[0], made), "servers": []}
    made.note(one, StatementOutcome.UNDERSTOOD)
    for inner in one.block or ():
        if inner.name == "server" and ":" in inner.arguments[0] and "unix:" not in inner.arguments[0]:
            found["servers"].append(server_of(inner))
        elif inner.name == "server" and re.fullmatch(r"[A-Za-z0-9_.-]+", inner.arguments[0]):
            found["servers"].append({**server_of(inner), "address": f"{inner.arguments[0]}:80"})
        elif inner.name in algorithms:
            found["algorithm"] = algorithms[inner.name]
        elif inner.name == "keepalive":
            found["keepalive_connections"] = int(inner.arguments[0])
        elif inner.name == "random":
            found["balancing"] = {"method": "random"}
        elif inner.name == "hash" and inner.arguments[:1] in (("$remote_addr",), ("$binary_remote_addr",)):
            found["balancing"] = {"method": "hash", "key": "address"}
        elif inner.name == "zone":
            made.note(inner, StatementOutcome.AGENT)
            continue
        else:
            made.note(inner, StatementOutcome.REFUSED, "an upstream has no typed form for it")
            continue
        made.note(inner, StatementOutcome.UNDERSTOOD)
    if not found["servers"]:
        return None
    made.upstreams.append(found)
    return found


def _unique(name: str, made: Imported) -> str:
    """The name as the workspace spells it; groups of HTTP and of streams may be called the same."""
    taken = {known["name"] for known in made.upstreams}
    short = slug(name)
    return short if short not in taken else f"{short[:60].rstrip('-')}-{len(taken)}"


def server_of(inner: Statement) -> dict[str, Any]:
    server: dict[str, Any] = {"address": inner.arguments[0]}
    numbers = {"weight": "weight", "max_fails": "max_fails", "max_conns": "max_connections"}
    for option in inner.arguments[1:]:
        name, _, value = option.partition("=")
        if name in numbers:
            server[numbers[name]] = int(value)
        elif name == "fail_timeout":
            server["fail_timeout"] = seconds(value)
        elif name in ("backup", "down"):
            server[name] = True
    return server


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-") or "upstream"
