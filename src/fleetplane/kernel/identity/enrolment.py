"""One-time redemption of a token by a public key whose owner has proved to hold the private half.

Of any number of clients with the same token, one key succeeds. A redemption is a claim on the token's
digest, held by the digest of the key. It is made inside the caller's own transaction, so
that checking, redeeming and recording the certificate happen together or not at all, and a client that lost
the answer may ask again with the same key. This module does not know the purpose of a token nor how
it was verified; it never sees the token, only its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity.authority import PublicKey
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Claim, Draft, Store

FOREVER = 0
"""The expiry of a redemption that is kept until it is released."""
SWEEP_GRACE_SECONDS = 3600.0
"""How long a redemption outlives its token: whatever leeway a verifier grants, the memory lasts longer."""
SWEEP_BATCH = 256
"""Claims released per transaction, so that a large sweep never holds up other writers."""
_FIELD = "token"


REDEMPTION: Kind[Nothing, Nothing] = Kind("redemption", Nothing, Nothing)


class Redemption(StrEnum):
    FIRST = "first"
    RETRY = "retry"
    """The same key again: a client that lost the answer gets an equivalent one."""


def digest(content: str | bytes) -> str:
    """How tokens and keys are named here: the SHA-256 of their bytes, in hexadecimal."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def redeem(
    draft: Draft, *, purpose: str, token_digest: str, key_digest: str, expires_at_ns: int = FOREVER
) -> Redemption:
    """Use a token up, for one key, as part of the caller's transaction.

    `purpose` keeps unlike tokens apart. `expires_at_ns` is when the token itself stops being
    accepted: some time after that the redemption may be swept.
    """
    if not purpose or not key_digest or "@" in key_digest:
        raise InvalidArgument("a redemption needs a purpose and a key's digest")
    owner = draft.claimed_by(REDEMPTION, purpose, _FIELD, token_digest)
    if owner is None:
        draft.claim(REDEMPTION, purpose, _FIELD, token_digest, f"{key_digest}@{expires_at_ns}")
        return Redemption.FIRST
    if owner.partition("@")[0] != key_digest:
        raise Unauthenticated(
            "the token was already used by another key",
            hint="ask for a new token",
            details={"cause": "redeemed"},
        )
    return Redemption.RETRY


def release(draft: Draft, *, purpose: str, token_digest: str) -> bool:
    """Forget a redemption, so that its token may be used again; whether there was one."""
    owner = draft.claimed_by(REDEMPTION, purpose, _FIELD, token_digest)
    if owner is None:
        return False
    draft.release(REDEMPTION, purpose, _FIELD, token_digest, owner)
    return True


def redeemed_by(store: Store, *, purpose: str, token_digest: str) -> str | None:
    """The digest of the key that used a token up; None if it is unused."""
    owner = store.claimed_by(REDEMPTION, purpose, _FIELD, token_digest)
    return None if owner is None else owner.partition("@")[0]


async def sweep(store: Store, clock: Clock, *, actor: str = "system/identity") -> int:
    """Release redemptions of tokens that nobody would accept any more; how many there were."""
    before_ns = clock.now_ns() - round(SWEEP_GRACE_SECONDS * 1e9)
    expired = [
        (claim, owner) for claim, owner in store.claims(REDEMPTION) if FOREVER < _expiry_ns(owner) < before_ns
    ]
    for start in range(0, len(expired), SWEEP_BATCH):
        await store.transact(
            partial(_release_all, claims=expired[start : start + SWEEP_BATCH]),
            actor=actor,
            action="identity.sweep-redemptions",
            touches=(),
        )
    return len(expired)


def _release_all(draft: Draft, claims: list[tuple[Claim, str]]) -> None:
    for claim, owner in claims:
        draft.release(REDEMPTION, claim.scope, claim.field, claim.value, owner)


def _expiry_ns(owner: str) -> int:
    return int(owner.partition("@")[2])


CSR_LIMIT_BYTES = 16 * 1024
CSRS_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenKey:
    key: PublicKey
    digest: str
    """SHA-256 of its SubjectPublicKeyInfo, as `CertificateIdentity.public_key_digest` has it."""


@lru_cache(maxsize=CSRS_REMEMBERED)  # an agent that waits for approval asks again and again
def proven_key(csr_pem: str) -> ProvenKey:
    """The key of a certificate request that is signed with it; names in the request do not count."""
    if not csr_pem:
        raise InvalidArgument("csr_pem is required", field="csr_pem")
    if len(csr_pem) > CSR_LIMIT_BYTES:
        raise InvalidArgument(f"csr_pem is longer than {CSR_LIMIT_BYTES} bytes", field="csr_pem")
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        # Before the signature: strangers choose how long that of another kind takes to check.
        if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
            raise InvalidArgument("csr_pem: only P-256 and Ed25519 keys are accepted", field="csr_pem")
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument("csr_pem is no certificate request in PEM", field="csr_pem") from error
    if not signed:
        raise InvalidArgument("csr_pem is not signed by the key that it names", field="csr_pem")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return ProvenKey(key=key, digest=digest(der))
