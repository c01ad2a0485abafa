"""What a change was, in words that may be kept for good: fields with their old and new values. Pure.

Keys, passwords and tokens never appear. Only kinds that are listed here are described at all, and
within them whatever is called, or looks, like a secret is masked: it can be seen that it
changed, not what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    API_TOKEN,
    CERTIFICATE,
    DNS_ZONE,
    MEMBERSHIP,
    ORGANIZATION,
    SETTINGS,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
)
from fleetplane.fleet.masking import masked
from fleetplane.kernel.resources import AnyResource

Changes = dict[str, tuple[Any, Any]]
"""From a field to what it was and what it is; null where there was, or is, nothing."""
Difference = tuple[AnyResource | None, AnyResource | None]
"""A resource before and after."""

FIELDS_LIMIT: Final = 100
"""Told of one change: a virtual host has ten. With the limit on values, 800 KB at most."""
VALUE_LIMIT_BYTES: Final = 4096
LEFT_OUT: Final = "..."
DESCRIBED: Final = frozenset(
    kind.name
    for kind in (
        ORGANIZATION,
        WORKSPACE,
        MEMBERSHIP,
        API_TOKEN,
        AGENT,
        VIRTUAL_HOST,
        UPSTREAM,
        ACCESS_LIST,
        DNS_ZONE,
        STREAM,
        CERTIFICATE,
        SETTINGS,
    )
)
_OF_STATUS: Final = {CERTIFICATE.name: ("state", "fingerprint", "names", "expires_at_ns", "error")}
"""Statuses are what agents and issuers report; these fields of them are changed by callers."""


def changes(differences: Iterable[Difference], subject: AnyResource | None) -> Changes:
    """The fields of the subject under their names, those of other resources under their places."""
    found = list(_fields(differences, subject))
    # Masking takes a while: an import changes thousands of fields, of which a hundred are told.
    told: Changes = {
        place + name: (_told(name, old), _told(name, new)) for place, name, old, new in found[:FIELDS_LIMIT]
    }
    if len(found) > FIELDS_LIMIT:
        told[LEFT_OUT] = (None, f"and {len(found) - FIELDS_LIMIT} more fields")
    return told


def _fields(
    differences: Iterable[Difference], subject: AnyResource | None
) -> Iterator[tuple[str, str, Any, Any]]:
    """Each field's place, its name, and its old and new value as they are."""
    for before, after in differences:
        one = after or before
        if one is None or one.kind not in DESCRIBED:
            continue
        place = "" if subject is not None and one.key == subject.key else f"{type_of(one.kind)}.{one.name}."
        old, new = _described(before), _described(after)
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                yield place, name, old.get(name), new.get(name)


def type_of(kind: str) -> str:
    return kind.removeprefix("proxy-").replace("-", "_")


def _described(resource: AnyResource | None) -> Mapping[str, Any]:
    if resource is None:
        return {}
    found: dict[str, Any] = msgspec.to_builtins(resource.spec)
    for name in _OF_STATUS.get(resource.kind, ()):
        if resource.status is not None:
            found[name] = msgspec.to_builtins(getattr(resource.status, name))
    return found


def _told(name: str, value: Any) -> Any:
    shown = masked(value, name)
    size = len(msgspec.json.encode(shown))
    return shown if size <= VALUE_LIMIT_BYTES else f"{size} bytes"
