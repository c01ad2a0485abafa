"""What of a configuration can be served when not all of it can. Pure.

A configuration has parts: virtual hosts, upstreams, certificates. A part that NGINX refuses is
set aside, with NGINX's words. Where the live release has an earlier form of it, that form stays
in service; where it has none, the part is left out, and the hosts that need it with it. Everything
else goes live. What is in service is never taken out for the sake of something else: if a name
is no longer resolved, the part that has it is served on by its last addresses; if NGINX no longer
takes a part for another reason in the very form that it serves, the change as a whole has to wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fleetplane.domains.proxies.agent.nginx import resolved_names
from fleetplane.domains.proxies.nginx import streams
from fleetplane.domains.proxies.nginx.hosts import mentioned_upstreams, served_ports
from fleetplane.domains.proxies.nginx.site import Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

HOST: Final = "virtual_host"
UPSTREAM: Final = "upstream"
CERTIFICATE: Final = "certificate"
STREAM: Final = "stream"
ROUNDS_LIMIT: Final = 64
"""Parts that are set aside one after the other, each found by a test of its own; a test takes 20 ms to
a second. With more than so many the whole is refused."""

_FILE: Final = re.compile(
    r"(?:conf|stream)\.d/(?P<kind>host|upstream|stream)-(?P<id>[A-Za-z0-9_-]{1,64})\.conf"
)
_CERTIFICATE: Final = re.compile(r"certs/(?P<id>[A-Za-z0-9_-]{1,64})\.(?:pem|key)")
_AUTHORITY: Final = re.compile(r"certs/(?P<kind>authority|upstream)-(?P<id>[A-Za-z0-9_-]{1,64})\.pem")
_BUSY: Final = re.compile(r"(?:bind|listen)\(\) to (?P<address>\S+):(?P<port>\d+) failed")
_KINDS: Final = {"host": HOST, "upstream": UPSTREAM, "stream": STREAM}


def part(kind: str, identity: str) -> str:
    """How a part is named to the server."""
    return f"{kind}/{identity}"


@dataclass(slots=True)
class Setting:
    """What is set aside of one configuration, and why."""

    asked: pb.ConfigUpdate
    served: pb.ConfigUpdate
    """What the live release serves."""
    aside: dict[str, str] = field(default_factory=dict)
    """NGINX's error for each part that is set aside."""
    gone: set[str] = field(default_factory=set)
    """Of these not even the earlier form can be served."""
    known: Mapping[str, list[str]] = field(default_factory=dict)
    """Where the names of what is served were found."""
    pinned: dict[str, list[str]] = field(default_factory=dict)
    """Names that are not found any more, and the addresses to be served instead."""

    def blame(self, parts: Iterable[str], words: str, *, yields: bool = False) -> bool:
        """Set parts aside; False if that gets nowhere.

        With `yields`, an earlier form that is in the way of something new gives way to it.
        """
        new, old = _forms(self.asked), _forms(self.served)
        found = False
        for one in parts:
            in_service = one in old and new.get(one) == old[one]
            if one in self.gone or in_service or len(self.aside) >= ROUNDS_LIMIT:
                continue
            if one not in self.aside and one in new:
                self.aside[one] = words
                found = True
            elif yields and one in self.aside and one in old:
                self.gone.add(one)
                found = True
        return found

    def pin(self, parts: Iterable[str], words: str) -> bool:
        """Serve a part on by the addresses at which its name was found; False if that is no way out."""
        name = resolved_names.unresolved(words)
        if name in self.pinned or not self.known.get(name):
            return False
        self.pinned[name] = self.known[name]
        for one in parts:
            self.aside.setdefault(one, words)
        return True

    @property
    def former(self) -> frozenset[str]:
        """The ids of virtual hosts that may be served in their earlier form."""
        return frozenset(one.partition("/")[2] for one in self.aside if one.startswith(f"{HOST}/"))

    def effective(self) -> pb.ConfigUpdate:
        """What is to be served; notes hosts that go with a part they need."""
        new, old = _forms(self.asked), _forms(self.served)
        chosen: dict[str, Form] = {}
        for one, form in new.items():
            if one not in self.aside:
                chosen[one] = form
            elif one in old and one not in self.gone:
                chosen[one] = old[one]
        for one in [name for name in new if name.startswith((f"{HOST}/", f"{STREAM}/"))]:
            self._fit(one, chosen, old)
        return _assembled(self.asked, new, chosen)

    def _fit(self, host: str, chosen: dict[str, Form], old: Mapping[str, Form]) -> None:
        """See that a host has what it needs: in its new form, else in its earlier one, else leave it out."""
        form = chosen.get(host)
        if form is None:
            return
        missing = [one for one in needs(form) if one not in chosen]
        former = old.get(host) if host not in self.gone else None
        if missing and host not in self.aside:
            because = next(
                (self.aside[one] for one in missing if one in self.aside), f"{missing[0]} is missing"
            )
            self.aside[host] = because
            form = former
            missing = [one for one in needs(form) if one not in chosen] if form is not None else []
        if form is None or not all(one in old for one in missing):
            chosen.pop(host, None)
            return
        chosen[host] = form
        chosen.update({one: old[one] for one in missing})


Form = pb.VirtualHost | pb.Upstream | pb.Certificate | pb.Stream


def _forms(update: pb.ConfigUpdate) -> dict[str, Form]:
    return {
        **{part(HOST, one.id): one for one in update.virtual_hosts},
        **{part(UPSTREAM, one.id): one for one in update.upstreams},
        **{part(CERTIFICATE, name): one for name, one in update.certificates.items()},
        **{part(STREAM, one.id): one for one in update.streams},
    }


def needs(form: Form) -> list[str]:
    """The parts that a virtual host or a stream mentions."""
    if isinstance(form, pb.Stream):
        return sorted(part(UPSTREAM, one) for one in streams.upstreams_of(form))
    if not isinstance(form, pb.VirtualHost):
        return []
    found = {part(UPSTREAM, one) for location in form.locations for one in mentioned_upstreams(location)}
    if form.ssl_enabled and form.ssl_certificate_id:
        found.add(part(CERTIFICATE, form.ssl_certificate_id))
    return sorted(found)


def _assembled(
    asked: pb.ConfigUpdate, new: Mapping[str, Form], chosen: Mapping[str, Form]
) -> pb.ConfigUpdate:
    """In the order in which it was asked for; what only earlier forms need comes last."""
    made = pb.ConfigUpdate(config_id=asked.config_id, version=asked.version)
    if asked.HasField("global_settings"):  # said and empty is not the same as not said, to a checksum
        made.global_settings.CopyFrom(asked.global_settings)
    order = [one for one in new if one in chosen] + [one for one in chosen if one not in new]
    for one in order:
        match chosen[one]:
            case pb.VirtualHost() as host:
                made.virtual_hosts.append(host)
            case pb.Upstream() as upstream:
                made.upstreams.append(upstream)
            case pb.Certificate() as certificate:
                made.certificates[one.partition("/")[2]].CopyFrom(certificate)
            case pb.Stream() as stream:
                made.streams.append(stream)
    return made


def merged(served: pb.ConfigUpdate, candidate: pb.ConfigUpdate) -> pb.ConfigUpdate:
    """What would be served if the parts of a candidate were added, or took the place of those there are."""
    new, old = _forms(candidate), _forms(served)
    return _assembled(served, {**old, **new}, {**old, **new})


# From NGINX's words to parts.


def blamed_by_test(words: str) -> list[str]:
    """The parts whose files NGINX names in what it says of a configuration."""
    if (found := _FILE.search(words)) is not None:
        return [part(_KINDS[found["kind"]], found["id"])]
    if (found := _AUTHORITY.search(words)) is not None:
        return [part(HOST if found["kind"] == "authority" else UPSTREAM, found["id"])]
    if (found := _CERTIFICATE.search(words)) is not None:
        return [part(CERTIFICATE, found["id"])]
    return []


def blamed_by_reload(words: str, update: pb.ConfigUpdate, site: Site) -> list[str]:
    """The hosts and streams on ports that NGINX could not bind, read from its output of a reload."""
    ports = {int(found["port"]) for found in _BUSY.finditer(words)}
    asked = [(part(HOST, host.id), served_ports(host)) for host in update.virtual_hosts]
    asked += [(part(STREAM, one.id), streams.served_ports(one)) for one in update.streams]
    return [one for one, own in asked if any(site.ports.get(port, port) in ports for port in own)]


def busy_addresses(words: str) -> list[tuple[str, int]]:
    """The addresses that NGINX could not have."""
    return [(found["address"].strip("[]"), int(found["port"])) for found in _BUSY.finditer(words)]


def summary(aside: Mapping[str, str]) -> str:
    """For people, in one line."""
    told = "; ".join(
        f"{one.replace('_', ' ').replace('/', ' ')}: {words}" for one, words in sorted(aside.items())
    )
    return f"{len(aside)} set aside: {told}" if aside else ""
