"""Passwords: argon2id, hashed and checked off the event loop, a few at a time.

Unknown users cost as much time as known ones: their password is checked against the hash of
something nobody knows.
"""

from __future__ import annotations

import asyncio

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.problems import Code, Problem

CONCURRENT_HASHES = 2
"""Each takes 64 MiB and a tenth of a second of several cores: more at once are not faster."""
PASSWORD_MINIMUM = 12
PASSWORD_LIMIT_BYTES = 1024
NOBODYS = "$argon2id$v=19$m=65536,t=3,p=4$lWUjrYEPcoQhj7OIshxJTA$A3A3Ur8OKqPQfeQPX/3Hf84E4Rks5vlQfCyQ+uc+60U"
"""The hash of 32 random bytes that were not kept, with the parameters of all others: no password fits it."""


def problems(password: str, *, field: str) -> list[Problem]:
    """Why a password cannot be set."""
    if len(password) < PASSWORD_MINIMUM:
        return [
            Problem(
                field=field,
                message=f"Must have at least {PASSWORD_MINIMUM} characters",
                code=Code.OUT_OF_RANGE,
            )
        ]
    if len(password.encode("utf-8", "replace")) > PASSWORD_LIMIT_BYTES:
        return [
            Problem(
                field=field, message=f"Must take at most {PASSWORD_LIMIT_BYTES} bytes", code=Code.TOO_LONG
            )
        ]
    return []


class Passwords:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master
        self._hasher = PasswordHasher()
        self._turns = asyncio.Semaphore(CONCURRENT_HASHES)

    async def hash(self, password: str) -> str:
        async with self._turns:
            return await asyncio.to_thread(self._hasher.hash, password.encode("utf-8", "surrogatepass"))

    async def verify(self, user: str | None, password: str) -> str | None:
        """What is stored of the user's password, if it is this one."""
        stored = await self._stored(user) if user is not None else None
        tried = NOBODYS if stored is None else stored
        if len(password.encode("utf-8", "replace")) > PASSWORD_LIMIT_BYTES:
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
        name = _secret(user)
        draft.put_secret(name, self._master.seal(hashed.encode(), purpose=name))

    def remove(self, draft: Draft, user: str) -> None:
        draft.delete_secret(_secret(user))

    async def _stored(self, user: str) -> str | None:
        name = _secret(user)
        sealed = await self._store.get_secret(name)
        return None if sealed is None else self._master.open(sealed, purpose=name).decode()


def _secret(user: str) -> str:
    return f"proxies/password/{user}"
