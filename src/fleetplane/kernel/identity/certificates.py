"""Certificates of callers: what one says about its holder, and the profile from which one is issued.

A connection presents the same few certificates with every call, so a certificate is read once and then looked
up. Says nothing about trust: the chain to our authority was checked where the connection was accepted.
A profile is checked before anything is signed.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.kernel.errors import InvalidArgument, Unauthenticated

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


CACHE_LIMIT = 16_384
"""Certificates remembered; a kilobyte of PEM and one of findings each, and only ever those of our clients."""
CHAIN_LIMIT_BYTES = 64 * 1024
"""Of one presented chain, in PEM."""

_PRINTABLE_STRING = 0x13
_TEXT_TAGS = frozenset({0x0C, _PRINTABLE_STRING, 0x16})  # UTF8String, PrintableString, IA5String
_PRINTABLE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 '()+,-./:=?")
_SHORT_FORM_LIMIT = 127  # lengths up to here take one byte


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateIdentity:
    """The findings about one leaf certificate."""

    common_name: str
    """Empty if the subject has none, or several."""
    organizations: tuple[str, ...]
    uris: tuple[str, ...]
    """The alternative names that are URIs."""
    extensions: Mapping[str, bytes]
    """The content of extensions that X.509 itself does not define, by dotted OID."""
    serial: int
    not_before: datetime
    not_after: datetime
    public_key_digest: str
    """SHA-256 of the key's SubjectPublicKeyInfo in DER, in hexadecimal."""
    issuer_key_id: str
    """Which authority's key signed it, in hexadecimal; empty if it does not say."""

    def extension_text(self, oid: str) -> str | None:
        """An extension that holds one string: of a DER string type, or else the raw bytes."""
        content = self.extensions.get(oid)
        if content is None:
            return None
        if len(content) >= 2 and content[0] in _TEXT_TAGS and content[1] == len(content) - 2:
            content = content[2:]
        try:
            return content.decode()
        except UnicodeDecodeError:
            return None


def peer_identity(pem_chain: str | bytes | Sequence[str]) -> CertificateIdentity:
    """The identity in the first certificate of a chain, given as one PEM text or as several."""
    if isinstance(pem_chain, bytes):
        pem_chain = pem_chain.decode("ascii", errors="replace")
    if not isinstance(pem_chain, str):
        pem_chain = pem_chain[0] if pem_chain else ""
    if not pem_chain:
        raise Unauthenticated("no client certificate was presented", details={"cause": "no certificate"})
    return _read(pem_chain)


@lru_cache(maxsize=CACHE_LIMIT)
def _read(pem: str) -> CertificateIdentity:
    if len(pem) > CHAIN_LIMIT_BYTES:
        raise Unauthenticated(f"the certificate chain takes more than {CHAIN_LIMIT_BYTES} bytes")
    try:
        leaf = x509.load_pem_x509_certificate(pem.encode())
        names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        organizations = leaf.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        return CertificateIdentity(
            common_name=_text(names[0]) if len(names) == 1 else "",
            organizations=tuple(_text(name) for name in organizations),
            uris=_uris(leaf),
            extensions={
                extension.oid.dotted_string: extension.value.value
                for extension in leaf.extensions
                if isinstance(extension.value, x509.UnrecognizedExtension)
            },
            serial=leaf.serial_number,
            not_before=leaf.not_valid_before_utc,
            not_after=leaf.not_valid_after_utc,
            public_key_digest=hashlib.sha256(
                leaf.public_key().public_bytes(
                    serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
                )
            ).hexdigest(),
            issuer_key_id=_issuer_key_id(leaf),
        )
    except ValueError as error:
        raise Unauthenticated(
            f"the client certificate cannot be read: {error}", details={"cause": "malformed"}
        ) from error


def _text(name: x509.NameAttribute[str | bytes]) -> str:
    return name.value if isinstance(name.value, str) else ""


def _issuer_key_id(leaf: x509.Certificate) -> str:
    try:
        found = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    except x509.ExtensionNotFound:
        return ""
    return (found.key_identifier or b"").hex()


def _uris(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))


def printable_extension(oid: str, text: str) -> x509.UnrecognizedExtension:
    """An extension that holds one PrintableString, such as a role."""
    if not text or len(text) > _SHORT_FORM_LIMIT or not _PRINTABLE.issuperset(text):
        raise InvalidArgument(f"{text!r} cannot stand in a certificate as a PrintableString")
    der = bytes((_PRINTABLE_STRING, len(text))) + text.encode("ascii")
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), der)
