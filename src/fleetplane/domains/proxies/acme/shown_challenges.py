"""Answers to HTTP-01 challenges in the store, so that whichever server an agent asks knows them.

Only where servers share a database: the one that orders writes an answer before the authority is told to
look, and takes it away when the order ends. What an order left behind that died with its server is swept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from fleetplane.domains.proxies.acme.account import ACTOR
from fleetplane.domains.proxies.kinds.records import ProxiesSpec
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store, transact_found

SCOPE: Final = ""


class ShownChallengeSpec(ProxiesSpec, frozen=True):
    """Named by the digest of the challenge's token. Meant for everyone to read."""

    text: str
    workspace: str
    ends_at_ns: int


CHALLENGE: Kind[ShownChallengeSpec, Nothing] = Kind("proxy-acme-challenge", ShownChallengeSpec, Nothing)


class ShownChallenges:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.shared = store.shared

    def __repr__(self) -> str:
        return f"<ShownChallenges {self._store.count(CHALLENGE)}>"

    async def show(self, token: str, text: str, *, workspace: str, ends_at_ns: int) -> None:
        name = _name(token)
        spec = ShownChallengeSpec(text=text, workspace=workspace, ends_at_ns=ends_at_ns)
        await self._store.transact(
            lambda draft: draft.put(CHALLENGE, SCOPE, name, spec=spec),
            actor=ACTOR,
            action="acme.show",
            touches=[CHALLENGE.key(SCOPE, name)],
        )

    async def hide(self, token: str) -> None:
        key = CHALLENGE.key(SCOPE, _name(token))
        await self._store.transact(
            lambda draft: _hide(draft, key), actor=ACTOR, action="acme.hide", touches=[key]
        )

    async def find(self, token: str) -> ShownChallengeSpec | None:
        """An answer that any server has shown, as far as the database can be asked."""
        with suppress(FleetplaneError):  # what is known may still be the answer
            await self._store.confirmed()
        found = self._store.get(CHALLENGE, SCOPE, _name(token))
        if found is None or found.spec.ends_at_ns <= self._store.clock.now_ns():
            return None
        return found.spec

    async def sweep(self) -> None:
        """Forget what earlier holders of the seat left behind: whoever has it orders alone."""

        def left(reader: Store | Draft) -> list[Key]:
            return [one.key for one in reader.list(CHALLENGE)]

        def change(draft: Draft, found: Sequence[Key]) -> None:
            for key in found:
                _hide(draft, key)

        if self.shared and left(self._store):
            await transact_found(self._store, left, change, actor=ACTOR, action="acme.sweep")


def _hide(draft: Draft, key: Key) -> None:
    if draft.get(CHALLENGE, key.scope, key.name) is not None:
        draft.delete(CHALLENGE, key.scope, key.name)


def _name(token: str) -> str:
    """Tokens are the authority's to choose."""
    return hashlib.sha256(token.encode()).hexdigest()
