"""A workspace's configuration as a file, its references by name, and imported certificate chains. Pure.

A file often holds its certificates in the order in which they were pasted. They are sorted: the certificate
of the private key first, each followed by its issuer, none twice. One that does not belong is refused by
its name rather than left out, because it is likely to be the wrong file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location, Value
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest.bodies import CreateStream
from fleetplane.domains.proxies.serving.hosts import normal
from fleetplane.domains.proxies.typed_options import Access, HostTls
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.problems import Code, Problem, Rejected

PEM_LIMIT_BYTES: Final = 256 * 1024
CHAIN_LIMIT: Final = 10
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
_FIELD: Final = "certificate"
_BEGIN: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")


def read_key(pem: str) -> PrivateKey:
    """A private key in PEM, or a refusal that says what it is instead."""
    found = set(_BEGIN.findall(pem))
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        message = "Not an unencrypted private key in PEM"
        if "ENCRYPTED PRIVATE KEY" in found or "Proc-Type: 4,ENCRYPTED" in pem:
            message = f"{message}: decrypt it first, with `openssl pkey -in FILE`"
        elif "CERTIFICATE" in found:
            message = f"{message}, but a certificate"
        raise Rejected(Problem(field="private_key", message=message)) from error
    if not isinstance(key, PrivateKey):
        raise Rejected(Problem(field="private_key", message="Must be RSA or ECDSA", code=Code.INCOMPATIBLE))
    return key


def read_chain(pem: str, key: PrivateKey, *, now_ns: int) -> list[x509.Certificate]:
    """The certificate of a key, and after it its issuers as far as they were brought."""
    given = _unique(_certificates(pem))
    if len(given) > CHAIN_LIMIT:
        raise Rejected(Problem(field=_FIELD, message=f"More than {CHAIN_LIMIT}", code=Code.TOO_MANY))
    own = [one for one in given if _key_of(one) == _public(key)]
    if not own:
        message = f"Does not belong to the certificate of {_name(given[0])}"
        raise Rejected(Problem(field="private_key", message=message, code=Code.INCOMPATIBLE))
    chain = [max(own, key=lambda one: one.not_valid_after_utc)]  # of a renewed one, the newer
    left = [one for one in given if one is not chain[0]]
    while (issuer := _issuer(chain[-1], left)) is not None:
        chain.append(issuer)
        left.remove(issuer)
    if left:
        message = f"The certificate of {_name(left[0])} did not issue that of {_name(chain[-1])}"
        raise Rejected(Problem(field=_FIELD, message=message, code=Code.INCOMPATIBLE))
    # Only its own end counts: clients have other ways past an issuer that has ended.
    if int(chain[0].not_valid_after_utc.timestamp()) * NS <= now_ns:
        ended = chain[0].not_valid_after_utc.date().isoformat()
        raise Rejected(Problem(field=_FIELD, message=f"Has expired: {ended}", code=Code.OUT_OF_RANGE))
    return chain


def _certificates(pem: str) -> list[x509.Certificate]:
    if len(pem) > PEM_LIMIT_BYTES:
        raise Rejected(Problem(field=_FIELD, message="Too long", code=Code.TOO_LONG))
    found = set(_BEGIN.findall(pem))
    if any(name.endswith("PRIVATE KEY") for name in found):
        message = "Holds a private key, which belongs into private_key alone"
        raise Rejected(Problem(field=_FIELD, message=message))
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        message = "Not a certificate in PEM"
        if found & {"CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST"}:
            message = f"{message}, but a request for one: bring what the authority made of it"
        elif found & {"PKCS7", "CMS"}:
            message = f"{message}, but PKCS #7: convert it with `openssl pkcs7 -print_certs`"
        raise Rejected(Problem(field=_FIELD, message=message)) from error


def _unique(given: Sequence[x509.Certificate]) -> list[x509.Certificate]:
    return list({one.public_bytes(serialization.Encoding.DER): one for one in given}.values())


def _issuer(one: x509.Certificate, among: Sequence[x509.Certificate]) -> x509.Certificate | None:
    for other in among:
        try:
            one.verify_directly_issued_by(other)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return other
    return None


def _public(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _key_of(one: x509.Certificate) -> bytes:
    try:
        return one.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    except (ValueError, UnsupportedAlgorithm):
        return b""


def _name(one: x509.Certificate) -> str:
    return one.subject.rfc4514_string()[:120] or f"serial {one.serial_number:x}"


class BundledUpstream(requests.CreateUpstream, frozen=True, kw_only=True):
    id: str


class BundledHost(requests.CreateVirtualHost, frozen=True, kw_only=True):
    id: str


class BundledAccessList(requests.CreateAccessList, frozen=True, kw_only=True):
    id: str


class BundledStream(CreateStream, frozen=True, kw_only=True):
    id: str


class BundledCertificate(Value, frozen=True, kw_only=True):
    """Only what tells which one is meant."""

    id: str
    domain: str
    provider: str


class Bundle(Value, frozen=True, kw_only=True):
    """A workspace's configuration as a file: what an export gives and an import takes."""

    format: Literal["fleetplane.proxies/1"]
    settings: requests.PutSettings | UnsetType = UNSET
    upstreams: tuple[BundledUpstream, ...] = ()
    certificates: tuple[BundledCertificate, ...] = ()
    virtual_hosts: tuple[BundledHost, ...] = ()
    access_lists: tuple[BundledAccessList, ...] | UnsetType = UNSET
    streams: tuple[BundledStream, ...] | UnsetType = UNSET


def pointing(
    spec: VirtualHostSpec, upstreams: Mapping[str, str], certificates: Mapping[str, str]
) -> VirtualHostSpec:
    """A host whose references are ours."""

    def moved(location: Location) -> Location:
        if location.upstream_id is UNSET:
            return location
        identity = upstreams.get(location.upstream_id, location.upstream_id)
        canaries = location.canaries
        if canaries:
            to = (
                msgspec.structs.replace(one, upstream_id=upstreams.get(one.upstream_id, one.upstream_id))
                for one in canaries.to
            )
            canaries = msgspec.structs.replace(canaries, to=tuple(to))
        return msgspec.structs.replace(location, upstream_id=identity, canaries=canaries)

    certificate = spec.ssl_certificate_id
    return normal(
        msgspec.structs.replace(
            spec,
            locations=tuple(moved(location) for location in spec.locations),
            ssl_certificate_id=certificates.get(certificate, certificate) if certificate else None,
            tls=_trusting(spec.tls, certificates),
        )
    )


def listing(spec: VirtualHostSpec, ids: Mapping[str, str]) -> VirtualHostSpec:
    """A host whose access lists are ours."""

    def moved(access: Access | UnsetType) -> Access | UnsetType:
        if not (access and access.list_ids):
            return access
        return msgspec.structs.replace(access, list_ids=tuple(ids.get(one, one) for one in access.list_ids))

    return msgspec.structs.replace(
        spec,
        access=moved(spec.access),
        locations=tuple(msgspec.structs.replace(one, access=moved(one.access)) for one in spec.locations),
    )


def streaming(spec: StreamSpec, upstreams: Mapping[str, str]) -> StreamSpec:
    """A stream whose upstreams are ours."""
    own = spec.upstream_id
    routes = spec.routes and tuple(
        msgspec.structs.replace(one, upstream_id=upstreams.get(one.upstream_id, one.upstream_id))
        for one in spec.routes
    )
    return msgspec.structs.replace(spec, upstream_id=own and upstreams.get(own, own), routes=routes)


def securing(spec: UpstreamSpec, certificates: Mapping[str, str]) -> UpstreamSpec:
    """An upstream whose certificates are ours."""
    if not spec.tls:
        return spec
    given = {
        name: certificates.get(identity, identity)
        for name in ("authority_id", "client_certificate_id")
        if (identity := getattr(spec.tls, name))
    }
    return msgspec.structs.replace(spec, tls=msgspec.structs.replace(spec.tls, **given))


def _trusting(tls: HostTls | UnsetType, certificates: Mapping[str, str]) -> HostTls | UnsetType:
    if not (tls and tls.client_certificates):
        return tls
    clients = tls.client_certificates
    ours = certificates.get(clients.authority_id, clients.authority_id)
    return msgspec.structs.replace(
        tls, client_certificates=msgspec.structs.replace(clients, authority_id=ours)
    )
