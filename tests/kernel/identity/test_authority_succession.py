"""One authority follows another without anyone losing trust on the way."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as Roots

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.identity import Authority, IssuedCertificate, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.roots import AuthorityRecord, Succession, SuccessionPhase, make_root
from fleetplane.kernel.store import Store, StoreSettings

CLOCK = SystemClock()
KEY = MasterKey(bytes(range(32)), CLOCK)
ONE, TWO = (AuthorityRecord(certificate_der=name, private_der=name) for name in (b"1", b"2"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=CLOCK) as opened:
        yield opened


@pytest.fixture
async def authority(store: Store) -> Authority:
    return await Authority.load_or_create(store, KEY, CLOCK)


def issue(authority: Authority) -> IssuedCertificate:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return authority.issue_client(key, name="i", life=timedelta(hours=1))


def test_the_steps_come_in_one_order_only() -> None:
    steady = Succession(current=ONE)
    announced = steady.announce(TWO, now_ns=1)
    switched = announced.switch(now_ns=2)
    done = switched.retire(now_ns=3)

    assert [step.phase for step in (steady, announced, switched, done)] == [
        SuccessionPhase.STEADY,
        SuccessionPhase.ANNOUNCED,
        SuccessionPhase.SWITCHED,
        SuccessionPhase.STEADY,
    ]
    refused: list[Callable[[], Succession]] = [
        lambda: steady.switch(now_ns=9),
        lambda: steady.retire(now_ns=9),
        lambda: announced.announce(TWO, now_ns=9),
        lambda: announced.retire(now_ns=9),
        lambda: switched.announce(TWO, now_ns=9),
        lambda: switched.switch(now_ns=9),
    ]
    for wrong in refused:
        with pytest.raises(FailedPrecondition):
            wrong()


def test_the_key_is_gone_once_it_signs_nothing() -> None:
    announced = Succession(current=ONE).announce(TWO, now_ns=1)
    switched = announced.switch(now_ns=2)

    assert announced.following == TWO
    assert switched.current == TWO
    assert switched.preceding == AuthorityRecord(certificate_der=b"1", private_der=None)
    assert switched.retire(now_ns=3).trusted == (TWO,)


def test_it_is_known_since_when_trust_and_signer_are_what_they_are() -> None:
    announced = Succession(current=ONE).announce(TWO, now_ns=1)
    switched = announced.switch(now_ns=2)
    done = switched.retire(now_ns=3)

    assert [step.trusted_since_ns for step in (announced, switched, done)] == [1, 1, 3]
    assert [step.signing_since_ns for step in (announced, switched, done)] == [0, 2, 2]
    assert [step.changes for step in (announced, switched, done)] == [1, 1, 2]


async def test_trust_is_widened_before_the_signer_changes_and_narrowed_last(authority: Authority) -> None:
    first = authority.key_id
    trusts = [authority.trust_id]
    old = peer_identity(issue(authority).leaf_pem)
    await authority.announce(actor="test")
    second = authority.members[1].key_id
    assert peer_identity(issue(authority).leaf_pem).issuer_key_id == first, "it signs nothing yet"
    trusts.append(authority.trust_id)
    await authority.switch(actor="test")
    new = peer_identity(issue(authority).leaf_pem)

    assert (old.issuer_key_id, new.issuer_key_id) == (first, second)
    assert [member.key_id for member in authority.members if member.signs] == [second]
    assert authority.accepts(first)
    assert authority.accepts(second)
    assert authority.trust_id == trusts[1], "the same two are trusted, in another order"
    await authority.retire(actor="test")
    assert not authority.accepts(first)
    assert authority.accepts(second)
    assert len({*trusts, authority.trust_id}) == 3


async def test_each_certificate_is_verified_by_the_bundle_of_its_time(authority: Authority) -> None:
    old = issue(authority)
    await authority.announce(actor="test")
    await authority.switch(actor="test")
    new = issue(authority)
    roots = x509.load_pem_x509_certificates(authority.trust_pem)

    assert roots[0].subject == x509.load_pem_x509_certificate(new.leaf_pem).issuer
    for issued, root in ((new, roots[0]), (old, roots[1])):
        x509.load_pem_x509_certificate(issued.leaf_pem).verify_directly_issued_by(root)
    assert len({root.subject for root in roots}) == 2, "one name for two would be tried in turn"


async def test_every_step_outlives_a_restart_and_is_audited_without_its_keys(
    store: Store, authority: Authority, tmp_path: Path
) -> None:
    for step in (authority.announce, authority.switch, authority.retire):
        await step(actor="alice")
        again = await Authority.load_or_create(store, KEY, CLOCK)
        assert (again.phase, again.trust_pem) == (authority.phase, authority.trust_pem)
        assert again.trusted_since_ns == authority.trusted_since_ns

    with sqlite3.connect(tmp_path / "s.db") as database:
        rows = [row[0] for row in database.execute("select entry from audit order by seq")]
    entries = [msgspec.json.decode(row, type=audit.ChainEntry) for row in rows]
    assert [(entry.actor, entry.action) for entry in entries] == [
        ("system/identity", "identity.create-authority"),
        ("alice", "identity.announce-authority"),
        ("alice", "identity.switch-authority"),
        ("alice", "identity.retire-authority"),
    ]
    assert not any(b"PRIVATE" in row or b"private_der" in row for row in rows)
    assert all(len(change.digest) <= 64 for entry in entries for change in entry.changes), "a digest at most"


async def test_subscribers_are_told_after_each_step_until_they_leave(authority: Authority) -> None:
    seen: list[SuccessionPhase] = []
    leave = authority.subscribe(lambda: seen.append(authority.phase))
    await authority.announce(actor="test")
    await authority.switch(actor="test")
    leave()
    await authority.retire(actor="test")

    assert seen == [SuccessionPhase.ANNOUNCED, SuccessionPhase.SWITCHED]


async def test_of_two_who_announce_at_once_one_is_refused(authority: Authority) -> None:
    done = await asyncio.gather(
        authority.announce(actor="one"), authority.announce(actor="two"), return_exceptions=True
    )

    assert [type(outcome) for outcome in done] == [type(None), FailedPrecondition]
    assert len(authority.members) == 2


async def test_an_authority_kept_in_the_first_form_goes_on_and_can_be_replaced(store: Store) -> None:

    made = make_root(datetime.now(UTC))
    assert made.private_der is not None
    key = serialization.load_der_private_key(made.private_der, password=None)
    certificate = x509.load_der_x509_certificate(made.certificate_der)
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    kept = (
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + pem
    )
    await store.put_secret("authority", KEY.seal(kept, purpose="authority"))

    authority = await Authority.load_or_create(store, KEY, CLOCK)
    assert authority.certificate_pem == authority.trust_pem == pem
    await authority.announce(actor="test")
    assert (await Authority.load_or_create(store, KEY, CLOCK)).phase is SuccessionPhase.ANNOUNCED


# Authorities that exist elsewhere.


def foreign_root(**changes: Any) -> tuple[bytes, bytes]:
    """An authority as the first implementation makes one: Ed25519, and a key identifier of its own."""
    key = changes.get("key") or ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Nstance CA")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=changes.get("days", 100)))
        .add_extension(x509.BasicConstraints(ca=changes.get("ca", True), path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier(b"k" * 20), critical=False)
    )
    algorithm = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
    pem = builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM)
    return pem, key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


async def test_an_existing_authority_is_brought_and_signs_as_it_did_elsewhere(authority: Authority) -> None:
    certificate, key = foreign_root()
    await authority.adopt(certificate, key, actor="alice")
    await authority.switch(actor="alice")
    issued = issue(authority)
    assert issued.issuer_key_id == (b"k" * 20).hex() == peer_identity(issued.leaf_pem).issuer_key_id
    x509.load_pem_x509_certificate(issued.leaf_pem).verify_directly_issued_by(
        x509.load_pem_x509_certificate(certificate)
    )
    await authority.retire(actor="alice")
    assert authority.trust_pem == certificate


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ca": False}, "not the certificate of an authority"),
        ({"days": -1}, "not now"),
        ({"key": ec.generate_private_key(ec.SECP384R1())}, "P-256 or Ed25519"),
    ],
)
async def test_what_cannot_sign_for_a_fleet_is_refused(
    authority: Authority, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidArgument, match=word):
        await authority.adopt(*foreign_root(**changes), actor="alice")
    assert authority.phase is SuccessionPhase.STEADY


async def test_a_key_that_is_not_the_certificates_is_refused(authority: Authority) -> None:
    (certificate, _), (_, key) = foreign_root(), foreign_root()
    for brought in ((certificate, key), (b"x", key), (certificate, b"x"), (b"", b"")):
        with pytest.raises(InvalidArgument):
            await authority.adopt(*brought, actor="alice")


async def test_the_authority_before_vouches_for_the_next_one_until_it_is_retired(
    authority: Authority,
) -> None:
    old = authority.members[0].certificate
    await authority.announce(actor="alice")
    assert authority.vouches
    await authority.switch(actor="alice")
    key = authority.issue_server(["fleet.example.com"])
    leaf, cross = x509.load_pem_x509_certificates(key.certificate_pem)
    verifier = PolicyBuilder().store(Roots([old])).build_server_verifier(x509.DNSName("fleet.example.com"))
    assert verifier.verify(leaf, [cross])
    assert cross.public_key() == authority.members[0].certificate.public_key()
    await authority.retire(actor="alice")
    after = x509.load_pem_x509_certificates(authority.issue_server(["a.b"]).certificate_pem)
    assert after[1] == authority.members[0].certificate


async def test_workloads_have_an_authority_of_their_own(store: Store, authority: Authority) -> None:
    workloads = await Authority.load_or_create(store, KEY, CLOCK, purpose=WORKLOAD)
    assert not authority.accepts(workloads.key_id)
    again = await Authority.load_or_create(store, KEY, CLOCK, purpose=WORKLOAD)
    assert again.trust_pem == workloads.trust_pem != authority.trust_pem
