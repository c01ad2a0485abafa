"""What is to stand in a certificate, said in plain words and checked before anything is signed."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.kernel.errors import InvalidArgument

LEAF_TTL_HOURS = 8760.0
"""A year, unless said otherwise."""
NAMES_LIMIT = 64
"""Alternative names in one certificate; each is sent with every handshake."""


class LeafUsage(StrEnum):
    CLIENT = "client"
    SERVER = "server"

    @property
    def oid(self) -> x509.ObjectIdentifier:
        return (
            ExtendedKeyUsageOID.SERVER_AUTH if self is LeafUsage.SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafProfile:
    """A client's or server's certificate as someone configured it."""

    usage: LeafUsage
    common_name: str = ""
    organization: tuple[str, ...] = ()
    country: tuple[str, ...] = ()
    province: tuple[str, ...] = ()
    locality: tuple[str, ...] = ()
    street: tuple[str, ...] = ()
    postal_code: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    ip: tuple[str, ...] = ()
    uri: tuple[str, ...] = ()
    ttl_hours: float = LEAF_TTL_HOURS
    also: LeafUsage | None = None
    """A second usage, for one that both serves and calls with the same key."""

    @property
    def usages(self) -> Sequence[LeafUsage]:
        return (self.usage,) if self.also in (None, self.usage) else (self.usage, self.also)

    @property
    def life(self) -> timedelta:
        return timedelta(hours=self.ttl_hours)

    def name(self) -> x509.Name:
        """The subject, from the widest to the narrowest."""
        return subject(
            [
                ("country", NameOID.COUNTRY_NAME, self.country),
                ("province", NameOID.STATE_OR_PROVINCE_NAME, self.province),
                ("locality", NameOID.LOCALITY_NAME, self.locality),
                ("street", NameOID.STREET_ADDRESS, self.street),
                ("postal_code", NameOID.POSTAL_CODE, self.postal_code),
                ("organization", NameOID.ORGANIZATION_NAME, self.organization),
                ("cn", NameOID.COMMON_NAME, [self.common_name] if self.common_name else []),
            ]
        )

    def alternatives(self) -> Sequence[x509.GeneralName]:
        names = list(self._alternatives())
        if len(names) > NAMES_LIMIT:
            raise InvalidArgument(f"{len(names)} alternative names, more than {NAMES_LIMIT}")
        return names

    def _alternatives(self) -> Iterator[x509.GeneralName]:
        for text in self.dns:
            yield _checked("dns", text, x509.DNSName)
        for text in self.ip:
            yield _checked("ip", text, _address)
        for text in self.uri:
            yield _checked("uri", text, x509.UniformResourceIdentifier)


def subject(
    parts: Iterable[tuple[str, x509.ObjectIdentifier, Iterable[str]]],
) -> x509.Name:
    """A name from (what callers call it, OID, values)."""
    attributes = []
    for field, oid, values in parts:
        for value in values:
            try:
                attributes.append(x509.NameAttribute(oid, value))
            except ValueError as error:
                raise InvalidArgument(f"{field} {value!r}: {error}", field=field) from error
    return x509.Name(attributes)


def host_name(text: str) -> x509.GeneralName:
    """An address if it reads as one, else a host name."""
    try:
        return _address(text)
    except ValueError:
        return _checked("dns", text, x509.DNSName)


def _address(text: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(text))


def _checked(field: str, text: str, make: Callable[[str], x509.GeneralName]) -> x509.GeneralName:
    try:
        return make(text)
    except ValueError as error:
        raise InvalidArgument(f"{field} {text!r}: {error}", field=field) from error
