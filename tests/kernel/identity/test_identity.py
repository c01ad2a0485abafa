from __future__ import annotations

import base64
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as TrustStore

from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    SettingsError,
    Unauthenticated,
)
from fleetplane.kernel.identity import Authority, MasterKey, OneTimeTokens
from fleetplane.kernel.store import Store, StoreSettings

CLOCK = SystemClock()
KEY = MasterKey(bytes(range(32)), CLOCK)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=CLOCK) as opened:
        yield opened


# The master key


def test_a_secret_opens_with_its_key_and_purpose_only() -> None:
    sealed = KEY.seal(b"secret", purpose="a")

    assert KEY.open(sealed, purpose="a") == b"secret"
    assert b"secret" not in sealed
    for key, purpose in ((KEY, "b"), (MasterKey(bytes(32), CLOCK), "a")):
        with pytest.raises(IntegrityError, match="does not open with this master key"):
            key.open(sealed, purpose=purpose)


@pytest.mark.parametrize("damage", [b"", b"\x01", b"\x02" + bytes(40), b"\x01" + bytes(12)])
def test_a_damaged_secret_is_refused_not_crashed_on(damage: bytes) -> None:
    with pytest.raises(IntegrityError):
        KEY.open(damage, purpose="a")


def test_sealing_twice_never_gives_the_same_bytes() -> None:
    assert KEY.seal(b"x", purpose="a") != KEY.seal(b"x", purpose="a")


def test_the_key_file_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "master.key"
    first = MasterKey.from_file(path, CLOCK)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MasterKey.from_file(path, CLOCK).open(first.seal(b"x", purpose="p"), purpose="p") == b"x"


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    MasterKey.from_file(path, CLOCK)
    path.chmod(0o640)

    with pytest.raises(SettingsError, match="can be read by others"):
        MasterKey.from_file(path, CLOCK)


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode()])
def test_a_key_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        MasterKey.from_text(text, CLOCK)


def test_a_key_file_that_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="not base64"):
        MasterKey.from_file(path, SystemClock())
    with pytest.raises(SettingsError, match="is no file"):
        MasterKey.from_file(tmp_path, SystemClock())


def test_the_key_never_shows_itself() -> None:
    assert repr(KEY) == "<MasterKey>"


# The authority


async def test_the_authority_is_made_once_and_kept(store: Store) -> None:
    first = await Authority.load_or_create(store, KEY, CLOCK)
    second = await Authority.load_or_create(store, KEY, CLOCK)

    assert first.certificate_pem == second.certificate_pem
    assert store.revision == 0, "secrets are no resources"


async def test_the_authority_does_not_open_under_another_master_key(store: Store) -> None:
    await Authority.load_or_create(store, KEY, CLOCK)

    with pytest.raises(IntegrityError):
        await Authority.load_or_create(store, MasterKey(bytes(32), CLOCK), CLOCK)


async def test_a_server_certificate_verifies_for_its_names(store: Store) -> None:
    authority = await Authority.load_or_create(store, KEY, CLOCK)
    issued = authority.issue_server(["fleet.example", "127.0.0.1"])
    leaf, root = x509.load_pem_x509_certificates(issued.certificate_pem)

    verifier = PolicyBuilder().store(TrustStore([root])).build_server_verifier(x509.DNSName("fleet.example"))
    assert verifier.verify(leaf, [])[0] == leaf
    assert leaf.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=4)


@pytest.mark.parametrize("kind", ["ed25519", "p256"])
async def test_a_client_certificate_carries_role_and_tenant(store: Store, kind: str) -> None:
    authority = await Authority.load_or_create(store, KEY, CLOCK)
    public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey = (
        ed25519.Ed25519PrivateKey.generate().public_key()
        if kind == "ed25519"
        else ec.generate_private_key(ec.SECP256R1()).public_key()
    )
    issued = authority.issue_client(
        public_key, name="i-1", role="agent", tenant="acme", life=timedelta(hours=1)
    )
    leaf, root = x509.load_pem_x509_certificates(issued.certificate_pem)

    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "fleetplane://role/agent",
        "fleetplane://tenant/acme",
    ]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert issued.key_pem is None


async def test_no_certificate_outlives_the_authority(store: Store) -> None:
    authority = await Authority.load_or_create(store, KEY, CLOCK)
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    issued = authority.issue_client(key, name="i", role="r", tenant="t", life=timedelta(days=36500))
    _, root = x509.load_pem_x509_certificates(issued.certificate_pem)

    assert issued.not_after == root.not_valid_after_utc


async def test_a_key_on_another_curve_is_refused(store: Store) -> None:
    authority = await Authority.load_or_create(store, KEY, CLOCK)
    key = ec.generate_private_key(ec.SECP384R1()).public_key()

    with pytest.raises(InvalidArgument, match="secp384r1"):
        authority.issue_client(key, name="i", role="r", tenant="t", life=timedelta(hours=1))


# Tokens


async def test_a_token_authenticates_its_principal_also_after_a_restart(store: Store) -> None:
    tokens = OneTimeTokens(store, KEY, CLOCK)
    token = await tokens.create("ci", roles=frozenset({Role("reader")}), scope="org/acme", actor="test")
    reloaded = OneTimeTokens(store, KEY, CLOCK)
    await reloaded.load()

    for known in (tokens, reloaded):
        principal = known.authenticate(token)
        assert (principal.name, principal.roles, principal.scope) == (
            "token/ci",
            frozenset({Role("reader")}),
            "org/acme",
        )


async def test_an_unknown_or_revoked_token_is_refused(store: Store) -> None:
    tokens = OneTimeTokens(store, KEY, CLOCK)
    token = await tokens.create("ci", roles=frozenset(), actor="test")
    with pytest.raises(Unauthenticated):
        tokens.authenticate(token + "x")

    assert await tokens.revoke("ci", actor="test") is True
    assert await tokens.revoke("ci", actor="test") is False
    with pytest.raises(Unauthenticated):
        tokens.authenticate(token)


async def test_a_token_is_kept_as_a_hash_only(store: Store, tmp_path: Path) -> None:
    token = await OneTimeTokens(store, KEY, CLOCK).create("ci", roles=frozenset(), actor="test")
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("s.db*"))

    assert b"token/ci" in stored
    assert token.encode() not in stored


async def test_two_tokens_cannot_share_a_name(store: Store) -> None:
    tokens = OneTimeTokens(store, KEY, CLOCK)
    await tokens.create("ci", roles=frozenset(), actor="test")
    with pytest.raises(AlreadyExists):
        await tokens.create("ci", roles=frozenset(), actor="test")
