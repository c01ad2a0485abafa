"""Cookies of this very host, read only where there is no doubt which one is meant. Pure.

Whoever holds a neighbouring name of the same domain may set cookies for ours, and a browser sends them
along as if they were. Over TLS ours have a prefix that browsers accept from this host alone (`__Host-`), and
what has not is not read: nobody can slip a browser a session of their own.
"""

from __future__ import annotations

from typing import Literal

PREFIX = "__Host-"


def read(cookies: str | None, name: str, *, secure: bool, limit: int) -> str | None:
    """A value in a `Cookie` header; None if there is none, or more than one that could be meant.

    Behind somebody who ends TLS for us, a request is not secure and the cookie may be.
    """
    told = [(one.strip(), value.strip()) for one, _, value in map(_parted, (cookies or "").split(";"))]
    for wanted in (PREFIX + name,) if secure else (PREFIX + name, name):
        found = [value for one, value in told if one == wanted]
        if found:
            return found[0] if len(found) == 1 and 0 < len(found[0]) <= limit else None
    return None


def _parted(cookie: str) -> tuple[str, str, str]:
    return cookie.partition("=")


def written(name: str, value: str, *, seconds: int, same_site: Literal["Strict", "Lax"], secure: bool) -> str:
    """The `Set-Cookie` header that no script can read; an empty value forgets the cookie."""
    life = seconds if value else 0
    spelled = (
        f"{PREFIX if secure else ''}{name}={value}; Max-Age={life}; HttpOnly; SameSite={same_site}; Path=/"
    )
    return f"{spelled}; Secure" if secure else spelled
