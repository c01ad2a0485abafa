"""The method table: listener, authentication, permission, rate and role of the server for every method.

A method that is served without a row, or a row without a method, stops the server before it opens a port.
Admission decides whether there is room for one more call, by rate and concurrency per method, on a clock
that is handed in. Knows no transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from google.protobuf.descriptor import ServiceDescriptor

from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc.serving.guard import CALLERS_TRACKED


class Authentication(StrEnum):
    """What a caller must show before a method looks at its request."""

    ANONYMOUS = "anonymous"
    LOCAL = "local"
    SOCKET = "socket"
    """Local, and past the mode of a Unix socket: every user of the machine reaches a port on loopback."""
    CERTIFICATE = "certificate"
    TOKEN = "token"  # noqa: S105  # the name of a kind, not a secret


class Needs(StrEnum):
    """What a server must have, of several on one database, in order to answer a call."""

    ACTIVE = "active"
    """The seat of the active server: the call depends on what that one alone has or does."""
    STORE = "store"
    """An up-to-date copy of the store: the call only reads it."""
    WRITES = "writes"
    """The same, and a seat among those who write: what the call decides, it decides inside transactions."""
    NOTHING = "nothing"
    """Nothing: the call is about the process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A token bucket: `burst` at once, then `per_second` of them."""

    per_second: float
    burst: int
    per: Literal["caller", "method"] = "caller"

    def __post_init__(self) -> None:
        if self.per_second <= 0 or self.burst < 1:
            raise SettingsError("a rate needs per_second above 0 and a burst of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    path: str
    """As on the wire: `/package.Service/Method`."""
    listener: str
    authentication: Authentication
    permission: Permission | None
    """What the caller's roles must grant; None only where anyone who got this far may call."""
    rate: Rate | None = None
    concurrency: int | None = None
    """Calls of this method running at once."""
    max_request_bytes: int | None = None
    """Overrides the listener's limit for one message."""
    cut_oversized: bool = False
    """A streaming request's message over that limit is given as a `CutMessage`, and not refused."""
    endless: bool = False
    """A stream without an end of its own: ended as soon as the server stops, not awaited."""
    needs: Needs = Needs.ACTIVE

    def __post_init__(self) -> None:
        service, slash, method = self.path.removeprefix("/").partition("/")
        if not (self.path.startswith("/") and service and slash and method and "/" not in method):
            raise SettingsError(f"{self.path!r} is not a method path such as /package.Service/Method")
        if self.concurrency is not None and self.concurrency < 1:
            raise SettingsError(f"{self.path} needs a concurrency of at least 1")


def service_rows(
    service: ServiceDescriptor,
    permission: Permission | Mapping[str, Permission] | None,
    *,
    listener: str,
    authentication: Authentication,
    rate: Rate | None = None,
    endless: Collection[str] = (),
    endless_concurrency: int | None = None,
    reads: Collection[str] = (),
    needs: Needs = Needs.ACTIVE,
) -> Iterator[MethodRow]:
    """The rows of a whole service: one permission for all of its methods, or one for each by name.

    `reads` names the methods that only read the store; `needs` is for all others.
    """
    if unknown := sorted(set(reads) - {method.name for method in service.methods}):
        raise SettingsError(f"{service.full_name} has no method {', '.join(unknown)}")
    needed = (
        permission
        if isinstance(permission, Mapping)
        else {method.name: permission for method in service.methods}
    )
    for method, one in needed.items():
        yield MethodRow(
            path=f"/{service.full_name}/{method}",
            listener=listener,
            authentication=authentication,
            permission=one,
            rate=rate,
            concurrency=endless_concurrency if method in endless else None,
            endless=method in endless,
            needs=Needs.STORE if method in reads else needs,
        )


class MethodTable:
    """All rows of all listeners."""

    def __init__(self, rows: Iterable[MethodRow]) -> None:
        self._rows: dict[tuple[str, str], MethodRow] = {}
        for row in rows:
            key = (row.listener, row.path)
            if key in self._rows:
                raise SettingsError(f"two rows for {row.path} on listener {row.listener}")
            self._rows[key] = row

    def __iter__(self) -> Iterator[MethodRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, listener: str, path: str) -> MethodRow | None:
        return self._rows.get((listener, path))

    def on(self, listener: str) -> tuple[MethodRow, ...]:
        return tuple(row for row in self._rows.values() if row.listener == listener)

    def require_complete(self, served: Mapping[str, Iterable[str]]) -> None:
        """Compare the table with the methods served per listener; name every disagreement at once."""
        methods = {(listener, path) for listener, paths in served.items() for path in paths}
        complaints = [
            f"method {path} on listener {listener} has no row"
            for listener, path in sorted(methods - self._rows.keys())
        ]
        complaints += [
            f"row {path} on listener {listener} has no method"
            for listener, path in sorted(self._rows.keys() - methods)
        ]
        if complaints:
            raise SettingsError(
                "the method table is incomplete: " + "; ".join(complaints),
                hint="give every served method exactly one row",
            )

    def __repr__(self) -> str:
        return f"<MethodTable rows={len(self._rows)}>"


@dataclass(slots=True)
class TokenBucket:
    """Tokens that refill with time."""

    tokens: float
    filled_at: float

    def take(self, rate: Rate, now: float) -> float:
        """0.0 when a token was there; otherwise the seconds until there is one."""
        self.tokens = min(float(rate.burst), self.tokens + (now - self.filled_at) * rate.per_second)
        self.filled_at = now
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / rate.per_second


class RateLimiter:
    """One rate over a bounded number of callers.

    When more callers than that come along, the one not heard of for longest is forgotten and
    starts again with a full bucket; `forgotten` counts how often that happened.
    """

    def __init__(self, rate: Rate, *, callers_tracked: int = CALLERS_TRACKED) -> None:
        self._rate = rate
        self._callers_tracked = callers_tracked
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self.forgotten = 0

    def take(self, caller: str, now: float) -> float:
        """0.0 to go ahead, otherwise the seconds to wait."""
        key = caller if self._rate.per == "caller" else ""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(tokens=float(self._rate.burst), filled_at=now)
            if len(self._buckets) > self._callers_tracked:
                self._buckets.popitem(last=False)
                self.forgotten += 1
        else:
            self._buckets.move_to_end(key)
        return bucket.take(self._rate, now)

    def __repr__(self) -> str:
        rate = self._rate
        callers = len(self._buckets)
        return f"<RateLimiter {rate.per_second:g}/s burst={rate.burst} per={rate.per} callers={callers}>"
