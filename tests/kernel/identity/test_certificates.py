from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as TrustStore

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import (
    Authority,
    IssuedCertificate,
    LeafProfile,
    LeafUsage,
    MasterKey,
    peer_identity,
)
from fleetplane.kernel.identity.certificates import CHAIN_LIMIT_BYTES, printable_extension
from fleetplane.kernel.store import Store, StoreSettings

CLOCK = SystemClock()
ROLE = "1.3.6.1.4.1.999999.1"
KEY = ed25519.Ed25519PrivateKey.generate().public_key()


@pytest.fixture
async def authority(tmp_path: Path) -> AsyncIterator[Authority]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=CLOCK) as store:
        yield await Authority.load_or_create(store, MasterKey(bytes(32), CLOCK), CLOCK)


def issue(authority: Authority, **changes: object) -> IssuedCertificate:
    return authority.issue_client(
        KEY,
        name="web-1",
        organization="acme",
        extensions=[printable_extension(ROLE, "agent")],
        uris=False,
        life=timedelta(hours=1),
        **changes,  # type: ignore[arg-type]
    )


def leaf_of(issued: IssuedCertificate) -> x509.Certificate:
    return x509.load_pem_x509_certificates(issued.certificate_pem)[0]


async def test_a_client_certificate_can_tell_its_role_by_an_extension(authority: Authority) -> None:
    serial = CLOCK.now_ns()
    issued = issue(authority, serial=serial, backdate=timedelta(0))
    leaf = leaf_of(issued)

    assert leaf.subject.rfc4514_string() == "CN=web-1,O=acme"
    assert issued.serial == leaf.serial_number == serial
    assert issued.not_after - leaf.not_valid_before_utc == timedelta(hours=1)
    role = leaf.extensions.get_extension_for_oid(x509.ObjectIdentifier(ROLE))
    assert isinstance(role.value, x509.UnrecognizedExtension)
    assert (role.critical, role.value.value) == (False, b"\x13\x05agent")
    with pytest.raises(x509.ExtensionNotFound):
        leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not any([usage.key_cert_sign, usage.content_commitment, usage.key_agreement])
    assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


async def test_the_leaf_stands_first_and_alone_where_asked_for(authority: Authority) -> None:
    issued = issue(authority)

    assert x509.load_pem_x509_certificates(issued.leaf_pem) == [leaf_of(issued)]
    assert issued.leaf_pem + authority.certificate_pem == issued.certificate_pem


async def test_a_peers_identity_is_what_was_issued(authority: Authority) -> None:
    issued = issue(authority)
    identity = peer_identity(issued.certificate_pem)

    assert (identity.common_name, identity.organizations, identity.uris) == ("web-1", ("acme",), ())
    assert identity.extension_text(ROLE) == "agent"
    assert identity.extension_text("1.2.3") is None
    assert (identity.serial, identity.not_after) == (issued.serial, issued.not_after)
    other = authority.issue_client(KEY, name="n", role="r", tenant="t", life=timedelta(hours=1))
    assert peer_identity(other.certificate_pem).public_key_digest == identity.public_key_digest
    assert peer_identity(other.certificate_pem).uris == ("fleetplane://role/r", "fleetplane://tenant/t")


async def test_a_chain_reads_the_same_in_any_form_and_is_parsed_once(authority: Authority) -> None:
    leaf = issue(authority).leaf_pem.decode()

    identity = peer_identity(leaf)
    assert peer_identity((leaf, authority.certificate_pem.decode())) is identity
    assert peer_identity(leaf.encode()) is identity


@pytest.mark.parametrize(("content", "text"), [(b"agent", "agent"), (b"\x0c\x02hi", "hi"), (b"\xff", None)])
async def test_an_extension_may_be_a_string_type_or_raw_bytes(
    authority: Authority, content: bytes, text: str | None
) -> None:
    raw = x509.UnrecognizedExtension(x509.ObjectIdentifier(ROLE), content)
    issued = authority.issue_client(KEY, name="n", extensions=[raw], uris=False, life=timedelta(hours=1))

    assert peer_identity(issued.certificate_pem).extension_text(ROLE) == text


@pytest.mark.parametrize("chain", ["", (), b"", "not PEM", b"\xff\xfe", "x" * (CHAIN_LIMIT_BYTES + 1)])
def test_what_is_no_certificate_is_unauthenticated(chain: str) -> None:
    with pytest.raises(Unauthenticated):
        peer_identity(chain)


@pytest.mark.parametrize("text", ["", "a" * 128, "rôle", "a_b"])
def test_what_a_printable_string_cannot_say_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        printable_extension(ROLE, text)


async def test_a_configured_server_certificate_has_every_part_and_verifies(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    profile = LeafProfile(
        usage=LeafUsage.SERVER,
        common_name="db",
        organization=("acme", "labs"),
        country=("DE",),
        province=("Berlin",),
        locality=("Mitte",),
        street=("Torstr. 1",),
        postal_code=("10119",),
        dns=("db.acme.example",),
        ip=("10.0.0.7", "fd00::7"),
        uri=("spiffe://acme/db",),
        ttl_hours=48,
    )
    issued = authority.issue_leaf(key, profile)
    leaf, root = x509.load_pem_x509_certificates(issued.certificate_pem)

    verifier = PolicyBuilder().store(TrustStore([root])).build_server_verifier(x509.DNSName(profile.dns[0]))
    assert verifier.verify(leaf, [])[0] == leaf
    assert leaf.public_key() == key
    assert [part.value for part in leaf.subject] == [
        "DE",
        "Berlin",
        "Mitte",
        "Torstr. 1",
        "10119",
        "acme",
        "labs",
        "db",
    ]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::7"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://acme/db"]
    assert timedelta(hours=47) < issued.not_after - leaf.not_valid_before_utc < timedelta(hours=49)


async def test_a_configured_client_certificate_is_for_clients_only(authority: Authority) -> None:
    leaf = leaf_of(authority.issue_leaf(KEY, LeafProfile(usage=LeafUsage.CLIENT, common_name="c")))

    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "c"


@pytest.mark.parametrize(
    ("field", "profile"),
    [
        ("country", LeafProfile(usage=LeafUsage.CLIENT, country=("Germany",))),
        ("ip", LeafProfile(usage=LeafUsage.SERVER, ip=("not an address",))),
        ("dns", LeafProfile(usage=LeafUsage.SERVER, dns=("bücher.example",))),
        ("cn", LeafProfile(usage=LeafUsage.SERVER, common_name="x" * 65)),
    ],
)
async def test_a_part_that_cannot_stand_in_a_certificate_is_named(
    authority: Authority, field: str, profile: LeafProfile
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        authority.issue_leaf(KEY, profile)
    assert refused.value.field == field


async def test_a_certificate_that_would_be_born_expired_is_refused(authority: Authority) -> None:
    with pytest.raises(InvalidArgument, match="some time to come"):
        authority.issue_leaf(KEY, LeafProfile(usage=LeafUsage.CLIENT, ttl_hours=0))
