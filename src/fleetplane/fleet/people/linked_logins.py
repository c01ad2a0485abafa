"""Logins of one person, whichever family opened them: they end together, and are guessed at together.

Shared by the accounts of this installation and by the profiles of every domain. Failures are counted in the
memory of each server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from fleetplane.fleet.people.account_kind import FAMILY, Account
from fleetplane.fleet.people.attempts.throttle import LoginAttempt
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.identity.passwords import HashingQueue, LoginFailures

FAILURES_LIMIT = 10
"""Wrong passwords of one account from one address at the logins of all families: what one of them allows."""


class LoginCloser(Protocol):
    """Ends logins of an account or profile; see `Logins.close`."""

    async def close(self, account: str, *, but: str = "", actor: str, action: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedFamily:
    logins: LoginCloser
    check_remove: Callable[[str], None] = lambda _: None
    """Raise if a profile must stay."""
    remove: Callable[[str, str], Awaitable[None]] | None = None
    """Delete a profile, with the actor, when its account is deleted."""


class LinkedLogins:
    def __init__(self) -> None:
        self._families: dict[str, LinkedFamily] = {}
        self._failures = LoginFailures(limit=FAILURES_LIMIT)
        self.hashing = HashingQueue()
        """One for all families, which share a processor."""

    def add(self, name: str, family: LinkedFamily) -> None:
        self._families[name] = family

    def pardon(self, account: str) -> None:
        """Forget the attempts of before: the account has another password."""
        self._failures.pardon(f"{account}\0")

    def begin(self, account: str, attempt: LoginAttempt, *, now: float) -> None:
        """Count an attempt as failed until it succeeds; raises `ResourceExhausted` after too many.

        As with the families' own limits, an address from which the account was logged in to is not slowed.
        """
        if attempt.known:
            return
        pair = _pair(account, attempt)
        if pause := self._failures.pause_seconds(pair, now=now):
            raise ResourceExhausted(
                "too many attempts to log in", retry_after_seconds=pause, details={"cause": "locked"}
            )
        self._failures.failed(pair, now=now)

    def withdrawn(self, account: str, attempt: LoginAttempt) -> None:
        """The attempt was refused before its password was checked: it was no guess."""
        if not attempt.known:
            self._failures.take_back(_pair(account, attempt))

    def succeeded(self, account: str, attempt: LoginAttempt) -> None:
        if not attempt.known:
            self._failures.succeeded(_pair(account, attempt))

    async def close(self, account: Account, *, besides: str, actor: str) -> None:
        """End the logins that an account has in every family but one, whose logins the caller ends."""
        places = {FAMILY: account.name, **account.spec.profiles}
        for name, identity in places.items():
            if name != besides and name in self._families:
                await self._families[name].logins.close(identity, actor=actor)

    async def remove(self, account: Account, *, actor: str) -> None:
        """Delete every profile of an account that is to be deleted; none if one of them must stay."""
        for name, identity in account.spec.profiles.items():
            if name in self._families:
                self._families[name].check_remove(identity)
        for name, identity in account.spec.profiles.items():
            family = self._families.get(name)
            if family is not None and family.remove is not None:
                await family.remove(identity, actor)


def _pair(account: str, attempt: LoginAttempt) -> str:
    return f"{account}\0{attempt.network}"
