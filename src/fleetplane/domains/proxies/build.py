"""Proxies, built from their settings."""

from __future__ import annotations

from pathlib import Path

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.proxies import options as proxy_options
from fleetplane.domains.proxies.acme.assembly import AcmeOptions
from fleetplane.domains.proxies.acme.dns.zone_file import read_zones
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.live.subscriptions import EventLimits
from fleetplane.domains.proxies.rest.assembly import RestOptions
from fleetplane.domains.proxies.rules.alerts import AlertPolicy
from fleetplane.domains.proxies.rules.ports import PortRanges
from fleetplane.domains.proxies.server import ProxyDomain
from fleetplane.domains.proxies.settings import PROXY_QUOTAS, ProxySettings
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions


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
    proxy_options.check(options, acme, origins=wanted.event_origins)
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
