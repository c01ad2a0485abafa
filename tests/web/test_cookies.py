from __future__ import annotations

import pytest

from fleetplane.kernel.errors import Unauthenticated
from fleetplane.web.rest import console, cookies
from fleetplane.web.rest.routes import Headers

OURS = "__Host-fleetplane_session=ours"
TOSSED = "fleetplane_session=tossed"
"""As a neighbouring host of the domain can set it; with the prefix it cannot."""


def shown(cookie: str, *, secure: bool, method: str = "GET", csrf_of: str = "") -> str | None:
    raw = {b"cookie": cookie.encode()}
    if csrf_of:
        raw[b"x-csrf-token"] = console.csrf_of(csrf_of).encode()
    return Headers(raw, method=method, secure=secure).credential


@pytest.mark.parametrize("cookie", [OURS, f"{TOSSED}; {OURS}", f"{OURS}; {TOSSED}", f"a=b;{OURS};c"])
@pytest.mark.parametrize("secure", [True, False])
def test_our_own_cookie_is_read_whatever_a_neighbour_has_set(cookie: str, secure: bool) -> None:
    assert shown(cookie, secure=secure) == "Session ours"


def test_over_tls_nobody_slips_a_browser_a_session_of_their_own() -> None:
    assert shown(TOSSED, secure=True) is None
    assert shown(TOSSED, secure=False) == "Session tossed"


@pytest.mark.parametrize(
    "cookie",
    ["", "__Host-fleetplane_session=", f"{OURS}; {OURS}", f"__host-fleetplane_session=x; {OURS.lower()}"],
)
def test_no_cookie_and_more_than_one_are_none(cookie: str) -> None:
    assert shown(cookie, secure=True) is None


def test_a_cookie_that_is_too_long_is_none() -> None:
    longest = "x" * console.COOKIE_LIMIT
    assert shown(f"__Host-fleetplane_session={longest}", secure=True) == f"Session {longest}"
    assert shown(f"__Host-fleetplane_session={longest}x", secure=True) is None


def test_the_csrf_token_is_that_of_the_session_that_is_read() -> None:
    both = f"{TOSSED}; {OURS}"
    assert shown(both, secure=True, method="POST", csrf_of="ours") == "Session ours"
    with pytest.raises(Unauthenticated):
        shown(both, secure=True, method="POST", csrf_of="tossed")


def test_over_tls_a_cookie_is_bound_to_the_host() -> None:
    assert console.set_cookie("s", secure=True) == (
        "__Host-fleetplane_session=s; Max-Age=43200; HttpOnly; SameSite=Strict; Path=/; Secure"
    )
    assert console.set_cookie("", secure=False) == (
        "fleetplane_session=; Max-Age=0; HttpOnly; SameSite=Strict; Path=/"
    )
    lax = cookies.written("one", "v", seconds=5, same_site="Lax", secure=True)
    assert lax == "__Host-one=v; Max-Age=5; HttpOnly; SameSite=Lax; Path=/; Secure"
