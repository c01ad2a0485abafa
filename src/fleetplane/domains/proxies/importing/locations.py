"""Locations of a configuration, and answers without one. Pure.

A location that cannot be imported answers 503: without it another one would answer in its place, and show the
source of a program, for example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fleetplane.domains.proxies.importing.guards import CLOSED, closed, guards
from fleetplane.domains.proxies.importing.reading import Statement
from fleetplane.domains.proxies.importing.report import (
    LEFT_TO_AGENT,
    Imported,
    StatementOutcome,
    bytes_of,
    keep_raw,
    seconds,
)
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules.texts import target_fault, template_fault

_DEFAULT_HEADERS: Final = {
    "host": {"$host"},
    "x-real-ip": {"$remote_addr"},
    "x-forwarded-for": {"$proxy_add_x_forwarded_for"},
    "x-forwarded-proto": {"$scheme"},
    "upgrade": {"$http_upgrade"},
    "connection": {"upgrade", "Upgrade", "$connection_upgrade", ""},
}
_TIMEOUTS: Final = {
    "proxy_connect_timeout": "connect",
    "proxy_read_timeout": "read",
    "proxy_send_timeout": "send",
    "client_body_timeout": "client_body",
    "send_timeout": "client_send",
    "keepalive_timeout": "keepalive",
}
_PROGRAMS: Final = ("fastcgi_", "uwsgi_", "scgi_")
INHERITED: Final = frozenset({"root", "index", "client_max_body_size", "try_files", *_TIMEOUTS})
_FAMILIES: Final = ("add_header", "proxy_set_header", "allow", "gzip", "auth_basic")


def family(name: str) -> str:
    return next((one for one in _FAMILIES if name == one or name.startswith(f"{one}_")), "") or (
        "allow" if name == "deny" else ""
    )


def responding(one: Statement, made: Imported) -> dict[str, Any]:
    code, *rest = one.arguments if one.arguments[0].isdecimal() else ("302", *one.arguments)
    status, text = int(code), " ".join(rest)
    if status in (301, 302, 303, 307, 308):
        if fault := target_fault(text):
            made.note(one, StatementOutcome.REFUSED, fault)
            return {"respond": {"status": CLOSED}}
        return {"respond": {"status": status, "to": text}}
    if "$" in text or not 200 <= status <= 599:
        made.note(one, StatementOutcome.REFUSED, "an answer with variables, or that closes the connection")
        return {"respond": {"status": CLOSED}}
    return {"respond": {"status": status, "content_type": "text/plain", **({"body": text} if text else {})}}


def _kind(one: Statement) -> str:
    """What a directive is one of: where a level says one of them, all of the outer ones are forgotten."""
    return family(one.name) or one.name


def _inherited(levels: Sequence[Sequence[Statement]], said: set[str]) -> Iterator[Statement]:
    nearest: dict[str, list[Statement]] = {}
    for level in levels:
        here: dict[str, list[Statement]] = {}
        for one in level:
            if one.block is None and (family(one.name) or one.name in INHERITED):
                here.setdefault(_kind(one), []).append(one)
        nearest |= here
    for kind, many in nearest.items():
        if kind not in said:
            yield from many


class ImportedLocation:
    def __init__(self, one: Statement, levels: Sequence[Sequence[Statement]], made: Imported) -> None:
        """`levels` are what stands around it, from the outermost on."""
        self._one = one
        self._made = made
        self._own = one.block or ()
        self._inherited = [*_inherited(levels, {_kind(each) for each in self._own})]
        self._content: dict[str, Any] = {}
        self._rules: list[dict[str, str]] = []
        self._raw: dict[str, str] = {}
        self._serving: dict[str, Any] = {}
        self._refused = ""

    def convert(self) -> dict[str, Any]:
        self._made.note(self._one, StatementOutcome.UNDERSTOOD)
        for one in self._inherited:
            self._statement(one, silent=True)
        for one in self._own:
            self._statement(one, silent=False)
        path = " ".join(self._one.arguments)
        self._settle()
        if self._refused:
            self._made.note(
                self._one, StatementOutcome.REFUSED, f"{self._refused}; it answers {CLOSED} instead"
            )
            return closed({"path": path})
        made = {"path": path, **self._serving}
        if self._content:
            made["content"] = self._content
        if self._rules:
            everybody = [] if self._rules[-1]["network"] == "all" else [{"action": "allow", "network": "all"}]
            made["access"] = {"rules": [*self._rules, *everybody]}
        if self._raw:
            made["custom_directives"] = self._raw
        return made

    def _settle(self) -> None:
        """A root that is inherited gives way to whatever the location itself does."""
        ways = {"upstream_id", "proxy_pass", "root", "respond"} & self._serving.keys()
        if len(ways) > 1:
            self._serving.pop("root", None)
            self._content.pop("fallback", None)
        if "root" not in self._serving:
            self._serving.pop("index", None)
            self._content.pop("fallback", None)
        if not ways:
            self._refused = self._refused or "it serves nothing that was understood"

    def _statement(self, one: Statement, *, silent: bool) -> None:
        outcome, why = self._taken(one)
        if outcome is None:
            if silent:
                return
            kept = keep_raw(one, self._raw, {DirectiveContext.LOCATION}, self._made)
            if kept is StatementOutcome.REFUSED and guards(one):
                self._refused = self._refused or f"{one.name} may keep strangers away"
        elif not silent or outcome is StatementOutcome.REFUSED:
            self._made.note(one, outcome, why)

    def _taken(self, one: Statement) -> tuple[StatementOutcome | None, str]:  # one table
        name, arguments = one.name, one.arguments
        try:
            match name:
                case "proxy_pass":
                    return self._proxy_pass(arguments[0])
                case "root":
                    self._serving["root"] = arguments[0]
                case "index" if all("$" not in each for each in arguments):
                    self._serving["index"] = " ".join(arguments)
                case "try_files":
                    return self._try_files(arguments)
                case "return":
                    self._serving |= responding(one, self._made)
                case "client_max_body_size":
                    self._content["max_body_bytes"] = bytes_of(arguments[0])
                case "proxy_buffering":
                    self._content["buffering"] = arguments[0] == "on"
                case "allow" | "deny":
                    self._rules.append({"action": name, "network": arguments[0]})
                case "add_header" if not template_fault(arguments[1]):
                    rule = {"action": "add", "name": arguments[0], "value": arguments[1]}
                    self._content.setdefault("headers", []).append(rule)
                    if "always" not in arguments:
                        return StatementOutcome.UNDERSTOOD, "on errors, too"
                case "proxy_set_header":
                    return self._request_header(arguments[0], arguments[1] if len(arguments) > 1 else "")
                case "proxy_hide_header":
                    rule = {"action": "remove", "name": arguments[0]}
                    self._content.setdefault("headers", []).append(rule)
                case "auth_basic" | "auth_basic_user_file":
                    if arguments == ("off",):
                        return StatementOutcome.UNDERSTOOD, ""
                    self._refused = "users with passwords are not imported: make an access list, and name it"
                    return StatementOutcome.REFUSED, self._refused
                case _ if name in _TIMEOUTS:
                    self._content.setdefault("timeouts", {})[_TIMEOUTS[name]] = seconds(arguments[0])
                case _ if family(name) == "gzip":
                    return self._gzip(name, arguments)
                case _ if name in LEFT_TO_AGENT:
                    return StatementOutcome.AGENT, ""
                case _ if name.startswith(_PROGRAMS):
                    self._refused = "FastCGI, uwsgi and SCGI choose the program that runs"
                    return StatementOutcome.REFUSED, self._refused
                case "include" | "if" | "location":
                    self._refused = f"{name} has no typed form here"
                    return StatementOutcome.REFUSED, self._refused
                case _:
                    return None, ""
        except (ValueError, IndexError):
            return None, ""
        return StatementOutcome.UNDERSTOOD, ""

    def _proxy_pass(self, url: str) -> tuple[StatementOutcome, str]:
        found = re.fullmatch(r"(https?)://([^/]+)(/.*)?", url)
        group = next((one for one in self._made.upstreams if found and one["id"] == found[2]), None)
        if group is not None and found is not None:
            if found[3] is not None:
                self._refused = "proxy_pass to an upstream with a path"
                return StatementOutcome.REFUSED, self._refused
            if found[1] == "https":
                group |= {"protocol": "https", "tls": {"verify": False}}
            self._serving["upstream_id"] = group["id"]
            return StatementOutcome.UNDERSTOOD, ""
        if found is None or "$" in found[2] or "unix:" in url:
            self._refused = "proxy_pass must name a host in plain text"
            return StatementOutcome.REFUSED, self._refused
        self._serving["proxy_pass"] = url
        return StatementOutcome.UNDERSTOOD, ""

    def _try_files(self, arguments: tuple[str, ...]) -> tuple[StatementOutcome | None, str]:
        *tried, last = arguments
        if [one for one in tried if one not in ("$uri", "$uri/")]:
            return None, ""
        if last == "=404":
            return StatementOutcome.UNDERSTOOD, "which is so anyway"
        if not last.startswith("/") or "$" in last:
            return None, ""
        self._content["fallback"] = last
        return StatementOutcome.UNDERSTOOD, ""

    def _request_header(self, name: str, value: str) -> tuple[StatementOutcome | None, str]:
        if value in _DEFAULT_HEADERS.get(name.lower(), set()):
            return StatementOutcome.UNDERSTOOD, "which is so anyway"
        if template_fault(value) or name.lower() in ("connection", "upgrade"):
            return None, ""
        action = {"action": "set", "value": value} if value else {"action": "remove"}
        self._content.setdefault("headers", []).append({"direction": "request", "name": name, **action})
        return StatementOutcome.UNDERSTOOD, ""

    def _gzip(self, name: str, arguments: tuple[str, ...]) -> tuple[StatementOutcome | None, str]:
        compression = self._content.setdefault("compression", {"gzip": False})
        match name:
            case "gzip":
                compression["gzip"] = arguments == ("on",)
            case "gzip_types":
                types = [one for one in arguments if one != "text/html"]
                compression["types"] = types
            case "gzip_min_length":
                compression["min_length"] = int(arguments[0])
            case "gzip_comp_level":
                compression["level"] = int(arguments[0])
            case "gzip_vary" | "gzip_proxied":
                return StatementOutcome.UNDERSTOOD, "which is so anyway"
            case _:
                return None, ""
        return StatementOutcome.UNDERSTOOD, ""
