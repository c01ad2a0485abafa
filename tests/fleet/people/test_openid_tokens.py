"""What an ID token has to be like to vouch for anybody; no server, no provider."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from fleetplane.fleet.people.openid import id_tokens
from fleetplane.fleet.people.openid.id_tokens import Expected, SigningKey, UnknownKey, signing_keys, verified
from fleetplane.kernel.errors import SettingsError, Unauthenticated
from fleetplane.sections.openid import OpenIDSettings

ISSUER, CLIENT, NONCE, NOW = "https://id.example/staff", "fleet", "n-0", 1_000_000.0
EXPECTED = Expected(issuer=ISSUER, client_id=CLIENT, nonce=NONCE, groups_claim="groups", now=NOW)
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
CLAIMS: Mapping[str, Any] = {
    "iss": ISSUER,
    "aud": CLIENT,
    "sub": "u-1",
    "nonce": NONCE,
    "iat": NOW - 5,
    "exp": NOW + 300,
    "groups": ["sre"],
}


def public(key: Any, kid: str, **more: str) -> dict[str, Any]:
    algorithm = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    name = next((name for kind, name in algorithm.items() if isinstance(key, kind)), "EdDSA")
    told = jwt.get_algorithm_by_name(name).to_jwk(key.public_key(), as_dict=True)
    return {**told, "kid": kid, "use": "sig", **more}


KEYS = signing_keys({"keys": [public(RSA, "r"), public(EC, "e"), public(ED, "d")]})


def signed(key: Any = RSA, kid: str | None = "r", algorithm: str = "RS256", **changes: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid} if kid else {})


def unsigned(header: Mapping[str, str]) -> str:
    parts = (json.dumps(one).encode() for one in (header, CLAIMS))
    return ".".join(base64.urlsafe_b64encode(one).rstrip(b"=").decode() for one in parts) + "."


def cause(token: str, keys: tuple[SigningKey, ...] = KEYS) -> str:
    with pytest.raises(Unauthenticated) as refused:
        verified(token, keys, EXPECTED)
    return refused.value.details["cause"]


@pytest.mark.parametrize(
    ("key", "kid", "algorithm"),
    [(RSA, "r", "RS256"), (RSA, "r", "PS384"), (EC, "e", "ES256"), (ED, "d", "EdDSA")],
)
def test_a_token_under_a_published_key_tells_who_somebody_is(key: Any, kid: str, algorithm: str) -> None:
    token = signed(key, kid, algorithm, preferred_username="ann", name="Ann", email="ann@example.com")
    found = verified(token, KEYS, EXPECTED)
    assert (found.issuer, found.subject, found.groups) == (ISSUER, "u-1", ("sre",))
    assert (found.name, found.display_name, found.email) == ("ann", "Ann", "ann@example.com")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"iss": "https://id.example/other"}, "issuer"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"aud": "another"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": ["another"]}, "audience"),
        ({"aud": [CLIENT, "another"]}, "audience"),
        ({"aud": [CLIENT, "another"], "azp": "another"}, "audience"),
        ({"azp": "another"}, "audience"),
        ({"nonce": "n-1"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"nonce": 0}, "nonce"),
        ({"exp": NOW - 61}, "expired"),
        ({"exp": None}, "malformed"),
        ({"exp": True}, "malformed"),
        ({"exp": "never"}, "malformed"),
        ({"iat": NOW + 120}, "premature"),
        ({"nbf": NOW + 120}, "premature"),
        ({"iat": None}, "malformed"),
        ({"iat": NOW - 3600, "exp": NOW + 3600}, "expired"),
        ({"sub": None}, "subject"),
        ({"sub": ""}, "subject"),
        ({"sub": "x" * 256}, "subject"),
        ({"groups": "sre"}, "groups"),
        ({"groups": {"sre": 1}}, "groups"),
        ({"groups": ["sre", 1]}, "groups"),
        ({"groups": ["x"] * 501}, "groups"),
    ],
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert cause(signed(**changes)) == expected


def test_clocks_may_differ_a_little() -> None:
    both: tuple[dict[str, Any], ...] = ({"exp": NOW - 30}, {"iat": NOW + 30, "nbf": NOW + 30})
    for changes in both:
        assert verified(signed(**changes), KEYS, EXPECTED).subject == "u-1"


def test_an_audience_of_several_needs_to_name_us_as_the_party() -> None:
    assert verified(signed(aud=[CLIENT, "another"], azp=CLIENT), KEYS, EXPECTED).subject == "u-1"


def test_a_token_without_a_signature_or_under_a_secret_that_everybody_knows_is_refused() -> None:
    assert cause(unsigned({"alg": "none", "kid": "r"})) == "algorithm"
    assert cause(unsigned({"alg": "nOnE", "kid": "r"})) == "algorithm"
    assert cause(unsigned({"alg": "RS256", "kid": "r"})) == "signature"
    assert cause(unsigned({"kid": "r"})) in ("algorithm", "malformed")
    pem = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    # The library refuses to make such a token, so that it is made by hand.
    head = unsigned({"alg": "HS256", "kid": "r"}).rstrip(".")
    mac = hmac.digest(pem, head.encode(), hashlib.sha256)
    assert cause(f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}") == "algorithm"
    shared = signing_keys({"keys": [{"kty": "oct", "kid": "s", "k": "c2VjcmV0", "alg": "HS256"}]})
    assert shared == ()


def test_a_key_signs_with_its_own_algorithm_and_purpose_only() -> None:
    assert cause(signed(OTHER)) == "signature", "another key of the same name"
    for keys in ([public(RSA, "r", use="enc")], [public(RSA, "r", alg="PS256")], [public(EC, "r")], [], "x"):
        with pytest.raises(UnknownKey):
            verified(signed(), signing_keys({"keys": keys}), EXPECTED)
    two = signing_keys({"keys": [public(RSA, "a"), public(OTHER, "b")]})
    with pytest.raises(UnknownKey):
        verified(signed(kid=None), two, EXPECTED)
    assert verified(signed(kid=None), two[:1], EXPECTED).subject == "u-1"
    assert signing_keys("nothing") == signing_keys({"keys": [1, {"kty": "EC", "crv": "x"}]}) == ()


@pytest.mark.parametrize("token", ["", "x", "a.b.c", "..", "x" * (id_tokens.TOKEN_LIMIT_BYTES + 1)])
def test_what_is_no_token_is_refused(token: str) -> None:
    assert cause(token) in ("malformed", "size")


@pytest.mark.parametrize(
    "given",
    [
        {"issuer": "http://id.example"},
        {"issuer": "ftp://id.example"},
        {"issuer": "https://"},
        {"issuer": "https://id.example?x=1"},
        {"issuer": "https://id.example", "client_id": ""},
        {"issuer": "https://id.example", "scopes": ("profile",)},
        {"issuer": "https://id.example", "scopes": ("openid", "a b")},
        {"issuer": "https://id.example", "server_url": "http://fleet.example"},
        {"issuer": "https://id.example", "server_url": "https://fleet.example/ui"},
        {"issuer": "https://id.example", "client_secret": "x", "client_secret_file": "/x"},
        {"roles": ("sre",)},
        {"roles": ("sre=operator",)},
        {"roles": ("=operator@/",)},
    ],
)
def test_settings_that_would_not_be_safe_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"oidc\."):
        OpenIDSettings(**{"client_id": "fleet", **given})


def test_groups_may_have_any_name() -> None:
    found = OpenIDSettings(roles=("CN=sre,OU=x@y=operator@/tenants/acme",)).group_roles()
    assert [(one.group, one.role, one.scope) for one in found] == [
        ("CN=sre,OU=x@y", "operator", "/tenants/acme")
    ]
