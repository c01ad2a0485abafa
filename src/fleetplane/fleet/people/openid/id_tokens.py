"""What an ID token of an OpenID provider proves, or why it proves nothing. Pure: keys and the time are given.

The algorithm is one of an allow-list of signatures with a public key, and fits the key; `none`, and MACs for
which a public key could pass for the secret, are not on it. Issuer, audience, nonce and times are checked as
OpenID Connect Core 3.1.3.7 asks. Who somebody is follows from issuer and subject alone: names and e-mail
addresses are for showing, since a provider may let people choose them.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from fleetplane.kernel.errors import Unauthenticated

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
SKEW_SECONDS = 60.0
"""How far the provider's clock may be from ours."""
AGE_SECONDS = 600.0
"""A token that was issued longer ago than a sign-in may take belongs to another sign-in."""
TOKEN_LIMIT_BYTES = 64 * 1024
"""With some hundred groups of long names in it."""
SUBJECT_LIMIT = 255
"""OpenID Connect Core 2: `sub` has at most so many ASCII characters."""
GROUPS_LIMIT = 500
GROUP_LIMIT = 256
TEXT_LIMIT = 128


class UnknownKey(Exception):
    """The token names a key that is not among those given: the provider may have another by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchedPerson:
    """A person, as the provider vouches for them."""

    issuer: str
    subject: str
    groups: tuple[str, ...] = ()
    name: str = ""
    """What they would like to log in as, if that is free."""
    display_name: str = ""
    email: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the token of one sign-in has to say."""

    issuer: str
    client_id: str
    nonce: str
    groups_claim: str
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A public key of the provider, and what it may have signed with."""

    kid: str | None
    algorithms: frozenset[str]
    key: Any


def signing_keys(document: object) -> tuple[SigningKey, ...]:
    """The keys of a JWK set with which ID tokens may be signed; what else is in it is left out."""
    listed = document.get("keys") if isinstance(document, Mapping) else None
    found = (_usable(one) for one in (listed if isinstance(listed, list) else ()))
    return tuple(one for one in found if one is not None)


def _usable(told: object) -> SigningKey | None:
    if not isinstance(told, dict) or told.get("kty") not in ("RSA", "EC", "OKP"):
        return None  # `oct` is a shared secret: whoever knows it could sign
    if told.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(told)
    except jwt.PyJWTError:
        return None  # of a curve or kind that we cannot check
    if told["kty"] == "RSA" and "alg" not in told:
        algorithms = frozenset(one for one in ALGORITHMS if one[:2] in ("RS", "PS"))
    else:
        algorithms = frozenset({key.algorithm_name}) & frozenset(ALGORITHMS)
    return SigningKey(kid=key.key_id, algorithms=algorithms, key=key.key)


def verified(token: str, keys: Sequence[SigningKey], expected: Expected) -> VouchedPerson:
    """Whom a token vouches for; raises `Unauthenticated`, or `UnknownKey` where other keys might fit."""
    if len(token) > TOKEN_LIMIT_BYTES:
        raise _refused("size", f"it is longer than {TOKEN_LIMIT_BYTES} bytes")
    try:
        header = jwt.get_unverified_header(token)
    except jwt.InvalidTokenError as error:
        raise _refused("malformed", "it cannot be read") from error
    if header.get("alg") not in ALGORITHMS:
        raise _refused("algorithm", f"{str(header.get('alg'))[:32]!r} is no algorithm that is accepted")
    claims = _signed(token, _key(header, keys), str(header["alg"]))
    _check_parties(claims, expected)
    _check_times(claims, expected.now)
    nonce = claims.get("nonce")
    if not isinstance(nonce, str) or not hmac.compare_digest(nonce.encode(), expected.nonce.encode()):
        raise _refused("nonce", "it was issued for another sign-in")
    return VouchedPerson(
        issuer=expected.issuer,
        subject=_subject(claims),
        groups=_groups(claims, expected.groups_claim),
        name=_text(claims, "preferred_username") or _text(claims, "email"),
        display_name=_text(claims, "name"),
        email=_text(claims, "email"),
    )


def _key(header: Mapping[str, Any], keys: Sequence[SigningKey]) -> Any:
    kid, algorithm = header.get("kid"), header["alg"]
    fitting = [one for one in keys if (kid is None or one.kid == kid) and algorithm in one.algorithms]
    if len(fitting) != 1:  # also where it names none and could be any: signatures are not tried out
        raise UnknownKey(str(kid)[:64])
    return fitting[0].key


def _signed(token: str, key: Any, algorithm: str) -> dict[str, Any]:
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],  # one of ours that fits the key, as was checked
            # Issuer, audience and times are checked below: the library would ask the machine's clock.
            options={
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
                "verify_aud": False,
                "verify_iss": False,
                "verify_sub": False,
                "verify_jti": False,
            },
        )
    except jwt.InvalidTokenError as error:
        raise _refused("signature", "its signature is wrong") from error
    return claims


def _check_parties(claims: Mapping[str, Any], expected: Expected) -> None:
    if claims.get("iss") != expected.issuer:
        raise _refused("issuer", f"it is not of {expected.issuer}")
    audience = claims.get("aud")
    listed = [audience] if isinstance(audience, str) else audience
    if not isinstance(listed, list) or expected.client_id not in listed:
        raise _refused("audience", "it is for another client")
    party = claims.get("azp")
    if (len(listed) > 1 or party is not None) and party != expected.client_id:
        raise _refused("audience", "it was issued to another client")


def _check_times(claims: Mapping[str, Any], now: float) -> None:
    ends, began, since = (_time(claims, name) for name in ("exp", "iat", "nbf"))
    if ends is None or began is None:
        raise _refused("malformed", "it does not say when it was issued and when it ends")
    if now >= ends + SKEW_SECONDS:
        raise _refused("expired", "it has expired")
    if now < max(began, since or began) - SKEW_SECONDS:
        raise _refused("premature", "it is not valid yet; compare the clocks of provider and server")
    if now > began + AGE_SECONDS + SKEW_SECONDS:
        raise _refused("expired", "it was issued too long ago")


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    found = claims.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _subject(claims: Mapping[str, Any]) -> str:
    found = claims.get("sub")
    if not isinstance(found, str) or not 0 < len(found) <= SUBJECT_LIMIT or not found.isprintable():
        raise _refused("subject", "it names nobody")
    return found


def _groups(claims: Mapping[str, Any], claim: str) -> tuple[str, ...]:
    """The person's groups; a claim of another type is refused, since letters of a text are no groups."""
    found = claims.get(claim) if claim else None
    if found is None:
        return ()
    if not isinstance(found, list) or not all(_is_group(one) for one in found):
        raise _refused("groups", f"its claim {claim!r} is no list of names")
    if len(found) > GROUPS_LIMIT:
        raise _refused("groups", f"its claim {claim!r} lists more than {GROUPS_LIMIT} groups")
    return tuple(dict.fromkeys(found))


def _is_group(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= GROUP_LIMIT and value.isprintable()


def _text(claims: Mapping[str, Any], name: str) -> str:
    found = claims.get(name)
    return found if isinstance(found, str) and len(found) <= TEXT_LIMIT and found.isprintable() else ""


def _refused(cause: str, why: str) -> Unauthenticated:
    return Unauthenticated(
        f"the provider's ID token is refused: {why}", hint="sign in again", details={"cause": cause}
    )
