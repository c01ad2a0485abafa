"""Passwords of people: argon2id, hashed and checked off the event loop, a few at a time.

Unknown users cost as much time as known ones: their password is checked against the hash of
something nobody knows. Decides what a password must be like, whether one fits, and when somebody
guesses too much; who the users are is the business of whoever has some.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import StrEnum

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.store import Draft, Store

CONCURRENT_HASHES = 2
"""Each takes 64 MiB and a tenth of a second of several cores: more at once are not faster."""
PASSWORD_MINIMUM = 12
PASSWORD_LIMIT_BYTES = 1024
NOBODYS = "$argon2id$v=19$m=65536,t=3,p=4$lWUjrYEPcoQhj7OIshxJTA$A3A3Ur8OKqPQfeQPX/3Hf84E4Rks5vlQfCyQ+uc+60U"
"""The hash of 32 random bytes that were not kept, with the parameters of all others: no password fits it."""
PAUSE_SECONDS = 15 * 60
ACCOUNTS_REMEMBERED = 10_000
"""Accounts with recent failures; the oldest is forgotten first."""


class Fault(StrEnum):
    """Why a password cannot be set."""

    TOO_SHORT = f"Must have at least {PASSWORD_MINIMUM} characters"
    TOO_LONG = f"Must take at most {PASSWORD_LIMIT_BYTES} bytes"


def fault(password: str) -> Fault | None:
    if len(password) < PASSWORD_MINIMUM:
        return Fault.TOO_SHORT
    return Fault.TOO_LONG if _is_too_long(password) else None


class Passwords:
    """The passwords of one kind of users; hashes are sealed below `{namespace}/password/`."""

    def __init__(self, store: Store, master: MasterKey, *, namespace: str) -> None:
        self._store = store
        self._master = master
        self._namespace = namespace
        self._hasher = PasswordHasher()
        self._turns = asyncio.Semaphore(CONCURRENT_HASHES)

    def __repr__(self) -> str:
        return f"<Passwords {self._namespace}>"

    async def hash(self, password: str) -> str:
        async with self._turns:
            return await asyncio.to_thread(self._hasher.hash, password.encode("utf-8", "surrogatepass"))

    async def verify(self, user: str | None, password: str) -> str | None:
        """What is stored of the user's password, if it is this one."""
        stored = await self.stored(user) if user is not None else None
        tried = NOBODYS if stored is None else stored
        if _is_too_long(password):
            return None
        async with self._turns:
            fits = await asyncio.to_thread(self._fits, tried, password)
        return stored if fits else None

    def _fits(self, hashed: str, password: str) -> bool:
        try:
            return self._hasher.verify(hashed, password.encode("utf-8", "surrogatepass"))
        except (VerificationError, InvalidHashError):
            return False

    def outdated(self, hashed: str) -> bool:
        """Whether it was made with other parameters than today's."""
        return self._hasher.check_needs_rehash(hashed)

    def put(self, draft: Draft, user: str, hashed: str) -> None:
        name = self._secret(user)
        draft.put_secret(name, self._master.seal(hashed.encode(), purpose=name))

    def remove(self, draft: Draft, user: str) -> None:
        draft.delete_secret(self._secret(user))

    async def stored(self, user: str) -> str | None:
        """What is stored of a user's password; None if there is none."""
        name = self._secret(user)
        sealed = await self._store.get_secret(name)
        return None if sealed is None else self._master.open(sealed, purpose=name).decode()

    def _secret(self, user: str) -> str:
        return f"{self._namespace}/password/{user}"


def _is_too_long(password: str) -> bool:
    return len(password.encode("utf-8", "replace")) > PASSWORD_LIMIT_BYTES


class Failures:
    """Failed logins per account, and the pause after too many. Pure but for what it remembers."""

    def __init__(self, *, limit: int, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._limit = limit
        self._pause = pause_seconds
        self._at: OrderedDict[str, list[float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Failures accounts={len(self._at)}>"

    def pause_seconds(self, account: str, *, now: float) -> float:
        """How long the account has to wait; 0 if it need not."""
        recent = [at for at in self._at.get(account, ()) if now - at < self._pause]
        return recent[0] + self._pause - now if len(recent) >= self._limit else 0.0

    def failed(self, account: str, *, now: float) -> None:
        recent = [at for at in self._at.pop(account, ()) if now - at < self._pause]
        self._at[account] = [*recent, now][-self._limit :]
        if len(self._at) > ACCOUNTS_REMEMBERED:
            self._at.popitem(last=False)

    def succeeded(self, account: str) -> None:
        self._at.pop(account, None)

    def pardon(self, prefix: str) -> None:
        """Forget the failures of all accounts that begin so."""
        for account in [one for one in self._at if one.startswith(prefix)]:
            del self._at[account]

    def take_back(self, account: str) -> None:
        """The last one was none after all; what others did still counts."""
        if found := self._at.get(account):
            found.pop()
