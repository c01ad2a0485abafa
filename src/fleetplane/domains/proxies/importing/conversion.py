"""From the statements of a configuration to typed hosts and upstreams, and what became of each. Pure.

What is not understood is never left out silently. A location that cannot be imported answers 503: without it
another one would answer in its place, and show the source of a program, for example.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from fleetplane.domains.proxies.importing.groups import group
from fleetplane.domains.proxies.importing.guards import CLOSED, closed, guards
from fleetplane.domains.proxies.importing.listening import listen_fault, listen_port
from fleetplane.domains.proxies.importing.locations import INHERITED, ImportedLocation, family, responding
from fleetplane.domains.proxies.importing.reading import Statement
from fleetplane.domains.proxies.importing.report import (
    LEFT_TO_AGENT,
    FoundCertificate,
    Imported,
    StatementOutcome,
    keep_raw,
)
from fleetplane.domains.proxies.importing.streams import convert_streams
from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.nginx.table import DirectiveContext


def convert(statements: Sequence[Statement], addresses: Collection[str] = ()) -> Imported:
    """`addresses` are those that hosts here stand for: servers of these alone are imported like any other."""
    made = Imported()
    for one in statements:
        if one.name == "http" and one.block is not None:
            _http(one.block, addresses, made)
        elif one.name == "stream" and one.block is not None:
            convert_streams(one.block, made)
        elif one.name == "mail":
            made.note(one, StatementOutcome.REFUSED, f"{one.name} is not among what is configured here")
        elif one.name in LEFT_TO_AGENT or one.name.startswith("worker_"):
            made.note(one, StatementOutcome.AGENT)
        else:
            made.note(one, StatementOutcome.REFUSED, "not known in this place")
    return made


def _http(block: Sequence[Statement], addresses: Collection[str], made: Imported) -> None:
    outer = [one for one in block if one.name not in ("server", "upstream")]
    for one in block:
        if one.name == "upstream" and one.block is not None:
            group(one, made, identity=one.arguments[0])
    unguarded = ""
    shared = [one for one in outer if family(one.name) or one.name in INHERITED]
    for one in outer:
        if one in shared:
            made.note(one, StatementOutcome.UNDERSTOOD)
        elif one.name in LEFT_TO_AGENT:
            made.note(one, StatementOutcome.AGENT)
        elif one.name == "map" and one.arguments[:1] == ("$http_upgrade",):
            made.note(one, StatementOutcome.UNDERSTOOD, "WebSocket connections are passed on always")
        else:
            unguarded = _keep(one, made.settings, judging.SETTINGS, made) or unguarded
    for one in block:
        if one.name == "server" and one.block is not None:
            _HttpServer(one, shared, unguarded, addresses, made).convert()


def _keep(one: Statement, kept: dict[str, str], contexts: Iterable[DirectiveContext], made: Imported) -> str:
    """Keep a statement around locations raw; what it says if it is not kept and may keep somebody away."""
    outcome = keep_raw(one, kept, contexts, made)
    return one.words[:80] if outcome is StatementOutcome.REFUSED and guards(one) else ""


# Servers.


class _HttpServer:
    def __init__(
        self,
        one: Statement,
        outer: Sequence[Statement],
        unguarded: str,
        addresses: Collection[str],
        made: Imported,
    ) -> None:
        """`unguarded` is what may have kept strangers away and is not imported, if anything."""
        self._one = one
        self._unguarded = unguarded
        self._addresses = addresses
        self._made = made
        self._outer = outer
        self._block = one.block or ()
        self._raw: dict[str, str] = {}
        self._host: dict[str, Any] = {}

    def convert(self) -> None:
        self._made.note(self._one, StatementOutcome.UNDERSTOOD)
        said = [one for one in self._block if one.name == "listen"]
        listens = [one for one in said if not listen_fault(one.arguments, self._addresses)]
        if said and not listens:
            for one in said:
                self._made.note(one, StatementOutcome.REFUSED, listen_fault(one.arguments, self._addresses))
            why = "it listens nowhere where hosts here do; nothing of this server is imported"
            self._made.note(self._one, StatementOutcome.REFUSED, why)
            return
        ports = sorted({listen_port(one.arguments[0]) for one in listens} or {80})
        locations = [*self._locations()]
        for one in self._block:
            self._of_server(one)
        if self._unguarded:
            why = f"{self._unguarded} may keep strangers away"
            self._made.note(self._one, StatementOutcome.REFUSED, f"{why}; all of it answers {CLOSED} instead")
            locations = [closed(one) for one in locations]
        if self._raw:
            self._host["custom_directives"] = self._raw
        for port in ports:
            secure = any("ssl" in one.arguments for one in listens if listen_port(one.arguments[0]) == port)
            self._add(port, secure, listens, locations)

    def _add(
        self, port: int, secure: bool, listens: Sequence[Statement], locations: list[dict[str, Any]]
    ) -> None:
        own = [one for one in listens if listen_port(one.arguments[0]) == port]
        names = [name for one in self._block if one.name == "server_name" for name in one.arguments]
        default = any("default_server" in one.arguments for one in own) or not names
        if names and all(name.startswith("~") for name in names):
            self._made.note(
                self._one, StatementOutcome.REFUSED, "none of its names has a typed form; it is not imported"
            )
            return
        names = [name for name in names if name not in ("_", "") and not name.startswith("~")]
        host = {**self._host, "server_name": " ".join([*names, *(["_"] if default else [])]) or "_"}
        host["id"] = host["name"] = f"{(names or ['default'])[0]}:{port}"
        host["listen_port"], host["locations"] = port, locations
        certificate = host.pop("certificate", None)
        if secure and certificate is None:
            self._made.note(self._one, StatementOutcome.REFUSED, f"port {port} has TLS without a certificate")
            return
        if secure:
            host |= {"ssl_enabled": True, "ssl_certificate_id": certificate}
            host["http2_enabled"] = any("http2" in one.arguments for one in own) or self._on("http2")
        else:
            host.pop("tls", None)
        self._made.hosts.append(host)

    def _on(self, name: str) -> bool:
        return any(one.name == name and one.arguments == ("on",) for one in self._block)

    def _of_server(self, one: Statement) -> None:
        """A statement of the server itself; what locations inherit is theirs already."""
        made = self._made
        match one.name:
            case "location":
                return
            case "listen":
                fault = listen_fault(one.arguments, self._addresses)
                made.note(one, StatementOutcome.REFUSED if fault else StatementOutcome.UNDERSTOOD, fault)
            case "server_name" | "http2":
                refused = [name for name in one.arguments if name.startswith("~")]
                outcome = StatementOutcome.REFUSED if refused else StatementOutcome.UNDERSTOOD
                made.note(one, outcome, f"{refused[0]} has no typed form" if refused else "")
            case "ssl_certificate":
                self._host["certificate"] = self._certificate(one)
                made.note(one, StatementOutcome.UNDERSTOOD)
            case "ssl_certificate_key":
                made.note(one, StatementOutcome.UNDERSTOOD)
            case "ssl_protocols":
                if one.arguments == ("TLSv1.3",):
                    self._host["tls"] = {"profile": "modern"}
                made.note(
                    one,
                    StatementOutcome.UNDERSTOOD,
                    "" if "TLSv1.3" in one.arguments else "TLS 1.3 comes with it",
                )
            case "access_log" if one.arguments == ("off",):
                self._host["logging"] = {"enabled": False}
                made.note(one, StatementOutcome.UNDERSTOOD)
            case "return":
                made.note(one, StatementOutcome.UNDERSTOOD)
            case name if name in INHERITED or family(name):
                made.note(one, StatementOutcome.UNDERSTOOD)
            case name if name in LEFT_TO_AGENT:
                made.note(one, StatementOutcome.AGENT)
            case _:
                self._unguarded = _keep(one, self._raw, {DirectiveContext.SERVER}, made) or self._unguarded

    def _certificate(self, one: Statement) -> str:
        key = next((each.arguments[0] for each in self._block if each.name == "ssl_certificate_key"), "")
        for known in self._made.certificates:
            if (known.certificate, known.key) == (one.arguments[0], key):
                return known.id
        identity = f"certificate-{len(self._made.certificates) + 1}"
        names = [name for each in self._block if each.name == "server_name" for name in each.arguments]
        domain = next((name.removeprefix(".") for name in names if "." in name and name[0] != "~"), "")
        self._made.certificates.append(
            FoundCertificate(id=identity, certificate=one.arguments[0], key=key, domain=domain)
        )
        return identity

    def _locations(self) -> Iterator[dict[str, Any]]:
        whole = next((one for one in self._block if one.name == "return"), None)
        inner = [one for one in self._block if one.name == "location"]
        if whole is not None:
            for one in inner:
                self._made.note(one, StatementOutcome.UNDERSTOOD, "never asked: the server answers before it")
            yield {"path": "/", **responding(whole, self._made)}
            return
        for one in inner:
            if not one.arguments[-1].startswith("@"):
                yield ImportedLocation(one, [self._outer, self._block], self._made).convert()
            else:
                self._made.note(one, StatementOutcome.REFUSED, "a named location has no typed form")
        roots = [one for one in self._block if one.name == "root"]
        if roots and not any(one.arguments == ("/",) for one in inner):
            whole_root = Statement(
                name="location", arguments=("/",), file=roots[0].file, line=roots[0].line, block=()
            )
            yield ImportedLocation(whole_root, [self._outer, self._block], self._made).convert()
