from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from support.shared.tampering import altered

from fleetplane.kernel.errors import IntegrityError, InvalidArgument, ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity import MasterKey, signing
from fleetplane.kernel.identity.signing import LEEWAY_SECONDS, SigningKeys
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

Algorithm = Literal["EdDSA", "RS256"]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=clock) as opened:
        yield opened


async def keys_of(
    store: Store, clock: VirtualClock, algorithm: Algorithm = "EdDSA", purpose: str = "test", **more: Any
) -> SigningKeys:
    master = MasterKey(bytes(32), clock)
    return await SigningKeys.load_or_create(
        store, master, clock, purpose=purpose, algorithm=algorithm, **more
    )


@pytest.fixture
async def keys(store: Store, clock: VirtualClock) -> SigningKeys:
    return await keys_of(store, clock)


def cause(keys: SigningKeys, token: str, **options: Any) -> str:
    with pytest.raises(Unauthenticated) as refused:
        keys.verify(token, **options)
    return refused.value.details["cause"]


def forged(header: dict[str, object], claims: dict[str, object], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize("algorithm", ["EdDSA", "RS256"])
async def test_a_token_verifies_with_the_claims_it_was_made_with(
    store: Store, clock: VirtualClock, algorithm: Algorithm
) -> None:
    keys = await keys_of(store, clock, algorithm)
    claims = keys.verify(keys.sign({"sub": "i-1", "kind": "agent"}, life_seconds=300))

    now = clock.now_ns() // 10**9
    assert (claims["sub"], claims["kind"]) == ("i-1", "agent")
    assert (claims["iat"], claims["nbf"], claims["exp"]) == (now - 5, now - 5, now + 300)
    assert isinstance(claims["jti"], str)
    assert len(claims["jti"]) == 32


async def test_claims_that_the_caller_gives_are_left_alone(keys: SigningKeys, clock: VirtualClock) -> None:
    given = {"iat": 1, "nbf": 2, "exp": clock.now_ns() // 10**9 + 9, "jti": "mine"}

    assert keys.verify(keys.sign(given, life_seconds=300)) == given


async def test_keys_and_tokens_outlive_a_restart(store: Store, clock: VirtualClock) -> None:
    token = (await keys_of(store, clock)).sign({"sub": "x"}, life_seconds=60)

    assert (await keys_of(store, clock)).verify(token)["sub"] == "x"


async def test_private_keys_are_sealed_at_rest(store: Store, clock: VirtualClock, tmp_path: Path) -> None:
    keys = await keys_of(store, clock)
    private = keys._private.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("s.db*"))

    assert b"signing/test" in stored
    assert private not in stored
    with pytest.raises(IntegrityError):
        await SigningKeys.load_or_create(
            store, MasterKey(bytes([7]) * 32, clock), clock, purpose="test", algorithm="EdDSA"
        )


async def test_a_token_expires_by_the_injected_clock(keys: SigningKeys, clock: VirtualClock) -> None:
    token = keys.sign({}, life_seconds=60)
    await clock.advance(60 + LEEWAY_SECONDS - 1)
    keys.verify(token)
    await clock.advance(1)

    assert cause(keys, token) == "expired"


async def test_an_expired_token_tells_its_claims_to_who_judges_its_end_itself(
    keys: SigningKeys, clock: VirtualClock
) -> None:
    token = keys.sign({"sub": "i-1"}, life_seconds=60)
    await clock.advance(3600)
    assert keys.verify(token, expired_too=True)["sub"] == "i-1"
    future = keys.sign({"nbf": clock.now_ns() // 10**9 + 60}, life_seconds=120)
    assert cause(keys, future, expired_too=True) == "premature"


async def test_a_token_from_the_future_is_premature(keys: SigningKeys, clock: VirtualClock) -> None:
    token = keys.sign({"nbf": clock.now_ns() // 10**9 + 60}, life_seconds=3600)
    assert cause(keys, token) == "premature"
    await clock.advance(60)

    keys.verify(token)


async def test_a_token_for_another_purpose_is_refused(
    keys: SigningKeys, store: Store, clock: VirtualClock
) -> None:
    other = await keys_of(store, clock, purpose="other")

    assert cause(keys, other.sign({}, life_seconds=60)) == "unknown key"


async def test_another_keys_signature_under_our_key_id_is_refused(
    keys: SigningKeys, store: Store, clock: VirtualClock
) -> None:
    other = await keys_of(store, clock, purpose="other")
    token = jwt.encode({"exp": 2**40}, other._private, algorithm="EdDSA", headers={"kid": keys.kid})

    assert cause(keys, token) == "signature"


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_a_token_with_any_part_changed_is_refused(keys: SigningKeys, part: int) -> None:
    parts = keys.sign({"sub": "a"}, life_seconds=60).split(".")
    parts[part] = altered(parts[part])

    assert cause(keys, ".".join(parts)) in {"malformed", "signature", "algorithm", "unknown key"}


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "RS256", "ES256", ""])
async def test_the_algorithm_is_ours_to_choose(keys: SigningKeys, algorithm: str) -> None:
    token = forged({"alg": algorithm, "kid": keys.kid, "typ": "JWT"}, {"exp": 2**40}, b"x")

    assert cause(keys, token) in {"algorithm", "malformed"}


async def test_our_public_key_is_no_password(store: Store, clock: VirtualClock) -> None:
    """The classic: the public key used as the secret of a symmetric signature."""
    import hashlib
    import hmac

    keys = await keys_of(store, clock, "RS256")
    pem = keys._private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    unsigned = forged({"alg": "HS256", "kid": keys.kid}, {"exp": 2**40}).rstrip(".")
    mac = hmac.digest(pem, unsigned.encode(), hashlib.sha256)

    token = f"{unsigned}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    assert cause(keys, token) == "algorithm"


@pytest.mark.parametrize(
    "token", ["", ".", "..", "a.b.c", "é.é.é", "x" * (signing.TOKEN_LIMIT_BYTES + 1), "\0", "e30.e30."]
)
async def test_what_is_no_token_is_refused_not_crashed_on(keys: SigningKeys, token: str) -> None:
    assert cause(keys, token) in {"malformed", "algorithm"}


@pytest.mark.parametrize("value", [None, "soon", True, [], {}, float("inf")])
async def test_an_expiry_that_is_no_time_is_refused(keys: SigningKeys, value: object) -> None:
    assert cause(keys, keys.sign({"exp": value}, life_seconds=60)) in {"malformed", "expired"}


async def test_the_audience_is_checked_only_if_asked_for(keys: SigningKeys) -> None:
    one = keys.sign({"aud": "web"}, life_seconds=60)
    many = keys.sign({"aud": ["web", "api"]}, life_seconds=60)
    nobody = keys.sign({}, life_seconds=60)

    for token in (one, many):
        keys.verify(token)
        keys.verify(token, audience="web")
        assert cause(keys, token, audience="edge") == "audience"
    assert cause(keys, nobody, audience="web") == "audience"


@pytest.mark.parametrize("algorithm", ["EdDSA", "RS256"])
async def test_after_a_rotation_old_tokens_verify_until_none_can_be_alive(
    store: Store, clock: VirtualClock, algorithm: Algorithm
) -> None:
    keys = await keys_of(store, clock, algorithm, longest_life_seconds=3600)
    old = keys.sign({"sub": "old"}, life_seconds=3600)
    first = keys.kid
    assert await keys.rotate(actor="test") == keys.kid != first

    new = keys.sign({"sub": "new"}, life_seconds=3600)
    for loaded in (keys, await keys_of(store, clock, algorithm, longest_life_seconds=3600)):
        assert [loaded.verify(token)["sub"] for token in (old, new)] == ["old", "new"]
    assert [key["kid"] for key in keys.jwks()["keys"]] == [keys.kid, first]

    await clock.advance(3600 + LEEWAY_SECONDS + 1)
    await keys.rotate(actor="test")
    assert first not in keys._public
    assert cause(keys, old) == "unknown key"


async def test_a_retired_key_can_no_longer_sign(store: Store, clock: VirtualClock) -> None:
    keys = await keys_of(store, clock)
    await keys.rotate(actor="test")

    reloaded = await keys_of(store, clock)
    assert [record.private_der is None for record in reloaded._records] == [False, True]


async def test_rotation_is_audited_with_its_actor(store: Store, clock: VirtualClock) -> None:
    from fleetplane.kernel.audit import chain as audit

    keys = await keys_of(store, clock)
    await keys.rotate(actor="alice")

    entries = [audit.read(row) async for row in store.audit()]
    assert entries[-1].actor == "alice"
    assert entries[-1].changes[0].name == "signing/test"


async def test_concurrent_rotations_lose_no_key(store: Store, clock: VirtualClock) -> None:
    keys = await keys_of(store, clock)
    tokens = [keys.sign({}, life_seconds=60)]
    made = await asyncio.gather(*(keys.rotate(actor="test") for _ in range(5)))
    tokens.append(keys.sign({}, life_seconds=60))

    assert len(set(made)) == 5
    assert len(keys.jwks()["keys"]) == 6
    for token in tokens:
        (await keys_of(store, clock)).verify(token)


async def test_rotating_without_end_is_refused(
    store: Store, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "KEYS_LIMIT", 3)
    keys = await keys_of(store, clock)
    for _ in range(2):
        await keys.rotate(actor="test")
    current = keys.kid

    with pytest.raises(ResourceExhausted):
        await keys.rotate(actor="test")
    assert keys.kid == current


@pytest.mark.parametrize("algorithm", ["EdDSA", "RS256"])
async def test_others_can_verify_with_the_published_keys(
    store: Store, clock: VirtualClock, algorithm: Algorithm
) -> None:
    keys = await keys_of(store, clock, algorithm)
    token = keys.sign({"sub": "x"}, life_seconds=60)
    (published,) = jwt.PyJWKSet.from_dict(keys.jwks()).keys

    options: Any = {"verify_exp": False, "verify_iat": False, "verify_nbf": False}
    assert jwt.decode(token, published.key, algorithms=[algorithm], options=options)["sub"] == "x"
    assert published.key_id == jwt.get_unverified_header(token)["kid"]
    assert "d" not in keys.jwks()["keys"][0]


async def test_a_life_that_is_too_long_is_refused(keys: SigningKeys) -> None:
    for seconds in (0, -1, signing.LONGEST_LIFE_SECONDS + 1):
        with pytest.raises(InvalidArgument):
            keys.sign({}, life_seconds=seconds)


async def test_keys_of_one_algorithm_are_not_taken_for_another(store: Store, clock: VirtualClock) -> None:
    await keys_of(store, clock, "EdDSA")

    with pytest.raises(IntegrityError, match="EdDSA, not RS256"):
        await keys_of(store, clock, "RS256")


async def test_making_an_rsa_key_does_not_stop_the_loop(
    store: Store, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    real = rsa.generate_private_key
    threads: list[int] = []

    def slow(**options: Any) -> Any:
        threads.append(threading.get_ident())
        time.sleep(0.05)
        return real(**options)

    monkeypatch.setattr(rsa, "generate_private_key", slow)
    await keys_of(store, clock, "RS256")

    assert threads
    assert threads[0] != threading.get_ident()
