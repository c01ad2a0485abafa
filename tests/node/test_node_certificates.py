"""Certificates of agents: their age, whose they are, and the folder that keeps only what can be used."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.kernel.errors import FailedPrecondition, IntegrityError
from fleetplane.node.certificates import (
    PEM_LIMIT_BYTES,
    Age,
    CertificateFolder,
    Life,
    load_private_key,
    parse,
    private_pem,
    signing_request,
)

OLD, NEW = ThrowawayCa(), ThrowawayCa()
BOTH = OLD.pem + NEW.pem
ME = "agent-1"


def is_named(leaf: x509.Certificate) -> bool:
    return [one.value for one in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [ME]


@pytest.fixture
def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def folder(tmp_path: Path, key: ec.EllipticCurvePrivateKey) -> CertificateFolder:
    made = CertificateFolder(tmp_path, stem="agent", hint="join first")
    made.write(made.key_file, private_pem(key))
    return made


def keep(folder: CertificateFolder, key: ec.EllipticCurvePrivateKey, leaf: bytes, trust: bytes = b"") -> None:
    folder.keep_issued(leaf, trust, key=key, is_named=is_named, whom=ME)


def test_a_certificate_ages_in_steps_and_says_when_the_next_one_comes() -> None:
    life = Life(start=1000.0, end=1900.0)
    assert [life.age(now) for now in (1000, 1599, 1600, 1809, 1810, 1899, 1900, 9999)] == [
        Age.FRESH,
        Age.FRESH,
        Age.DUE,
        Age.DUE,
        Age.URGENT,
        Age.URGENT,
        Age.OVER,
        Age.OVER,
    ]
    assert life.seconds_to_next_age(1000.0) == pytest.approx(600.0)
    assert life.seconds_to_next_age(1600.0) == pytest.approx(210.0)
    assert life.seconds_to_next_age(1900.0) is None


def test_machines_made_together_renew_apart_and_in_time() -> None:
    life = Life(start=0.0, end=300.0)
    assert life.renewal_at(0.0) == pytest.approx(200.0)
    assert life.renewal_at(0.5) == pytest.approx(207.5)
    assert life.renewal_at(1.0) < 300.0 * 9 / 10


def test_a_certificate_and_whom_to_trust_are_kept_together(
    folder: CertificateFolder, key: ec.EllipticCurvePrivateKey
) -> None:
    leaf = OLD.client(key.public_key(), ME)
    keep(folder, key, leaf, OLD.pem)
    found = folder.credentials()
    assert (found.certificate_pem, found.authority_pem) == (leaf, OLD.pem)
    assert found.serial == f"{parse(leaf)[0].serial_number:x}"
    assert found.key_pem == private_pem(key)
    assert "PRIVATE" not in repr(found)
    assert {path.stat().st_mode & 0o777 for path in folder.root.iterdir()} == {0o600}
    keep(folder, key, again := OLD.client(key.public_key(), ME))
    assert folder.credentials().certificate_pem == again, "trust stays where none is sent"


def test_a_certificate_that_cannot_be_used_is_not_kept(
    folder: CertificateFolder, key: ec.EllipticCurvePrivateKey
) -> None:
    keep(folder, key, OLD.client(key.public_key(), ME), OLD.pem)
    before = {path: path.read_bytes() for path in folder.root.iterdir()}
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    for leaf, trust, why in (
        (OLD.client(other, ME), OLD.pem, "another key"),
        (OLD.client(key.public_key(), "someone"), OLD.pem, "not for agent-1"),
        (OLD.client(key.public_key(), ME), NEW.pem, "not from the authority"),
        (NEW.client(key.public_key(), ME), b"", "not from the authority"),
        (b"nonsense", OLD.pem, "no certificate"),
        (OLD.client(key.public_key(), ME), b"nonsense", "are no certificates"),
    ):
        with pytest.raises(IntegrityError, match=why):
            keep(folder, key, leaf, trust)
    assert {path: path.read_bytes() for path in folder.root.iterdir()} == before


@pytest.mark.parametrize("trust", [b"", b"nonsense", NEW.pem, BOTH + b"\n" * PEM_LIMIT_BYTES])
def test_trust_that_would_lock_the_agent_out_is_refused(
    folder: CertificateFolder, key: ec.EllipticCurvePrivateKey, trust: bytes
) -> None:
    keep(folder, key, OLD.client(key.public_key(), ME), OLD.pem)
    with pytest.raises(IntegrityError):
        folder.trust(trust)
    assert folder.authority_file.read_bytes() == OLD.pem


def test_trust_follows_while_one_authority_replaces_another(
    folder: CertificateFolder, key: ec.EllipticCurvePrivateKey
) -> None:
    keep(folder, key, OLD.client(key.public_key(), ME), OLD.pem)
    assert folder.trust(BOTH)
    assert not folder.trust(BOTH)
    keep(folder, key, NEW.client(key.public_key(), ME))
    assert folder.trust(NEW.pem)


def test_a_folder_without_an_identity_says_what_to_do(folder: CertificateFolder) -> None:
    with pytest.raises(FailedPrecondition, match="no identity") as caught:
        folder.credentials()
    assert caught.value.advice == "join first"
    assert folder.own_certificate() is None


def test_a_certificate_of_another_key_is_not_presented(
    folder: CertificateFolder, key: ec.EllipticCurvePrivateKey
) -> None:
    keep(folder, key, OLD.client(key.public_key(), ME), OLD.pem)
    folder.write(folder.key_file, private_pem(ed25519.Ed25519PrivateKey.generate()))
    with pytest.raises(IntegrityError, match="is not for the key in"):
        folder.credentials()


def test_requests_are_signed_by_keys_of_both_kinds(key: ec.EllipticCurvePrivateKey) -> None:
    for one in (key, ed25519.Ed25519PrivateKey.generate()):
        request = x509.load_pem_x509_csr(signing_request(one, name="board").encode())
        assert request.is_signature_valid
        assert request.subject.rfc4514_string() == "CN=board"
    assert x509.load_pem_x509_csr(signing_request(key).encode()).subject.rfc4514_string() == ""


def test_keys_of_other_kinds_are_refused() -> None:
    load = partial(load_private_key, where="a.key")
    with pytest.raises(IntegrityError, match=r"a\.key holds no private key"):
        load(b"nonsense")
    with pytest.raises(IntegrityError, match="neither Ed25519 nor P-256"):
        load(private_pem(ec.generate_private_key(ec.SECP384R1())))
