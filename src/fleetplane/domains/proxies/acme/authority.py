"""The certificate authority, as one order at a time sees it. Blocks: run it in a worker.

Wraps the `acme` library: one conversation is one order, or one question, with its own nonces.
Every call is a few HTTP requests, each bounded; waiting for the authority is the caller's.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import josepy
import requests
from acme import challenges, client, crypto_util, messages
from acme import errors as acme_errors
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from josepy.jwa import ES256
from josepy.jwk import JWKEC

from fleetplane.domains.proxies.acme.orders import (
    AccountUnknown,
    AuthorityOptions,
    ChallengeMethod,
    IssuanceFailed,
    Proof,
)

REQUEST_SECONDS = 15
NONCE_TRIES = 4
"""Each is two of the library's."""
FETCH_SECONDS = 5.0
"""How long one call looks whether a certificate is ready; the library sleeps a second in between."""


_MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What the library raises at JSON of another shape than it expects: it looks at no types."""


@contextmanager
def explained() -> Iterator[None]:
    """Whatever the library raises, as a failure with the authority's own words."""
    try:
        yield
    except messages.Error as error:
        kind = AccountUnknown if error.code == "accountDoesNotExist" else IssuanceFailed
        raise kind(_words(error)) from error
    except acme_errors.ValidationError as error:
        raise IssuanceFailed("; ".join(_refusals(error.failed_authzrs))) from error
    except acme_errors.IssuanceError as error:
        raise IssuanceFailed(_words(error.error)) from error
    except requests.RequestException as error:
        raise IssuanceFailed(f"the authority cannot be reached: {error}") from error
    except (acme_errors.Error, josepy.errors.Error, *_MISREAD) as error:
        raise IssuanceFailed(f"the authority's answer makes no sense: {error!r}") from error


def _words(error: messages.Error) -> str:
    parts = [str(error.typ), error.detail or error.title or ""]
    parts.extend(_words(one) for one in error.subproblems or ())
    return " ".join(part for part in parts if part)


def _refusals(failed: Sequence[messages.AuthorizationResource]) -> Iterator[str]:
    for one in failed:
        for challenge in one.body.challenges:
            if challenge.error is not None:
                yield f"{one.body.identifier.value}: {_words(challenge.error)}"


def _remembered(order: messages.OrderResource) -> list[messages.AuthorizationResource]:
    return [one for one in order.authorizations if one.body.status == messages.STATUS_VALID]


class _Network(client.ClientNetwork):
    """Tries a refused nonce again and again: the library stops after the second, an authority may not."""

    def post(self, *args: Any, **kwargs: Any) -> requests.Response:
        for _ in range(NONCE_TRIES - 1):
            try:
                return super().post(*args, **kwargs)
            except messages.Error as error:
                if error.code != "badNonce":
                    raise
        return super().post(*args, **kwargs)


class AcmeConversation:
    def __init__(self, options: AuthorityOptions, account_key_pem: bytes, account_uri: str = "") -> None:
        self._options = options
        key = serialization.load_pem_private_key(account_key_pem, password=None)
        self._key = JWKEC(key=key)
        self._net = _Network(self._key, alg=ES256, user_agent=options.user_agent, timeout=REQUEST_SECONDS)
        # The library types this as a switch and passes it on to requests, which also takes a file.
        self._net.verify_ssl = cast("bool", options.ca_file or True)
        if account_uri:
            self._net.account = messages.RegistrationResource(uri=account_uri, body=messages.Registration())
        self._client: client.ClientV2 | None = None
        self._order: messages.OrderResource | None = None

    def close(self) -> None:
        self._net.session.close()

    def _opened(self) -> client.ClientV2:
        if self._client is None:
            directory = client.ClientV2.get_directory(self._options.directory_url, self._net)
            self._client = client.ClientV2(directory, self._net)
        return self._client

    def register(self) -> str:
        """Where our account is, which is made if there is none for this key."""
        options = self._options
        if not options.terms_agreed:
            raise IssuanceFailed(
                f"the terms of service are not accepted: {options.directory_url}",
                hint="read them, then set proxies.acme_terms_agreed",
            )
        with explained():
            opened = self._opened()
            about: dict[str, Any] = {"terms_of_service_agreed": True}
            if options.contact_email:
                about["email"] = options.contact_email
            if options.eab_key_id:
                about["external_account_binding"] = messages.ExternalAccountBinding.from_data(
                    account_public_key=self._key.public_key(),
                    kid=options.eab_key_id,
                    hmac_key=options.eab_hmac_key,
                    directory=opened.directory,
                )
            elif opened.external_account_required():
                raise IssuanceFailed("the authority wants an external account binding")
            self._net.account = None
            try:
                uri = opened.new_account(messages.NewRegistration.from_data(**about)).uri
            except acme_errors.ConflictError as known:
                uri = known.location
            self._net.account = messages.RegistrationResource(uri=uri, body=messages.Registration())
            return str(uri)

    # An order.

    def order(self, names: Sequence[str], key_pem: bytes, method: ChallengeMethod) -> list[Proof]:
        """Ask for a certificate; what has to be proved, every name of it.

        An authority may remember what the account has proved before. Through whose agents that was it does
        not remember, so nothing is taken over: such authorisations are given up and asked for anew.
        """
        with explained():
            opened = self._opened()
            request = crypto_util.make_csr(key_pem, list(names))
            self._order = opened.new_order(request)
            if remembered := _remembered(self._order):
                for authorization in remembered:
                    opened.deactivate_authorization(authorization)
                self._order = opened.new_order(request)
            if remembered := _remembered(self._order):
                known = ", ".join(one.body.identifier.value for one in remembered)
                raise IssuanceFailed(
                    f"the authority wants no proof for {known}, so nothing shows whose it is",
                    hint="use an authority that asks for a challenge, or import the certificate",
                )
            return [self._proof(authorization, method) for authorization in self._order.authorizations]

    def _proof(self, authorization: messages.AuthorizationResource, method: ChallengeMethod) -> Proof:
        wanted = challenges.DNS01 if method is ChallengeMethod.DNS else challenges.HTTP01
        domain = authorization.body.identifier.value
        for body in authorization.body.challenges:
            if isinstance(body.chall, wanted):
                return Proof(
                    method=method,
                    domain=domain,
                    token=body.chall.encode("token"),
                    record=f"{challenges.DNS01.LABEL}.{domain}",
                    content=body.chall.validation(self._key),
                    challenge=body,
                )
        raise IssuanceFailed(f"the authority does not offer {method} for {domain}")

    def answer(self, proof: Proof) -> None:
        """Tell the authority that it may look."""
        with explained():
            self._opened().answer_challenge(proof.challenge, proof.challenge.chall.response(self._key))

    def proved(self) -> bool:
        """Whether the authority has seen everything; raises if it has seen something else."""
        assert self._order is not None
        with explained():
            opened = self._opened()
            found = [opened.poll(one)[0] for one in self._order.authorizations]
            failed = [
                one
                for one in found
                if one.body.status not in (messages.STATUS_VALID, messages.STATUS_PENDING)
            ]
            if failed:
                raise acme_errors.ValidationError(failed)
            return all(one.body.status == messages.STATUS_VALID for one in found)

    def finish(self) -> None:
        assert self._order is not None
        with explained():
            try:
                self._opened().begin_finalization(self._order)
            except messages.Error as error:
                if error.code != "orderNotReady":  # else `fetch` asks again
                    raise

    def fetch(self) -> str | None:
        """The certificate and its chain in PEM; None if it is not ready yet."""
        assert self._order is not None
        with explained():
            # The library compares with the machine's local time, without a zone.
            until = dt.datetime.now() + dt.timedelta(seconds=FETCH_SECONDS)  # noqa: DTZ005
            try:
                return str(self._opened().poll_finalization(self._order, until).fullchain_pem)
            except acme_errors.TimeoutError:
                return None

    # Certificates that are out there.

    def revoke(self, chain_pem: str, reason: int) -> None:
        with explained():
            self._opened().revoke(x509.load_pem_x509_certificate(chain_pem.encode()), reason)

    def suggestion(self, chain_pem: str) -> tuple[dt.datetime | None, dt.datetime]:
        """When the authority would like us to renew, if it says so, and when to ask again."""
        with explained():
            suggested, again = self._opened().renewal_time(chain_pem.encode())
            if suggested is not None:
                suggested = suggested.astimezone(dt.UTC)
            return suggested, again.astimezone(dt.UTC)
