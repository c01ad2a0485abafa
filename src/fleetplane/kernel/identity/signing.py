"""Short-lived signed tokens (JWT), under keys that rotate.

A set of keys has one purpose and one algorithm: a token signed for another purpose, or by any
other algorithm, is refused before its claims are looked at. The keys are kept sealed in the
store, and every server follows what another makes of them. A key that was rotated out loses its private half
at once and its public half when the last token it may have signed has expired. One that will sign may be
published before it does, for those who verify and read keys now and then. Time is the injected clock's, not
the machine's. Decides whether a token is ours and in time; what its claims mean is the caller's business.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jwt
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    IntegrityError,
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity.master_key import (
    NO_VERSION,
    HeldSecret,
    MasterKey,
    ReplacedMeanwhile,
    SealedSecret,
)
from fleetplane.kernel.store import Store
from fleetplane.kernel.unbroken import run_to_completion

LEEWAY_SECONDS = 5.0
"""How far another server's clock may be from ours before its tokens look expired or premature."""
BACKDATE_SECONDS = 5.0
"""How far a client's clock may lag before a fresh token looks premature to it."""
LONGEST_LIFE_SECONDS = 90 * 86_400.0
"""Of a token, unless a set of keys says otherwise; a retired key's public half is kept for as long."""
KEYS_LIMIT = 64
"""Keys in one set, the current one included: each is 300 to 2,000 bytes, and all lie in one secret."""
TOKEN_LIMIT_BYTES = 8192
"""Of a token that is offered for verification; headers are not much larger anywhere."""
KID_BYTES = 8
JTI_BYTES = 16
RSA_BITS = 2048
ATTEMPTS = 5
"""To change a set of keys while other servers do."""
ACTOR = "system/identity"

Algorithm = Literal["EdDSA", "RS256"]
PrivateKey = ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
PublicKey = ed25519.Ed25519PublicKey | rsa.RSAPublicKey


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One key as it is kept, inside the seal."""

    kid: str
    algorithm: Algorithm
    created_at_ns: int
    public_der: bytes
    private_der: bytes | None = None
    """Only of the key that signs, and of the one that will."""
    is_next: bool = False
    """Whether it is published, and signs nothing before the next rotation."""
    serves_until_ns: int | None = None
    """When a retired key may be forgotten."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[KeyRecord, ...])


class SigningKeys:
    """See `load_or_create`; the constructor takes what has been loaded."""

    def __init__(
        self,
        records: tuple[KeyRecord, ...],
        *,
        store: Store,
        master: MasterKey,
        clock: Clock,
        purpose: str,
        algorithm: Algorithm,
        longest_life_seconds: float,
        version: str = NO_VERSION,
    ) -> None:
        kept = SealedSecret(store, master, name=_secret(purpose))
        self._held = HeldSecret(
            kept, version=version, use=lambda content: self._use(_DECODER.decode(content))
        )
        self._clock = clock
        self._purpose = purpose
        self._algorithm: Algorithm = algorithm
        self._longest_life_seconds = longest_life_seconds
        self._use(records)
        store.keep_fresh(self._held)

    def __repr__(self) -> str:
        return f"<SigningKeys {self._purpose} {self._algorithm} keys={len(self._records)}>"

    @classmethod
    async def load_or_create(
        cls,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        purpose: str,
        algorithm: Algorithm,
        longest_life_seconds: float = LONGEST_LIFE_SECONDS,
    ) -> SigningKeys:
        """The keys for one purpose, made at first use: by one of all servers."""

        async def made() -> bytes:
            return _ENCODER.encode((await _generate(algorithm, clock),))

        kept = SealedSecret(store, master, name=_secret(purpose))
        found = await kept.read_or_make(made, actor=ACTOR)
        records = _DECODER.decode(found.content)
        if records[0].algorithm != algorithm:
            raise IntegrityError(f"the keys for {purpose} are for {records[0].algorithm}, not {algorithm}")
        return cls(
            records,
            store=store,
            master=master,
            clock=clock,
            purpose=purpose,
            algorithm=algorithm,
            longest_life_seconds=longest_life_seconds,
            version=found.version,
        )

    def _use(self, records: tuple[KeyRecord, ...]) -> None:
        current = records[0]
        assert current.private_der is not None
        # Made by a server and sealed: to look for primes again would take longer than all else here.
        private = serialization.load_der_private_key(
            current.private_der, password=None, unsafe_skip_rsa_key_validation=True
        )
        assert isinstance(private, PrivateKey)
        self._records = records
        self._private: PrivateKey = private
        self._public = {record.kid: _public(record) for record in records}

    # Signing.

    @property
    def kid(self) -> str:
        """The id of the key that signs now."""
        return self._records[0].kid

    @property
    def created_at_ns(self) -> int:
        """When the key that signs now was made."""
        return self._records[0].created_at_ns

    def sign(
        self, claims: Mapping[str, object], *, life_seconds: float, backdate_seconds: float = BACKDATE_SECONDS
    ) -> str:
        """A token with these claims; `iat`, `nbf`, `exp` and `jti` are added unless they are given.

        `iat` and `nbf` lie in the past by `backdate_seconds`, for clients whose clock lags.
        """
        longest = self._longest_life_seconds
        if not 0 < life_seconds <= longest:
            raise InvalidArgument(
                f"a {self._purpose} token may live up to {longest:g} s, not {life_seconds:g}"
            )
        now = self._clock.now_ns() / 1e9
        began = math.floor(now - backdate_seconds)
        payload = {
            "iat": began,
            "nbf": began,
            "exp": math.ceil(now + life_seconds),
            "jti": self._clock.token_bytes(JTI_BYTES).hex(),
            **claims,
        }
        return jwt.encode(payload, self._private, algorithm=self._algorithm, headers={"kid": self.kid})

    # Verifying.

    def verify(
        self, token: str, *, audience: str | None = None, expired_too: bool = False
    ) -> dict[str, object]:
        """The claims of a token of ours, in time and, if asked, for this audience.

        With `expired_too` it may have ended, as long as its key is still kept: for callers who
        judge its end themselves.
        `details["cause"]` of the refusal is one of: malformed, algorithm, unknown key, signature,
        expired, premature, audience.
        """
        if len(token) > TOKEN_LIMIT_BYTES:
            raise _refused("malformed", f"the token is longer than {TOKEN_LIMIT_BYTES} bytes")
        key = self._key_for(token)
        try:
            claims: dict[str, object] = jwt.decode(
                token,
                key,
                algorithms=[self._algorithm],
                # The library would ask the machine's clock, so times are checked below.
                options={
                    "require": ["exp"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": False,
                },
            )
        except jwt.InvalidSignatureError as error:
            raise _refused("signature", "the token's signature is wrong") from error
        except jwt.InvalidTokenError as error:
            raise _refused("malformed", f"the token cannot be read: {error}") from error
        self._check_times(claims, expired_too=expired_too)
        if audience is not None and not _names(claims.get("aud"), audience):
            raise _refused("audience", f"the token is not for {audience}")
        return claims

    def _key_for(self, token: str) -> PublicKey:
        """By the header, which nothing vouches for yet: it can only pick among our own keys."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError as error:
            raise _refused("malformed", f"the token cannot be read: {error}") from error
        if header.get("alg") != self._algorithm:
            raise _refused("algorithm", f"the token must be signed with {self._algorithm}")
        key = self._public.get(str(header.get("kid")))
        if key is None:
            raise _refused("unknown key", "the token was signed with a key that is not, or no longer, ours")
        return key

    def _check_times(self, claims: Mapping[str, object], *, expired_too: bool) -> None:
        now = self._clock.now_ns() / 1e9
        expires, begins = _moment(claims, "exp"), _moment(claims, "nbf")
        if expires is None or (expires + LEEWAY_SECONDS <= now and not expired_too):
            raise _refused("expired", "the token has expired")
        if begins is not None and begins - LEEWAY_SECONDS > now:
            raise _refused("premature", "the token is not valid yet")

    # Rotating.

    async def rotate(self, *, actor: str) -> str:
        """Sign with a new key from now on; the older ones still verify. Returns the new key's id.

        The new key is the one that was published for this, if there is one.
        """
        async with self._held.changing:
            made = self._next or await _generate(self._algorithm, self._clock)
            signing = msgspec.structs.replace(made, is_next=False)

            def following() -> tuple[KeyRecord, ...]:
                return signing, *(one for one in self._retired() if one.kid != signing.kid)

            await run_to_completion(self._take(following, actor=actor))
            return signing.kid

    @property
    def _next(self) -> KeyRecord | None:
        return next((record for record in self._records if record.is_next), None)

    @property
    def published_at_ns(self) -> int | None:
        """When the key was made that will sign after the next rotation; None if there is none yet."""
        following = self._next
        return None if following is None else following.created_at_ns

    async def publish(self, *, actor: str) -> str:
        """Make the key that signs after the next rotation, for others to read it before; its id."""
        async with self._held.changing:
            if self._next is None:
                made = msgspec.structs.replace(await _generate(self._algorithm, self._clock), is_next=True)

                def following() -> tuple[KeyRecord, ...]:
                    return self._records if self._next is not None else (*self._records, made)

                await run_to_completion(self._take(following, actor=actor))
            assert self._next is not None
            return self._next.kid

    async def _take(self, following: Callable[[], tuple[KeyRecord, ...]], *, actor: str) -> None:
        """Keep what follows from the records; again, if another server has changed them meanwhile."""
        for _ in range(ATTEMPTS):
            records = following()
            if len(records) > KEYS_LIMIT:
                raise ResourceExhausted(
                    f"there are {KEYS_LIMIT} keys for {self._purpose} whose tokens may still be in use",
                    hint="wait until the oldest has been retired for as long as its tokens live",
                )
            try:
                await self._held.replace(_ENCODER.encode(records), actor=actor)
            except ReplacedMeanwhile:
                continue
            self._use(records)
            return
        raise Conflict(f"the keys for {self._purpose} are being changed all the time", hint="try again")

    def _retired(self) -> Iterator[KeyRecord]:
        now_ns = self._clock.now_ns()
        until_ns = now_ns + round((self._longest_life_seconds + LEEWAY_SECONDS) * 1e9)
        for record in self._records:
            if record.serves_until_ns is None:
                yield msgspec.structs.replace(
                    record, private_der=None, serves_until_ns=until_ns, is_next=False
                )
            elif record.serves_until_ns > now_ns:
                yield record

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        """The public keys as a JSON Web Key Set, for others who verify."""
        return {
            "keys": [
                {"kid": kid, "alg": self._algorithm, "use": "sig", **_jwk(key)}
                for kid, key in self._public.items()
            ]
        }


def _secret(purpose: str) -> str:
    return f"signing/{purpose}"


async def _generate(algorithm: Algorithm, clock: Clock) -> KeyRecord:
    if algorithm == "RS256":
        # A tenth of a second or several: not while everyone waits.
        private: PrivateKey = await asyncio.to_thread(
            rsa.generate_private_key, public_exponent=65537, key_size=RSA_BITS
        )
    else:
        private = ed25519.Ed25519PrivateKey.generate()
    return KeyRecord(
        kid=clock.token_bytes(KID_BYTES).hex(),
        algorithm=algorithm,
        created_at_ns=clock.now_ns(),
        public_der=private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        private_der=private.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _public(record: KeyRecord) -> PublicKey:
    key = serialization.load_der_public_key(record.public_der)
    assert isinstance(key, PublicKey)
    return key


def _jwk(key: PublicKey) -> dict[str, str]:
    if isinstance(key, ed25519.Ed25519PublicKey):
        return {"kty": "OKP", "crv": "Ed25519", "x": _base64url(key.public_bytes_raw())}
    numbers = key.public_numbers()
    return {
        "kty": "RSA",
        "n": _base64url(numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big")),
        "e": _base64url(numbers.e.to_bytes((numbers.e.bit_length() + 7) // 8, "big")),
    }


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _moment(claims: Mapping[str, object], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused("malformed", f"the token's {name} is not a time")
    return value


def _names(audience: object, wanted: str) -> bool:
    return audience == wanted or (isinstance(audience, list) and wanted in audience)


def _refused(cause: str, message: str) -> Unauthenticated:
    return Unauthenticated(message, details={"cause": cause})
