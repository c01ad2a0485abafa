"""A secret of the whole installation that servers share: made once, and replaced by whoever knows it.

Its content is sealed in the store, and a claim says which version that is. Making and replacing it names the
version that was seen before, so that of several servers that do so at once one does; the others are told, and
read what that one wrote. Secrets that were made before there were versions have none until they are replaced,
and neither have those of a database file, which one server has to itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fleetplane.kernel.errors import Conflict
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

VERSION_BYTES = 8
NO_VERSION = ""
SECRET_VERSION: Kind[Nothing, Nothing] = Kind("secret-version", Nothing, Nothing)
"""Of claims alone: the name of a secret, held by its version."""
_FIELD = "name"


class Unsealed(NamedTuple):
    content: bytes
    version: str


class ReplacedMeanwhile(Conflict):
    """Somebody else, perhaps another server, has replaced a secret that was to be replaced."""


class SealedSecret:
    def __init__(self, store: Store, master: MasterKey, *, name: str) -> None:
        self._store = store
        self._master = master
        self.name = name

    def __repr__(self) -> str:
        return f"<SealedSecret {self.name} version={self.version or '-'}>"

    @property
    def version(self) -> str:
        """Which one the store has, as far as memory knows: whoever holds another one reads it again."""
        return self._store.claimed_by(SECRET_VERSION, "", _FIELD, self.name) or NO_VERSION

    async def read(self) -> Unsealed | None:
        """What it is now; None if there is none.

        The version is never newer than the content: whoever replaces by it what they have not seen is told.
        """
        version = self.version
        sealed = await self._store.get_secret(self.name)
        return None if sealed is None else Unsealed(self._master.open(sealed, purpose=self.name), version)

    async def read_or_make(
        self, make: Callable[[], Awaitable[bytes]], *, actor: str, action: str = "secret.put"
    ) -> Unsealed:
        """What it is, made if there is none: by one of all servers, whose the others then read."""
        version = self.version  # also of one that was deleted
        found = await self.read()
        if found is not None:
            return found
        content = await make()
        try:
            return await self.replace(content, version=version, actor=actor, action=action)
        except ReplacedMeanwhile:
            found = await self.read()
            if found is None:
                raise
            return found

    async def replace(
        self, content: bytes, *, version: str, actor: str, action: str = "secret.put"
    ) -> Unsealed:
        """Put it in the place of a version; raises `ReplacedMeanwhile` if it has another by now."""
        following = self._store.clock.token_bytes(VERSION_BYTES).hex()
        sealed = self._master.seal(content, purpose=self.name)

        def change(draft: Draft) -> None:
            draft.put_secret(self.name, sealed)
            if not self._store.shared:  # nobody else could replace it
                return
            found = draft.claimed_by(SECRET_VERSION, "", _FIELD, self.name) or NO_VERSION
            if found != version:
                raise ReplacedMeanwhile(
                    f"{self.name} was replaced by somebody else meanwhile", hint="look at it, and try again"
                )
            if found:
                draft.release(SECRET_VERSION, "", _FIELD, self.name, found)
            draft.claim(SECRET_VERSION, "", _FIELD, self.name, following)

        await self._store.transact(change, actor=actor, action=action, touches=())
        return Unsealed(content, following if self._store.shared else version)


class HeldSecret:
    """A sealed secret as a server has it in memory, read again after another server has replaced it."""

    def __init__(self, kept: SealedSecret, *, version: str, use: Callable[[bytes], None]) -> None:
        """`use` takes the content that another server has put in its place."""
        self._kept = kept
        self._version = version
        self._use = use
        self.changing = asyncio.Lock()  # guards: what is sealed in the store is what is in memory

    def __repr__(self) -> str:
        return f"<HeldSecret {self._version or '-'} of {self._kept!r}>"

    def secret_changed(self, name: str) -> None:
        """Nothing to note: `refresh` compares versions."""

    async def refresh(self) -> None:
        """Know what other servers have made of it."""
        if self._kept.version != self._version:
            async with self.changing:
                await self._reload()

    async def _reload(self) -> None:
        while self._kept.version != self._version:
            found = await self._kept.read()
            if found is None:
                return
            self._version = found.version
            self._use(found.content)

    async def replace(self, content: bytes, *, actor: str, action: str = "secret.put") -> None:
        """Seal it in the place of what is in memory, for whoever holds `changing`.

        Of servers that do so at once, one does; the others have what that one wrote when they are told.
        """
        try:
            found = await self._kept.replace(content, version=self._version, actor=actor, action=action)
        except ReplacedMeanwhile:
            await self._reload()
            raise
        self._version = found.version
