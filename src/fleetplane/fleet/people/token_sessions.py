"""Console sessions of tokens: a browser trades a token, or a link that is good once, for a cookie.

The cookie carries the token sealed under the master key, with the id of a stored record: nothing that lets
anybody in is stored, the session ends with its record, and it is never worth more than its token: what is
revoked, expired or given fewer roles is so for the session at once. A link carries the token in the same way,
under a purpose of its own, and its record is deleted by the transaction that opens the session.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.fleet.people.directory import KnownAccount, KnownLogin
from fleetplane.fleet.people.door import Admitted, Authenticators
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest import console

SCOPE = "people"
MARK = "t."
"""What a cookie of a token begins with; those of accounts have no dot."""
LINK_SECONDS = 3600
"""How long a link waits to be opened."""
SESSIONS_LIMIT = 50
"""Of one principal; a further one ends the oldest."""
SWEEPER = "system/people"
_SESSION, _LINK = "console-session", "console-link"


class TokenSessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Whose it is, as audits name them."""
    subject: str
    """As bindings name them."""
    expires_at_ns: int


Record = Resource[TokenSessionSpec, Nothing]
TOKEN_SESSION: Kind[TokenSessionSpec, Nothing] = Kind(_SESSION, TokenSessionSpec, Nothing)
CONSOLE_LINK: Kind[TokenSessionSpec, Nothing] = Kind(_LINK, TokenSessionSpec, Nothing)
KINDS = (TOKEN_SESSION, CONSOLE_LINK)


class _Carried(msgspec.Struct, frozen=True, array_like=True):
    """What a cookie or a link holds, sealed."""

    id: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    name: str
    cookie: str


class TokenSessions:
    """See the module's description. A directory, too: its sessions are listed and ended like logins."""

    name = "console"

    def __init__(self, door: Authenticators, store: Store, master: MasterKey, clock: Clock) -> None:
        self._door = door
        self._store = store
        self._master = master
        self._clock = clock

    def recognise(self, cookie: str) -> Admitted:
        """Whose session it is; raises `Unauthenticated`."""
        carried = self._unsealed(cookie.removeprefix(MARK), _SESSION)
        found = self._store.get(TOKEN_SESSION, SCOPE, carried.id)
        if found is None or found.spec.expires_at_ns <= self._clock.now_ns():
            raise Unauthenticated("the session has ended", details={"cause": "ended"})
        return self._door.recognise(carried.token)

    async def trade(self, token: str) -> OpenedSession:
        """Open a session with a token; raises `Unauthenticated` for one that is not good."""
        found = self._door.recognise(token)
        return await self._open(found, token, lambda _: None)

    async def link(self, token: str, *, actor: str) -> str:
        """The code of a link that opens one session with this token."""
        found = self._door.recognise(token)
        identity = new_uuid(self._clock)

        def change(draft: Draft) -> None:
            spec = _spec(found, draft.now_ns + LINK_SECONDS * NS)
            draft.put(CONSOLE_LINK, SCOPE, identity, spec=spec)

        key = CONSOLE_LINK.key(SCOPE, identity)
        await self._store.transact(change, actor=actor, action="people.console_link", touches=[key])
        return self._sealed(_Carried(identity, token), _LINK)

    async def redeem(self, code: str) -> OpenedSession:
        """Open the session of a link; of two who try at once, one does."""
        carried = self._unsealed(code, _LINK)
        found = self._door.recognise(carried.token)

        def use(draft: Draft) -> None:
            link = draft.get(CONSOLE_LINK, SCOPE, carried.id)
            if link is None or link.spec.expires_at_ns <= draft.now_ns:
                raise Unauthenticated(
                    "the link was used before or has expired", hint="have another one made: fleetplane open"
                )
            draft.delete(CONSOLE_LINK, SCOPE, carried.id)

        return await self._open(found, carried.token, use, CONSOLE_LINK.key(SCOPE, carried.id))

    async def _open(
        self, found: Admitted, token: str, first: Callable[[Draft], None], *used: Key
    ) -> OpenedSession:
        identity = new_uuid(self._clock)

        def older(reader: Store | Draft) -> Sequence[Key]:
            mine = (one for one in reader.list(TOKEN_SESSION, SCOPE) if one.spec.name == found.name)
            return [one.key for one in sorted(mine, key=lambda one: one.created_revision)]

        def surplus(reader: Store | Draft) -> Sequence[Key]:
            present = older(reader)
            return present[: max(0, len(present) + 1 - SESSIONS_LIMIT)]

        def change(draft: Draft, surplus: Sequence[Key]) -> None:
            first(draft)
            for key in surplus:
                _end(draft, key.name)
            spec = _spec(found, draft.now_ns + console.SESSION_SECONDS * NS)
            draft.put(TOKEN_SESSION, SCOPE, identity, spec=spec)

        touches = [*used, TOKEN_SESSION.key(SCOPE, identity)]
        await transact_found(
            self._store,
            surplus,
            change,
            actor=found.name,
            action="people.console_login",
            touches=touches,
            among=older,
        )
        return OpenedSession(name=found.name, cookie=MARK + self._sealed(_Carried(identity, token), _SESSION))

    async def close(self, cookie: str, *, actor: str) -> None:
        """End the session of a cookie."""
        await self._ended([self._unsealed(cookie.removeprefix(MARK), _SESSION).id], actor, "people.logout")

    async def sweep(self) -> None:
        """Delete sessions and links that are over."""
        now_ns = self._clock.now_ns()
        over = [one.name for one in self._records() if one.spec.expires_at_ns <= now_ns]
        links = [
            one.name for one in self._store.list(CONSOLE_LINK, SCOPE) if one.spec.expires_at_ns <= now_ns
        ]
        if over or links:
            await self._ended(over, SWEEPER, "people.logins_sweep", links=links)

    # As a directory.

    def accounts(self) -> Iterator[KnownAccount]:
        """None: tokens are listed by themselves."""
        return iter(())

    def logins(self) -> Iterator[KnownLogin]:
        now_ns = self._clock.now_ns()
        for one in self._records():
            if one.spec.expires_at_ns > now_ns:
                yield KnownLogin(
                    id=one.name,
                    directory=self.name,
                    subject=one.spec.subject,
                    name=one.spec.name,
                    expires_at_ns=one.spec.expires_at_ns,
                )

    async def end(self, login: KnownLogin, *, actor: str) -> None:
        await self._ended([login.id], actor, "people.logout")

    def _records(self) -> list[Record]:
        return list(self._store.list(TOKEN_SESSION, SCOPE))

    async def _ended(
        self, names: Sequence[str], actor: str, action: str, *, links: Sequence[str] = ()
    ) -> None:
        def change(draft: Draft) -> None:
            for name in names:
                _end(draft, name)
            for name in links:
                if draft.get(CONSOLE_LINK, SCOPE, name) is not None:
                    draft.delete(CONSOLE_LINK, SCOPE, name)

        touches = [TOKEN_SESSION.key(SCOPE, one) for one in names]
        touches += [CONSOLE_LINK.key(SCOPE, one) for one in links]
        await self._store.transact(change, actor=actor, action=action, touches=touches)

    def _sealed(self, carried: _Carried, purpose: str) -> str:
        sealed = self._master.seal(msgspec.msgpack.encode(carried), purpose=purpose)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def _unsealed(self, text: str, purpose: str) -> _Carried:
        try:
            raw = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
            return msgspec.msgpack.decode(self._master.open(raw, purpose=purpose), type=_Carried)
        except (ValueError, binascii.Error, IntegrityError, msgspec.MsgspecError) as error:
            raise Unauthenticated("the session is not known", details={"cause": "unknown session"}) from error


def _spec(found: Admitted, expires_at_ns: int) -> TokenSessionSpec:
    return TokenSessionSpec(name=found.name, subject=found.subject, expires_at_ns=expires_at_ns)


def _end(draft: Draft, name: str) -> None:
    if draft.get(TOKEN_SESSION, SCOPE, name) is not None:
        draft.delete(TOKEN_SESSION, SCOPE, name)
