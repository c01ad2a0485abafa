"""One authority follows another without anyone losing trust on the way."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.kernel import audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity import Authority, Issued, MasterKey
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.roots import make_root
from fleetplane.kernel.identity.succession import AuthorityRecord, Phase, Succession
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


def issue(authority: Authority) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return authority.issue_client(key, name="i", life=timedelta(hours=1))


def test_the_steps_come_in_one_order_only() -> None:
    steady = Succession(current=ONE)
    announced = steady.announce(TWO, now_ns=1)
    switched = announced.switch(now_ns=2)
    done = switched.retire(now_ns=3)

    assert [step.phase for step in (steady, announced, switched, done)] == [
        Phase.STEADY, Phase.ANNOUNCED, Phase.SWITCHED, Phase.STEADY,
    ]  # fmt: skip
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
    entries = [msgspec.json.decode(row, type=audit.Entry) for row in rows]
    assert [(entry.actor, entry.action) for entry in entries] == [
        ("system/identity", "identity.create-authority"),
        ("alice", "identity.announce-authority"),
        ("alice", "identity.switch-authority"),
        ("alice", "identity.retire-authority"),
    ]
    assert all(change.digest == "" for entry in entries for change in entry.changes)


async def test_subscribers_are_told_after_each_step_until_they_leave(authority: Authority) -> None:
    seen: list[Phase] = []
    leave = authority.subscribe(lambda: seen.append(authority.phase))
    await authority.announce(actor="test")
    await authority.switch(actor="test")
    leave()
    await authority.retire(actor="test")

    assert seen == [Phase.ANNOUNCED, Phase.SWITCHED]


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
    assert (await Authority.load_or_create(store, KEY, CLOCK)).phase is Phase.ANNOUNCED
