"""Whose name it is: a name that the authority has certified belongs to the workspace that proved it.

The server orders for everyone, so it, and not the authority, must keep tenants apart. A workspace holds
the names of each certificate that it got from the authority, until that expires or is deleted. Nobody else
orders one of them meanwhile, and nobody of another organisation orders a wildcard that covers one of
them, or a name that their wildcard covers. A request that proved nothing holds nothing: otherwise a
stranger could keep a name from its owner by asking first.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetplane.domains.proxies.kinds.records import Certificate, VirtualHost, organization_of
from fleetplane.domains.proxies.rules.conflicts import served_names
from fleetplane.kernel.errors import FailedPrecondition

LETS_ENCRYPT = "letsencrypt"
"""The authority that the server is a client of, whichever that is."""


class NameBound(FailedPrecondition):
    """Another workspace has proved the name, and has a certificate for it."""

    reason = "NAME_BOUND"


def names_for(domain: str) -> tuple[str, ...]:
    """A wildcard covers the domain it is below as well: nobody wants the one without the other."""
    return (domain, domain[2:]) if domain.startswith("*.") else (domain,)


def require(wanted: Certificate, present: Iterable[Certificate], *, now_ns: int) -> None:
    """Refuse a certificate for names that another workspace holds; who holds them already may renew."""
    if wanted.spec.provider != LETS_ENCRYPT or _holds(wanted, now_ns):
        return
    names = names_for(wanted.spec.domain.lower())
    for other in present:
        if other.scope == wanted.scope or not _holds(other, now_ns):
            continue
        assert other.status is not None
        foreign = organization_of(other.scope) != organization_of(wanted.scope)
        for held in {*names_for(other.spec.domain.lower()), *(name.lower() for name in other.status.names)}:
            for name in names:
                if name == held or (foreign and (_covers(name, held) or _covers(held, name))):
                    # Neither whose it is nor what exactly they have: that is their business.
                    raise NameBound(
                        f"{name} belongs to another workspace of this server, which has proved it",
                        hint="delete the certificate there, let it expire, or import your own",
                    )


def require_own(wanted: Certificate, hosts: Iterable[VirtualHost]) -> None:
    """Refuse a name that virtual hosts of another organisation serve.

    For challenges that pass through agents which do not say whose they are: another organisation's agents
    would pass ours on just as well, and the name be proved by whoever asks first.
    """
    domain = wanted.spec.domain.lower()
    if wanted.spec.provider != LETS_ENCRYPT or domain.startswith("*."):
        return  # a wildcard is proved over DNS
    for host in hosts:
        if organization_of(host.scope) == organization_of(wanted.scope):
            continue
        if any(name == domain or _covers(name, domain) for name in served_names(host.spec.server_name)):
            raise NameBound(
                f"virtual hosts of another organization serve {domain}, and agents name no workspace",
                hint="set proxies.challenge_address, so that challenges name their workspace",
            )


def _holds(certificate: Certificate, now_ns: int) -> bool:
    status = certificate.status
    return (
        certificate.spec.provider == LETS_ENCRYPT
        and status is not None
        and bool(status.fingerprint)
        and (status.expires_at_ns is None or status.expires_at_ns > now_ns)
    )


def _covers(wildcard: str, name: str) -> bool:
    return wildcard.startswith("*.") and name.partition(".")[2] == wildcard[2:]
