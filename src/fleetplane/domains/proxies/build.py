"""Builds the domain from its settings, after a check of settings that only a running domain would notice.

A mistake found later is found by every agent at once: a challenge address that is not one makes every agent
refuse every configuration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.proxies.acme.assembly import AcmeOptions
from fleetplane.domains.proxies.acme.dns_provider import read_zones
from fleetplane.domains.proxies.acme.internal import suffix_faults
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.live.subscriptions import EventLimits
from fleetplane.domains.proxies.nginx import rendering
from fleetplane.domains.proxies.rest.assembly import RestOptions
from fleetplane.domains.proxies.rules.alerts import AlertPolicy
from fleetplane.domains.proxies.rules.ports import PortRanges
from fleetplane.domains.proxies.server import ProxyDomain
from fleetplane.domains.proxies.settings import PROXY_QUOTAS, ProxySettings
from fleetplane.domains.proxies.tenancy import users
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions
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
        for problem in users.problems(rest.admin_password, field=""):
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


async def build(wanted: ProxySettings, context: ServerContext, kernel: Kernel) -> Domain:
    options = RestOptions(
        version=context.version,
        admin_email=wanted.admin_email,
        admin_password=wanted.first_password(),
        anyone_may_found=wanted.open_organizations,
        requests_per_minute=wanted.requests_per_minute,
        quotas=QuotaOptions(**{name: getattr(wanted, name) for name in PROXY_QUOTAS}),
    )
    policy = AgentPolicy(
        heartbeat_seconds=wanted.heartbeat_seconds,
        reported_labels=wanted.reported_labels,
        alerts=_alerts(wanted),
    )
    acme = _acme(wanted, context)
    check(options, acme, origins=wanted.event_origins)
    return await ProxyDomain.create(
        kernel,
        options,
        policy=policy,
        event_origins=wanted.event_origins,
        event_limits=EventLimits(
            sockets=wanted.event_sockets,
            sockets_per_caller=wanted.event_sockets_per_caller,
            patterns=wanted.event_patterns,
            subscriptions=wanted.event_subscriptions,
        ),
        acme=acme,
        stream_ports=PortRanges.parse(wanted.stream_ports, field="proxies.stream_ports"),
    )


def _alerts(wanted: ProxySettings) -> AlertPolicy:
    return AlertPolicy(
        cpu_warning=wanted.cpu_warning_percent,
        cpu_critical=wanted.cpu_critical_percent,
        memory_warning=wanted.memory_warning_percent,
        memory_critical=wanted.memory_critical_percent,
        disk_warning=wanted.disk_warning_percent,
        disk_critical=wanted.disk_critical_percent,
        critical_after_seconds=wanted.critical_after_seconds,
    )


def _acme(wanted: ProxySettings, context: ServerContext) -> AcmeOptions:
    authority = AuthorityOptions(
        directory_url=wanted.acme_directory,
        terms_agreed=wanted.acme_terms_agreed,
        contact_email=wanted.acme_email,
        ca_file=wanted.acme_ca_file,
        eab_key_id=wanted.acme_eab_key_id,
        eab_hmac_key=wanted.acme_eab_hmac_key,
        user_agent=f"fleetplane/{context.version}",
    )
    zones = read_zones(Path(wanted.dns_zones_file)) if wanted.dns_zones_file else {}
    return AcmeOptions(
        authority=authority,
        zones=zones,
        challenge_listen=wanted.challenge_listen,
        challenge_address=wanted.challenge_address,
        internal_suffixes=wanted.internal_suffixes,
    )
