"""Throttling of logins: failed attempts are counted by address and account together.

An address that guesses has to wait; the owner of the account, who logs in from another address, does
not. The limit for an account as a whole is reached only by many addresses, and then slows only addresses
that never logged in to it. An address from which an account was logged in to is known for 90 days: from
there the right password is accepted, whatever happens elsewhere. Each server counts what comes to it; where
several share a database, failures count together besides (`shared_failures.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.fleet.people.attempts.shared_failures import SharedFailures
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.passwords import LoginFailures
from fleetplane.kernel.networks import network_of
from fleetplane.kernel.store import Store
from fleetplane.web.rest.gateway import RestRate

log = structlog.get_logger(__name__)

FAILURES_EVERYWHERE = 100
"""Of one account in a quarter of an hour, from addresses that are not known: ten strangers that gave up."""
KNOWN_PER_MINUTE = 10
"""Attempts from a known address, which nothing else slows: a person does not type faster."""
KNOWN_DAYS = 90
KNOWN_LIMIT = 16
"""Addresses of one account; the one used longest ago is forgotten first."""
REFRESH_SECONDS = 86_400
"""An address is written down again when that is this old, not with each login."""
ACTOR = "system/logins"
NOBODY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleLimits:
    """How many attempts the accounts of one domain allow."""

    per_address: int
    """Attempts a minute from one address, for all accounts."""
    failures: int
    """Wrong passwords for one account from one address, after which that pair waits a quarter of an hour."""
    failures_everywhere: int = FAILURES_EVERYWHERE
    """Wrong passwords for one account from all addresses that are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginAttempt:
    """A login attempt whose password may be checked."""

    account: str
    network: str
    known: bool


class Guesses:
    """Counts attempts in memory and says how long the next one has to wait. No store, no clock."""

    def __init__(self, limits: ThrottleLimits) -> None:
        self._by_address = RestRate(limits.per_address)
        self._by_known = RestRate(KNOWN_PER_MINUTE)
        self._pairs = LoginFailures(limit=limits.failures)
        self._accounts = LoginFailures(limit=limits.failures_everywhere)

    def wait_seconds(self, attempt: LoginAttempt, *, now: float) -> float:
        """How long the attempt has to wait; at 0 it goes on, and counts as failed until it succeeds."""
        pair = _pair(attempt)
        if attempt.known:
            allowance = self._by_known.take(pair, now=now)
            return 0.0 if allowance.allowed else allowance.reset_seconds
        wait = max(
            self._pairs.pause_seconds(pair, now=now), self._accounts.pause_seconds(attempt.account, now=now)
        )
        allowance = self._by_address.take(attempt.network, now=now)
        if not allowance.allowed:
            wait = max(wait, allowance.reset_seconds)
        if not wait:
            self._pairs.failed(pair, now=now)
            self._accounts.failed(attempt.account, now=now)
        return wait

    def pause_seconds(self, attempt: LoginAttempt, *, now: float) -> float:
        """How long the next attempt for this account from this address has to wait."""
        return 0.0 if attempt.known else self._pairs.pause_seconds(_pair(attempt), now=now)

    def withdrawn(self, attempt: LoginAttempt) -> None:
        if not attempt.known:
            self._pairs.take_back(_pair(attempt))
            self._accounts.take_back(attempt.account)

    def succeeded(self, attempt: LoginAttempt) -> None:
        if not attempt.known:
            self._pairs.succeeded(_pair(attempt))
            self._accounts.take_back(attempt.account)

    def pardon(self, account: str) -> None:
        """Forget the failures of an account whose password was replaced."""
        self._accounts.succeeded(account)
        self._pairs.pardon(f"{account}\0")


def _pair(attempt: LoginAttempt) -> str:
    return f"{attempt.account}\0{attempt.network}"


def _refuse(wait_seconds: float) -> None:
    if wait_seconds:
        raise ResourceExhausted(
            "too many attempts to log in", retry_after_seconds=wait_seconds, details={"cause": "locked"}
        )


def _account(user: str) -> str:
    return f"user/{user}"


class LoginThrottle:
    """Throttles logins to the accounts of one domain; their known addresses are sealed in the store."""

    def __init__(
        self, store: Store, master: MasterKey, clock: Clock, *, namespace: str, limits: ThrottleLimits
    ) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._namespace = namespace
        self._guesses = Guesses(limits)
        self._shared = (
            SharedFailures(
                store,
                namespace=namespace,
                failures=limits.failures,
                everywhere=limits.failures_everywhere,
            )
            if store.shared
            else None
        )

    def __repr__(self) -> str:
        return f"<LoginThrottle {self._namespace}>"

    async def begin(self, login: str, address: str, *, user: str | None) -> LoginAttempt:
        """Count an attempt before its password is checked; `user` is the account of this login name."""
        network = network_of(address)
        known = await self._known(user or NOBODY)
        account = _account(user) if user is not None else f"login/{login}"
        attempt = LoginAttempt(account=account, network=network, known=network in known)
        _refuse(self._guesses.wait_seconds(attempt, now=self._clock.now_ns() / 1e9))
        return attempt

    async def count(self, attempt: LoginAttempt) -> None:
        """Count it at the other servers, too, which is a write: after it was admitted to be hashed."""
        if not attempt.known and self._shared is not None:
            _refuse(await self._shared.begin(attempt.account, attempt.network))

    def withdrawn(self, attempt: LoginAttempt) -> None:
        """The attempt was refused before its password was checked: it was no guess."""
        self._guesses.withdrawn(attempt)

    def failed(self, attempt: LoginAttempt, login: str) -> None:
        """Log that the account pauses, if this wrong password was one too many."""
        pause = self._guesses.pause_seconds(attempt, now=self._clock.now_ns() / 1e9)
        if pause:
            log.warning("login.paused", account=login, address=attempt.network, seconds=round(pause))

    async def succeeded(self, attempt: LoginAttempt, user: str) -> None:
        """Take the attempt off the failures, and remember the address as known."""
        self._guesses.succeeded(attempt)
        if not attempt.known and self._shared is not None:
            await self._shared.succeeded(attempt.account, attempt.network)
        now = self._clock.now_ns() // 1_000_000_000
        known = await self._known(user)
        if now - known.get(attempt.network, 0) < REFRESH_SECONDS:
            return
        newest = sorted({**known, attempt.network: now}.items(), key=lambda item: item[1])[-KNOWN_LIMIT:]
        name = self._secret(user)
        sealed = self._master.seal(msgspec.msgpack.encode(dict(newest)), purpose=name)
        await self._store.put_secret(name, sealed, actor=ACTOR)

    async def pardon(self, user: str) -> None:
        """Forget the failures of a user whose password was replaced."""
        self._guesses.pardon(_account(user))
        if self._shared is not None:
            await self._shared.pardon(_account(user))

    async def forget(self, user: str) -> None:
        """Delete the known addresses of a user that was deleted."""
        name = self._secret(user)
        if await self._store.get_secret(name) is not None:
            await self._store.delete_secret(name, actor=ACTOR)

    async def _known(self, user: str) -> dict[str, int]:
        """The known addresses of a user, each with the second it was last used."""
        name = self._secret(user)
        sealed = await self._store.get_secret(name)
        if sealed is None:
            return {}
        found = msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=dict[str, int])
        oldest = self._clock.now_ns() // 1_000_000_000 - KNOWN_DAYS * 86_400
        return {network: at for network, at in found.items() if at >= oldest}

    def _secret(self, user: str) -> str:
        return f"{self._namespace}/known-addresses/{user}"
