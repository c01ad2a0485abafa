"""Scopes as the API spells them: one tree of paths, from the installation down. Pure.

    /                               the installation
    /tenants/acme                   a tenant
    /tenants/acme/groups/web        a place in it: workspaces, groups, clusters

Tokens and freezes are stored with the same path in another spelling, `tenant/acme/group/web`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fleetplane.kernel.errors import InvalidArgument

ROOT = "/"
DEFAULT_TENANT = "default"
TENANTS = "tenants"
PLACES = ("clusters", "groups", "workspaces")
"""What a tenant is divided into."""
SCOPE_LIMIT = 600
"""Characters: two names of the longest, and the words between them."""
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f]{1,253}")
_SINGULAR = {"tenants": "tenant", "clusters": "cluster", "groups": "group", "workspaces": "workspace"}
_PLURAL = {one: many for many, one in _SINGULAR.items()}


def tenant_path(tenant: str) -> str:
    """The scope of a tenant."""
    return f"/{TENANTS}/{tenant}"


def below(scope: str, place: str, name: str) -> str:
    """A place in a tenant, such as its group `web`."""
    return f"{scope}/{place}/{name}"


def covers(scope: str, other: str) -> bool:
    """Whether `other` is `scope` or lies below it."""
    return scope in (ROOT, other) or other.startswith(scope + "/")


def covered(scopes: Iterable[str], other: str) -> bool:
    """Whether one of the scopes covers `other`."""
    return any(covers(scope, other) for scope in scopes)


def touches(scope: str, other: str) -> bool:
    """Whether one of the two covers the other."""
    return covers(scope, other) or covers(other, scope)


def parsed(text: str, *, field: str = "scope") -> str:
    """A scope of a request; raises `InvalidArgument`."""
    if text in ("", ROOT):
        return ROOT
    if len(text) <= SCOPE_LIMIT and _is_scope(text.split("/")):
        return text
    raise InvalidArgument(
        f"{text[:80]!r} is no scope",
        field=field,
        hint="write / or /tenants/NAME or /tenants/NAME/groups/NAME",
    )


def _is_scope(parts: list[str]) -> bool:
    if len(parts) not in (3, 5) or parts[0] or parts[1] != TENANTS or not _NAME.fullmatch(parts[2]):
        return False
    return len(parts) == 3 or (parts[3] in PLACES and _NAME.fullmatch(parts[4]) is not None)


def of_stored(scope: str) -> str:
    """From the stored spelling, such as `tenant/acme` of a token."""
    parts = scope.split("/") if scope else []
    return (
        "".join(
            f"/{_PLURAL.get(part, part) if number % 2 == 0 else part}" for number, part in enumerate(parts)
        )
        or ROOT
    )


def to_stored(scope: str) -> str:
    """The inverse of `of_stored`."""
    parts = scope.split("/")[1:] if scope != ROOT else []
    return "/".join(
        _SINGULAR.get(part, part) if number % 2 == 0 else part for number, part in enumerate(parts)
    )
