"""What the log says: every change of the store, in words that a follower can apply.

Changes of resources have revisions of their own. A claim that is taken or released, a secret that is put
or deleted (its name and version, never its content) and a horizon that moves have the revision that the
store stands at with their transaction; they belong to no kind, so that no watch comes across them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from fleetplane.kernel.store.engine import Claim, LogRow


class LogType(StrEnum):
    """Besides the types of events, which are those of `watch.EventType`."""

    CLAIMED = "CLAIMED"
    RELEASED = "RELEASED"
    SECRET = "SECRET"  # noqa: S105  # that one was put
    DROPPED = "DROPPED"
    """A secret."""
    HORIZON = "HORIZON"


class Claimed(msgspec.Struct, frozen=True, array_like=True):
    """That a value has an owner, or (released) that it had."""

    kind: str
    scope: str
    field: str
    value: str
    owner: str = ""

    @property
    def claim(self) -> Claim:
        return Claim(self.kind, self.scope, self.field, self.value)


class SecretChanged(msgspec.Struct, frozen=True, array_like=True):
    name: str
    version: int
    """The audit entry of the change."""


class HorizonMoved(msgspec.Struct, frozen=True, array_like=True):
    compacted: int


_encode = msgspec.msgpack.Encoder().encode


def _row(revision: int, sort: LogType, body: msgspec.Struct) -> LogRow:
    return LogRow(revision, 0, sort.value, "", "", _encode(body))


def of_claims(claims: Mapping[Claim, str | None], revision: int) -> list[LogRow]:
    return [
        _row(revision, LogType.RELEASED, Claimed(*claim))
        if owner is None
        else _row(revision, LogType.CLAIMED, Claimed(*claim, owner))
        for claim, owner in claims.items()
    ]


def of_secrets(secrets: Mapping[str, bytes | None], revision: int, version: int) -> list[LogRow]:
    return [
        _row(revision, LogType.DROPPED if blob is None else LogType.SECRET, SecretChanged(name, version))
        for name, blob in secrets.items()
    ]


def of_horizon(compacted: int, revision: int) -> LogRow:
    return _row(revision, LogType.HORIZON, HorizonMoved(compacted))


Entry = Claimed | SecretChanged | HorizonMoved
_BODIES: Mapping[str, type[Entry]] = {
    LogType.CLAIMED: Claimed,
    LogType.RELEASED: Claimed,
    LogType.SECRET: SecretChanged,
    LogType.DROPPED: SecretChanged,
    LogType.HORIZON: HorizonMoved,
}


def read(row: LogRow) -> Entry | None:
    """What a row says that is no change of a resource; None for one that is."""
    kind = _BODIES.get(row.type)
    return None if kind is None else msgspec.msgpack.decode(row.body, type=kind)
