"""Console sessions on the wire: a cookie that no script can read, and a token against cross-site requests.

A browser sends the cookie by itself, also when a page of somebody else makes it send a request. So whatever
changes something must show the session's CSRF token in a header as well, which only our own pages can know:
it is made from the cookie, and nothing has to be kept for it. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from fleetplane.kernel.errors import PermissionDenied, Unauthenticated
from fleetplane.web.rest import cookies

COOKIE = "fleetplane_session"
CSRF_HEADER = "x-csrf-token"
SCHEME = "Session"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
SESSION_SECONDS = 12 * 3600
"""A working day."""
COOKIE_LIMIT = 3800
"""A sealed token of 2.5 KB, the largest that a family signs; browsers keep up to 4 KB with the name."""


def csrf_of(session: str) -> str:
    """The token that a request of this session must show to change something."""
    return hashlib.sha256(f"csrf\n{session}".encode()).hexdigest()[:32]


def credential(
    authorization: str | None, kept: str | None, csrf: str | None, *, method: str, secure: bool
) -> str | None:
    """What a caller shows of itself: the `Authorization` header, or else a session among the kept cookies.

    Raises `Unauthenticated` for a session that would change something without its CSRF token.
    """
    if authorization is not None:
        if authorization.strip().lower().startswith(f"{SCHEME.lower()} "):
            raise Unauthenticated("a console session is shown as a cookie", details={"cause": "form"})
        return authorization
    session = cookies.read(kept, COOKIE, secure=secure, limit=COOKIE_LIMIT)
    if session is None:
        return None
    if method not in SAFE and not hmac.compare_digest((csrf or "").encode(), csrf_of(session).encode()):
        raise Unauthenticated(
            f"a console session needs its CSRF token in the header {CSRF_HEADER} to change something",
            hint="GET /apis/v1/people/console tells it",
            details={"cause": "csrf"},
        )
    return f"{SCHEME} {session}"


def check_same_origin(header: Callable[[str], str | None]) -> None:
    """Refuse to begin a session for a page of somebody else: the browser would work in their account.

    Browsers say where a request comes from, and no page can make them lie; programs say nothing. Older ones
    tell the origin alone, which is compared with the host that they asked for. `header` gives a header of the
    request by its name.
    """
    site, origin, own = header("sec-fetch-site"), header("origin"), header("host")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and own is not None and _host_in(origin) != own.lower()
    if foreign:
        raise PermissionDenied(
            "a session is begun by this server's own page only", details={"cause": "another origin"}
        )


def _host_in(origin: str) -> str:
    return origin.lower().partition("://")[2]


def set_cookie(session: str, *, secure: bool) -> str:
    """The `Set-Cookie` header that keeps a session; an empty one ends it."""
    return cookies.written(COOKIE, session, seconds=SESSION_SECONDS, same_site="Strict", secure=secure)
