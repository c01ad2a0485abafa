"""The `stream` part of a configuration: TCP and UDP that is passed on. Pure.

A server of which anything is not understood is not imported at all: what is left out may be what kept
strangers away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from fleetplane.domains.proxies.importing.groups import group, slug
from fleetplane.domains.proxies.importing.listening import EVERYWHERE
from fleetplane.domains.proxies.importing.reading import Statement
from fleetplane.domains.proxies.importing.report import (
    LEFT_TO_AGENT,
    Imported,
    StatementOutcome,
    bytes_of,
    seconds,
)

_SNI: Final = "$ssl_preread_server_name"
_SHARED: Final = frozenset(
    {
        "proxy_timeout",
        "proxy_connect_timeout",
        "proxy_responses",
        "proxy_download_rate",
        "proxy_upload_rate",
        "proxy_protocol",
        "ssl_preread",
        "limit_conn",
        "allow",
        "deny",
    }
)
"""What servers inherit, unless they say the same."""


class Unknown(Exception):
    """A statement of a server that has no typed form."""


def convert_streams(block: Sequence[Statement], made: Imported) -> None:
    """Add the streams of a `stream` block, and their upstreams, to an import."""
    groups = {one.arguments[0]: _group(one, made) for one in block if one.name == "upstream"}
    tables = {one.arguments[1]: one for one in block if one.name == "map" and len(one.arguments) == 2}
    zones = [one for one in block if one.name == "limit_conn_zone"]
    by_address = {_zone(one) for one in zones if one.arguments[0] in ("$binary_remote_addr", "$remote_addr")}
    shared = [one for one in block if one.name in _SHARED]
    for one in block:
        if one in shared or (one.name == "limit_conn_zone" and _zone(one) in by_address):
            made.note(one, StatementOutcome.UNDERSTOOD)
        elif one.name in LEFT_TO_AGENT or one.name.startswith("map_hash_"):
            made.note(one, StatementOutcome.AGENT)
        elif one.name == "map" and one.arguments[:1] == (_SNI,):
            made.note(one, StatementOutcome.UNDERSTOOD)
        elif one.name not in ("server", "upstream"):
            made.note(one, StatementOutcome.REFUSED, "streams have no typed form for it")
    for one in block:
        if one.name == "server" and one.block is not None:
            _StreamServer(one, shared, groups, tables, by_address, made).convert()


def _zone(one: Statement) -> str:
    return next((text[5:].partition(":")[0] for text in one.arguments if text.startswith("zone=")), "")


def _group(one: Statement, made: Imported) -> str:
    """The id under which a group of servers is imported; empty if it cannot be."""
    found = group(one, made, identity=f"stream:{one.arguments[0]}")
    return str(found["id"]) if found is not None else ""


class _StreamServer:
    def __init__(
        self,
        one: Statement,
        shared: Sequence[Statement],
        groups: dict[str, str],
        tables: dict[str, Statement],
        zones: set[str],
        made: Imported,
    ) -> None:
        self._one = one
        own = one.block or ()
        said = {"allow" if each.name == "deny" else each.name for each in own}
        inherited = [each for each in shared if ("allow" if each.name == "deny" else each.name) not in said]
        self._block = [*inherited, *own]
        self._own = own
        self._groups = groups
        self._tables = tables
        self._zones = zones
        self._made = made
        self._stream: dict[str, Any] = {}
        self._ports: list[tuple[int, str]] = []
        self._pass = ""

    def convert(self) -> None:
        """All of it, or none of it with the reason."""
        before = len(self._made.upstreams)
        try:
            for one in self._block:
                self._statement(one)
            self._target()
        except Unknown as fault:
            del self._made.upstreams[before:]
            self._made.note(
                self._one, StatementOutcome.REFUSED, f"{fault}; nothing of this server is imported"
            )
            return
        self._made.note(self._one, StatementOutcome.UNDERSTOOD)
        for one in self._own:
            outcome = (
                StatementOutcome.AGENT
                if one.name in ("access_log", "error_log")
                else StatementOutcome.UNDERSTOOD
            )
            self._made.note(one, outcome)
        for port, protocol in self._ports:
            name = slug(f"{self._pass.lstrip('$')}-{port}")
            if any(known["name"] == name for known in self._made.streams):
                name = f"{name[:58]}-{protocol}"
            made = {"id": name, "name": name, "listen_port": port, "protocol": protocol, **self._stream}
            self._made.streams.append(made)

    def _statement(self, one: Statement) -> None:
        try:
            self._taken(one)
        except (ValueError, IndexError) as error:
            raise Unknown(f"{one.words[:80]}: has no typed form") from error

    def _taken(self, one: Statement) -> None:
        name, arguments = one.name, one.arguments
        match name:
            case "listen":
                self._listen(arguments)
            case "proxy_pass":
                self._pass = arguments[0]
            case "proxy_protocol":
                if arguments == ("on",):
                    self._stream["send_proxy_protocol"] = True
            case "proxy_timeout":
                self._stream.setdefault("timeouts", {})["idle"] = seconds(arguments[0])
            case "proxy_connect_timeout":
                self._stream.setdefault("timeouts", {})["connect"] = seconds(arguments[0])
            case "proxy_responses":
                self._stream["responses"] = int(arguments[0])
            case "proxy_download_rate" | "proxy_upload_rate":
                field = f"{name.removeprefix('proxy_').removesuffix('_rate')}_bytes_per_second"
                if rate := bytes_of(arguments[0]):
                    self._stream.setdefault("limits", {})[field] = rate
            case "limit_conn" if arguments[0] in self._zones:
                self._stream.setdefault("limits", {})["connections"] = int(arguments[1])
            case "allow" | "deny":
                rules = self._stream.setdefault("rules", [])
                rules.append({"action": name, "network": arguments[0]})
            case "access_log":
                if arguments == ("off",):
                    self._stream["log"] = False
            case "error_log" | "tcp_nodelay" | "ssl_preread":  # with routes, which say it
                pass
            case _:
                raise Unknown(f"{one.words[:80]}: has no typed form")

    def _listen(self, arguments: Sequence[str]) -> None:
        address, _, port = arguments[0].rpartition(":")
        if address not in EVERYWHERE:
            raise Unknown(f"listen {arguments[0]}: streams listen on every address that the node serves")
        if unknown := set(arguments[1:]) - {"udp", "reuseport"}:
            raise Unknown(f"listen {min(unknown)}: has no typed form")
        place = (int(port), "udp" if "udp" in arguments else "tcp")
        if place not in self._ports:
            self._ports.append(place)

    def _target(self) -> None:
        if not self._ports or not self._pass:
            raise Unknown("listen and proxy_pass are needed")
        if self._pass.startswith("$"):
            self._routed(self._pass)
        else:
            self._stream["upstream_id"] = self._group_of(self._pass)

    def _group_of(self, target: str) -> str:
        if target in self._groups:
            if not self._groups[target]:
                raise Unknown(f"its upstream {target} was not understood")
            return self._groups[target]
        if not re.fullmatch(r"[A-Za-z0-9_.-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}", target):
            raise Unknown(f"proxy_pass {target[:80]}: must be a group, or host:port")
        identity = f"stream:{target}"
        if all(known["id"] != identity for known in self._made.upstreams):
            made = {"id": identity, "name": slug(f"to-{target}"), "servers": [{"address": target}]}
            self._made.upstreams.append(made)
        return identity

    def _routed(self, variable: str) -> None:
        """A table from the name in the handshake to groups."""
        table = self._tables.get(variable)
        preread = any(one.name == "ssl_preread" and one.arguments == ("on",) for one in self._block)
        if table is None or table.arguments[0] != _SNI or not preread:
            raise Unknown(f"proxy_pass {variable}: only a map of {_SNI} has a typed form")
        names: dict[str, list[str]] = {}
        for row in table.block or ():
            if row.name in ("hostnames", "volatile"):
                continue
            if not row.arguments or row.name.startswith("~") or row.name == "include":
                raise Unknown(f"map {row.words[:80]}: only names have a typed form")
            if row.name == "default":
                if row.arguments[0]:
                    self._stream["upstream_id"] = self._group_of(row.arguments[0])
            elif row.arguments[0]:
                names.setdefault(self._group_of(row.arguments[0]), []).append(row.name)
        self._stream["routes"] = [
            {"names": many, "upstream_id": identity} for identity, many in names.items()
        ]
