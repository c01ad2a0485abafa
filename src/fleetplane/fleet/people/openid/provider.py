"""The OpenID provider: its document, its keys, and codes traded for ID tokens.

What it publishes is kept for an hour, and its keys are asked for again when a token names one that is not
known, at most every half minute. Addresses that it names are believed only if they are of https, or on this
machine where the issuer is. Redirects are not followed, answers have a size limit and are not
compressed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from fleetplane.fleet.people.openid import id_tokens
from fleetplane.fleet.people.openid.id_tokens import Expected, SigningKey, UnknownKey, VouchedPerson
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, SettingsError, Unauthenticated, Unavailable
from fleetplane.kernel.http_answers import IDENTITY, bounded_body
from fleetplane.sections.openid import OpenIDSettings, check_url

CALL_SECONDS = 10.0
ANSWER_LIMIT_BYTES = 1024 * 1024
KEPT_SECONDS = 3600.0
KEYS_AGAIN_SECONDS = 30.0
"""Whoever shows tokens of unknown keys makes us ask the provider no more often."""
WELL_KNOWN = "/.well-known/openid-configuration"
CODE_LIMIT = 4096


class ProviderDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of what a provider publishes; see OpenID Connect Discovery."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    code_challenge_methods_supported: tuple[str, ...] = ("S256",)


class OpenIdProvider:
    """See the module's description. Nothing is asked before somebody signs in."""

    def __init__(self, settings: OpenIDSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._asking = asyncio.Lock()  # guards: one question about document or keys at a time
        self._document: tuple[float, ProviderDocument] | None = None
        self._keys: tuple[float, Sequence[SigningKey]] | None = None
        self._trust = _trust(settings.ca_file)

    def __repr__(self) -> str:
        return f"<Provider {self._settings.issuer}>"

    async def document(self) -> ProviderDocument:
        """What the provider publishes about itself; raises `Unavailable`."""
        async with self._asking:
            if self._document is None or self._age(self._document[0]) > KEPT_SECONDS:
                found = await self._ask("GET", self._settings.issuer.rstrip("/") + WELL_KNOWN)
                self._document = (self._now(), self._checked(found))
            return self._document[1]

    async def identity(self, code: str, *, verifier: str, redirect_uri: str, nonce: str) -> VouchedPerson:
        """Whom a code of the provider stands for; raises `Unauthenticated` or `Unavailable`."""
        if not 0 < len(code) <= CODE_LIMIT or not code.isprintable():
            raise Unauthenticated("the provider's code cannot be read", details={"cause": "code"})
        document = await self.document()
        token = await self._redeemed(document, code, verifier=verifier, redirect_uri=redirect_uri)
        keys = await self._known_keys(document)
        try:
            return id_tokens.verified(token, keys, self._expected(nonce))
        except UnknownKey:
            pass
        keys = await self._known_keys(document, at_most_seconds=KEYS_AGAIN_SECONDS)
        try:
            return id_tokens.verified(token, keys, self._expected(nonce))
        except UnknownKey as error:
            raise Unauthenticated(
                "the provider's ID token is refused: the provider publishes no key that fits it",
                details={"cause": "unknown key"},
            ) from error

    def _expected(self, nonce: str) -> Expected:
        return Expected(
            issuer=self._settings.issuer,
            client_id=self._settings.client_id,
            nonce=nonce,
            groups_claim=self._settings.groups_claim,
            now=self._clock.now_ns() / 1e9,
        )

    def _checked(self, found: Any) -> ProviderDocument:
        try:
            document = msgspec.convert(found, ProviderDocument)
        except msgspec.ValidationError as error:
            raise _unusable(f"its document is not complete: {error}") from error
        if document.issuer != self._settings.issuer:
            raise _unusable(f"it calls itself {document.issuer[:200]!r}, and not {self._settings.issuer!r}")
        if "S256" not in document.code_challenge_methods_supported:
            raise _unusable("it does not know PKCE with S256")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            url = getattr(document, name)
            try:
                parts = check_url(name, url.partition("?")[0])
            except SettingsError as error:
                raise _unusable(str(error)) from error
            if parts.scheme == "http" and not self._settings.issuer.startswith("http:"):
                raise _unusable(f"its {name} is not of https")
        return document

    async def _known_keys(
        self, document: ProviderDocument, *, at_most_seconds: float = KEPT_SECONDS
    ) -> Sequence[SigningKey]:
        async with self._asking:
            if self._keys is None or self._age(self._keys[0]) > at_most_seconds:
                self._keys = (self._now(), id_tokens.signing_keys(await self._ask("GET", document.jwks_uri)))
            return self._keys[1]

    async def _redeemed(
        self, document: ProviderDocument, code: str, *, verifier: str, redirect_uri: str
    ) -> str:
        client, secret = self._settings.client_id, await asyncio.to_thread(self._secret)
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        basic: tuple[str, str] | None = None
        if secret and "client_secret_basic" in document.token_endpoint_auth_methods_supported:
            basic = (quote(client, safe=""), quote(secret, safe=""))  # RFC 6749, 2.3.1
        else:
            form["client_id"] = client
            form |= {"client_secret": secret} if secret else {}
        found = await self._ask("POST", document.token_endpoint, form=form, basic=basic)
        token = found.get("id_token") if isinstance(found, Mapping) else None
        if not isinstance(token, str):
            raise _unusable("its answer has no ID token")
        return token

    def _secret(self) -> str:
        settings = self._settings
        if not settings.client_secret_file:
            return settings.client_secret
        try:
            return Path(settings.client_secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(
                "the client secret cannot be read", hint="see oidc.client_secret_file"
            ) from error

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        form: Mapping[str, str] | None = None,
        basic: tuple[str, str] | None = None,
    ) -> Any:
        import httpx

        try:
            async with (
                httpx.AsyncClient(
                    verify=self._trust, timeout=CALL_SECONDS, follow_redirects=False, trust_env=False
                ) as client,
                client.stream(
                    method, url, data=form, auth=basic, headers={"accept": "application/json", **IDENTITY}
                ) as answer,
            ):
                body = await bounded_body(answer, limit_bytes=ANSWER_LIMIT_BYTES)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise Unavailable(
                f"the identity provider cannot be reached: {type(error).__name__}", hint="try again later"
            ) from error
        except ValueError as error:
            raise _unusable(f"what {url} answers {error}") from error
        if answer.status_code == 400 and form is not None:
            raise Unauthenticated(
                "the provider refuses its code: it was used before, has expired or is not for this server",
                hint="sign in again",
                details={"cause": "code"},
            )
        if answer.status_code != 200:
            raise _unusable(f"{url} answers {answer.status_code}")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise _unusable(f"what {url} answers is not JSON") from error

    def _now(self) -> float:
        return self._clock.monotonic()

    def _age(self, since: float) -> float:
        return self._clock.monotonic() - since


def _trust(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"oidc.ca_file: {ca_file} cannot be read: {error}") from error


def _unusable(why: str) -> Unavailable:
    return Unavailable(f"the identity provider cannot be used: {why}", hint="its settings or ours are wrong")
