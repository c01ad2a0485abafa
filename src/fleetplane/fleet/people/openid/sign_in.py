"""One sign-in by authorisation code with PKCE: what the browser is sent to the provider with. Pure.

Everything that the way back is checked against (state, nonce, the PKCE verifier) is in a cookie of that
browser alone, sealed, so that any server of an installation can finish what another began, and a page of
somebody else cannot finish its own sign-in in this browser.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from urllib.parse import urlencode, urlsplit

import msgspec

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError, InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.web.rest import cookies

COOKIE = "fleetplane_oidc"
LIFE_SECONDS = 600
"""As long as somebody may take to sign in at the provider."""
CONSOLE = "/ui/"
RANDOM_BYTES = 32
COOKIE_LIMIT = 2048
_PURPOSE = "people/oidc-sign-in"
_NEXT = re.compile(r"/ui/[A-Za-z0-9._~!$&'()*+,;=:@%/?#-]{0,512}")
"""Places of the console: paths of ours, below /ui/. No address of another server can be spelt so."""


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A sign-in that was begun."""

    state: str
    nonce: str
    verifier: str
    following: str
    """Where in the console the browser goes then."""
    ends_at_ns: int


def begun(following: str, clock: Clock) -> Pending:
    """A new sign-in, after which the browser goes to a place of the console; raises `InvalidArgument`."""
    if following and not _NEXT.fullmatch(following):
        raise InvalidArgument(
            "is no place of this console", field="next", hint="give a path that begins with /ui/"
        )
    state, nonce, verifier = (_text(clock.token_bytes(RANDOM_BYTES)) for _ in range(3))
    return Pending(
        state=state,
        nonce=nonce,
        verifier=verifier,
        following=following or CONSOLE,
        ends_at_ns=clock.now_ns() + LIFE_SECONDS * 10**9,
    )


def challenge_of(verifier: str) -> str:
    """RFC 7636, S256."""
    return _text(hashlib.sha256(verifier.encode()).digest())


def authorisation_url(
    endpoint: str, pending: Pending, *, client_id: str, redirect_uri: str, scopes: tuple[str, ...]
) -> str:
    """Where the browser is sent."""
    asked = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": redirect_uri,
        "scope": " ".join(scopes),
        "state": pending.state,
        "nonce": pending.nonce,
        "code_challenge": challenge_of(pending.verifier),
        "code_challenge_method": "S256",
    }
    return f"{endpoint}{'&' if urlsplit(endpoint).query else '?'}{urlencode(asked)}"


def sealed(pending: Pending, master: MasterKey) -> str:
    """A sign-in as its cookie's value."""
    return _text(master.seal(msgspec.msgpack.encode(pending), purpose=_PURPOSE))


def opened(kept: str | None, state: str, master: MasterKey, *, now_ns: int, secure: bool) -> Pending:
    """The sign-in that a browser began with this state, from its cookies; raises `Unauthenticated`."""
    value = cookies.read(kept, COOKIE, secure=secure, limit=COOKIE_LIMIT)
    if not value:
        raise _foreign("this browser began no sign-in, or took too long")
    try:
        raw = base64.urlsafe_b64decode(value.encode("ascii") + b"=" * (-len(value) % 4))
        pending = msgspec.msgpack.decode(master.open(raw, purpose=_PURPOSE), type=Pending)
    except (ValueError, binascii.Error, IntegrityError, msgspec.MsgspecError) as error:
        raise _foreign("the sign-in that this browser began is not one of ours") from error
    if not hmac.compare_digest(pending.state.encode(), state.encode("utf-8", "replace")):
        raise _foreign("this browser began another sign-in")
    if pending.ends_at_ns <= now_ns:
        raise _foreign("the sign-in took too long")
    return pending


def cookie(value: str, *, secure: bool) -> str:
    """The `Set-Cookie` header; an empty value forgets it. Lax: the way back comes from another site."""
    return cookies.written(COOKIE, value, seconds=LIFE_SECONDS, same_site="Lax", secure=secure)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _foreign(why: str) -> Unauthenticated:
    return Unauthenticated(why, hint="sign in again, in one window", details={"cause": "state"})
