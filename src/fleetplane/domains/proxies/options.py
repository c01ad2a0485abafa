"""Whether this domain can be run as it is set up, said by the settings' names before anything starts.

A mistake that is found later is found by everyone at once: an address for challenges that is none
makes every agent refuse every configuration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fleetplane.domains.proxies.acme.assembly import AcmeOptions
from fleetplane.domains.proxies.acme.internal import suffix_faults
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.nginx import rendering
from fleetplane.domains.proxies.rest.assembly import RestOptions
from fleetplane.domains.proxies.tenancy import passwords
from fleetplane.domains.proxies.tenancy.users import email_problems
from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc.listening.sockets import PORT_LIMIT
from fleetplane.web.sockets.door import ANYWHERE

_ORIGIN = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+")


def check(rest: RestOptions, acme: AcmeOptions, *, origins: Collection[str]) -> None:
    for name, fault in _faults(rest, acme, origins):
        raise SettingsError(f"proxies.{name}: {fault}")


def _faults(rest: RestOptions, acme: AcmeOptions, origins: Collection[str]) -> Iterator[tuple[str, str]]:
    for problem in email_problems(rest.admin_email):
        yield "admin_email", problem.message
    if rest.admin_password:
        for problem in passwords.problems(rest.admin_password, field=""):
            yield "admin_password", problem.message
    for origin in origins:
        if origin != ANYWHERE and not _ORIGIN.fullmatch(origin):
            yield "event_origins", f"{origin!r} is no origin, such as https://ui.example.com"
    if acme.challenge_address and not rendering.is_responder(acme.challenge_address):
        yield "challenge_address", f"{acme.challenge_address!r} is not host:port"
    for address in acme.challenge_listen:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > PORT_LIMIT:
            yield "challenge_listen", f"{address!r} is not HOST:PORT or [IPV6]:PORT"
    for fault in suffix_faults(acme.internal_suffixes):
        yield "internal_suffixes", fault
    yield from _authority_faults(acme.authority)


def _authority_faults(authority: AuthorityOptions) -> Iterator[tuple[str, str]]:
    url = urlsplit(authority.directory_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        yield "acme_directory", f"{authority.directory_url!r} is no http or https address"
    if authority.ca_file and not Path(authority.ca_file).is_file():
        yield "acme_ca_file", f"there is no file {authority.ca_file}"
    if bool(authority.eab_key_id) != bool(authority.eab_hmac_key):
        yield "acme_eab_key_id", "it and acme_eab_hmac_key go together"
