"""What is asked of a provider, how often, and what of its answers is believed."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.fleet.people.openid.provider import KEPT_SECONDS, KEYS_AGAIN_SECONDS, OpenIdProvider
from fleetplane.fleet.people.openid.sign_in import begun, challenge_of
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unauthenticated, Unavailable
from fleetplane.sections.openid import OpenIDSettings

NONCE = "n-0"


class ShiftedClock(SystemClock):
    """The machine's, some seconds later."""

    later = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.later


class StandIn:
    """A provider that checks PKCE, rotates its keys and lies on request."""

    def __init__(self) -> None:
        self.issuer = ""
        self.asked: Counter[str] = Counter()
        self.document: dict[str, Any] = {}
        self.answers: dict[str, tuple[int, bytes]] = {}
        """What to answer instead, by path."""
        self.encoding = ""
        """What its answers say that they are compressed with."""
        self.encodings: set[str] = set()
        """What was asked for."""
        self.challenge = ""
        self.forms: list[dict[str, str]] = []
        self.basic: list[str] = []
        self.rotate("a")

    def rotate(self, kid: str) -> None:
        self.kid, self.key = kid, ec.generate_private_key(ec.SECP256R1())

    def jwks(self) -> dict[str, Any]:
        told = jwt.get_algorithm_by_name("ES256").to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**told, "kid": self.kid}]}

    def token(self, form: dict[str, str]) -> tuple[int, Any]:
        self.forms.append(form)
        if challenge_of(form["code_verifier"]) != self.challenge or form["code"] != "good":
            return 400, {"error": "invalid_grant"}
        now = SystemClock().now_ns() / 1e9
        claims = {"iss": self.issuer, "aud": "fleet", "sub": "u", "nonce": NONCE, "iat": now, "exp": now + 60}
        return 200, {"id_token": jwt.encode(claims, self.key, algorithm="ES256", headers={"kid": self.kid})}

    def answer(self, path: str, body: str, authorization: str) -> tuple[int, bytes]:
        self.asked[path] += 1
        if path in self.answers:
            return self.answers[path]
        if path == "/token":
            self.basic.append(authorization)
            status, found = self.token({name: values[0] for name, values in parse_qs(body).items()})
            return status, json.dumps(found).encode()
        return 200, json.dumps(self.jwks() if path == "/jwks" else self.document).encode()


@contextmanager
def stand_in() -> Iterator[StandIn]:
    provider = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length).decode()
            status, raw = provider.answer(self.path, body, self.headers.get("authorization") or "")
            self.send_response(status)
            if status == 302:
                self.send_header("location", f"{provider.issuer}/elsewhere")
            if provider.encoding:
                self.send_header("content-encoding", provider.encoding)
            provider.encodings.add(self.headers.get("accept-encoding") or "")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = handle_one  # noqa: N815  # as the library spells it

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.issuer = f"http://127.0.0.1:{server.server_port}"
        endpoints = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/jwks"}
        provider.document = {
            "issuer": provider.issuer,
            **{name: provider.issuer + path for name, path in endpoints.items()},
        }
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()


def settings(found: StandIn, **more: Any) -> OpenIDSettings:
    return OpenIDSettings(issuer=found.issuer, client_id="fleet", **more)


async def redeemed(provider: OpenIdProvider, found: StandIn, code: str = "good", verifier: str = "") -> str:
    pending = begun("", SystemClock())
    found.challenge = challenge_of(pending.verifier)
    identity = await provider.identity(
        code, verifier=verifier or pending.verifier, redirect_uri="http://localhost/cb", nonce=NONCE
    )
    return identity.subject


async def test_keys_are_kept_and_asked_for_again_when_the_provider_has_another() -> None:
    with stand_in() as found:
        clock = ShiftedClock()
        provider = OpenIdProvider(settings(found), clock)
        for _ in range(3):
            assert await redeemed(provider, found) == "u"
        assert found.asked == {"/.well-known/openid-configuration": 1, "/jwks": 1, "/token": 3}

        found.rotate("b")
        with pytest.raises(Unauthenticated, match="publishes no key"):
            await redeemed(provider, found)
        assert found.asked["/jwks"] == 1, "tokens of unknown keys do not make us ask at will"
        clock.later = KEYS_AGAIN_SECONDS + 1
        assert await redeemed(provider, found) == "u"
        assert await redeemed(provider, found) == "u"
        assert found.asked["/jwks"] == 2
        clock.later = 2 * KEPT_SECONDS
        assert await redeemed(provider, found) == "u"
        assert (found.asked["/.well-known/openid-configuration"], found.asked["/jwks"]) == (2, 3)


async def test_a_code_is_redeemed_with_the_verifier_and_the_secret_of_this_server() -> None:
    with stand_in() as found:
        public = OpenIdProvider(settings(found), SystemClock())
        await redeemed(public, found)
        assert (found.forms[-1]["client_id"], found.basic[-1]) == ("fleet", "")
        basic = OpenIdProvider(settings(found, client_secret="s:%"), SystemClock())
        await redeemed(basic, found)
        assert "client_id" not in found.forms[-1]
        assert found.basic[-1] == "Basic ZmxlZXQ6cyUzQSUyNQ==", "fleet and the secret, each form-encoded"
        found.document["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
        posting = OpenIdProvider(settings(found, client_secret="s"), SystemClock())
        await redeemed(posting, found)
        assert (found.forms[-1]["client_secret"], found.basic[-1]) == ("s", "")
        for code, verifier in (("stolen", ""), ("good", "another verifier")):
            with pytest.raises(Unauthenticated, match="refuses its code"):
                await redeemed(public, found, code, verifier)
        asked = found.asked["/token"]
        for code in ("", "x\n", "x" * 5000):
            with pytest.raises(Unauthenticated):
                await redeemed(public, found, code)
        assert found.asked["/token"] == asked


@pytest.mark.parametrize(
    "lie",
    [
        {"issuer": "https://id.example"},
        {"token_endpoint": "http://id.example/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": None},
        {"code_challenge_methods_supported": ["plain"]},
    ],
    ids=lambda lie: next(iter(lie)),
)
async def test_a_document_that_names_another_issuer_or_unsafe_addresses_is_not_believed(
    lie: dict[str, Any],
) -> None:
    with stand_in() as found:
        found.document |= lie
        with pytest.raises(Unavailable, match="cannot be used"):
            await OpenIdProvider(settings(found), SystemClock()).document()


async def test_redirects_endless_answers_and_errors_of_the_provider_are_told_as_such() -> None:
    path = "/.well-known/openid-configuration"
    with stand_in() as found:
        provider = OpenIdProvider(settings(found), SystemClock())
        for status, body in ((302, b""), (500, b""), (200, b"<html>"), (200, b" " * 1_100_000), (200, b"[]")):
            found.answers[path] = (status, body)
            with pytest.raises(Unavailable):
                await provider.document()
        assert found.asked["/elsewhere"] == 0
        found.answers.clear()
        assert (await provider.document()).issuer == found.issuer, "it goes on once the provider is well"
        found.answers["/token"] = (200, b"{}")
        with pytest.raises(Unavailable, match="no ID token"):
            await redeemed(provider, found)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await OpenIdProvider(settings(found), SystemClock()).document()


async def test_a_compressed_answer_is_neither_asked_for_nor_read() -> None:
    with stand_in() as found:
        provider = OpenIdProvider(settings(found), SystemClock())
        bomb = gzip.compress(b" " * 50_000_000, compresslevel=1)
        assert len(bomb) < 1_000_000
        found.answers["/.well-known/openid-configuration"] = (200, bomb)
        for encoding in ("gzip", "identity, gzip", "br"):
            found.encoding = encoding
            with pytest.raises(Unavailable, match="content encoding"):
                await provider.document()
        found.answers.clear()
        found.encoding = "identity"
        assert (await provider.document()).issuer == found.issuer
        assert found.encodings == {"identity"}
