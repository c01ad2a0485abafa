"""Bearer tokens: made once, shown once, kept as hashes.

A token is 256 random bits, so a plain SHA-256 is enough to keep it: there is nothing to
guess by dictionary. The hash, the roles and the scope are sealed under the master key, so a
copied database tells neither who holds tokens nor what they may do. Names are claims, so that of
several servers that make a token of one name one does, and every server follows what others make and revoke.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.kernel.access import EVERYWHERE, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, Unauthenticated
from fleetplane.kernel.identity.bindings import ENDED_PLACE, has_ended
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.unbroken import run_to_completion

PREFIX = "fp_"
TOKEN_BYTES = 32
ACTOR = "system/identity"
NAME_LIMIT = 128
ENDED_KEPT_NS = 86_400 * 1_000_000_000
"""A token is written moments after it was made: a day later none is on its way."""
TOKEN_NAME: Kind[Nothing, Nothing] = Kind("token-name", Nothing, Nothing)
"""Of claims alone: the name of a token, held by that token."""
ADOPT_BATCH = 256
_SECRETS = "token/"
_FIELD = "name"


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    digest: bytes
    roles: tuple[str, ...]
    scope: str = EVERYWHERE
    created_at_ns: int = 0
    expires_at_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Minted:
    """A token that lets nobody in yet."""

    token: str
    record: TokenRecord

    def __repr__(self) -> str:
        return f"<Minted {self.record.name}>"


class OneTimeTokens:
    def __init__(self, store: Store, master: MasterKey, clock: Clock) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._by_digest: dict[bytes, TokenRecord] = {}
        self._is_stale = False
        self._refreshing = asyncio.Lock()  # guards: whoever finds nothing stale has what was read last
        store.keep_fresh(self)

    def __repr__(self) -> str:
        return f"<Tokens {len(self._by_digest)}>"

    async def load(self) -> None:
        """Read all tokens into memory: authentication must not wait for a database."""
        await self._read()

    async def _read(self) -> None:
        found: dict[bytes, TokenRecord] = {}
        for name in await self._store.secret_names(_SECRETS):
            sealed = await self._store.get_secret(name)
            if sealed is None:  # revoked since its name was read
                continue
            record = msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=TokenRecord)
            found[record.digest] = record
        self._by_digest = found

    async def adopt(self) -> None:
        """Claim the names of tokens that were made before names were claims, and free what nobody has.

        On the active server, for all.
        """
        names = {record.name: _owner(record) for record in self._by_digest.values()}
        held = {claim.value: owner for claim, owner in self._store.claims(TOKEN_NAME)}
        wrong = [name for name, owner in names.items() if held.get(name) != owner]
        free = sorted(held.keys() - names.keys())
        wrong += [name for name in free if await self._store.get_secret(_SECRETS + name) is None]
        for start in range(0, len(wrong), ADOPT_BATCH):

            def change(draft: Draft, batch: Sequence[str] = wrong[start : start + ADOPT_BATCH]) -> None:
                for name in batch:
                    now = draft.claimed_by(TOKEN_NAME, "", _FIELD, name)
                    if now != held.get(name):  # by another server, meanwhile
                        continue
                    if now is not None:
                        draft.release(TOKEN_NAME, "", _FIELD, name, now)
                    if name in names:
                        draft.claim(TOKEN_NAME, "", _FIELD, name, names[name])

            await self._store.transact(change, actor=ACTOR, action="identity.adopt-tokens", touches=())

    def secret_changed(self, name: str) -> None:
        """Another server has made or revoked a token."""
        if name.startswith(_SECRETS):
            self._is_stale = True

    async def refresh(self) -> None:
        """Know every token that other servers made, and none that they revoked."""
        async with self._refreshing:
            while self._is_stale:
                self._is_stale = False
                try:
                    await self._read()
                except BaseException:
                    self._is_stale = True
                    raise

    async def create(
        self,
        name: str,
        *,
        roles: frozenset[Role],
        scope: str = EVERYWHERE,
        actor: str,
        prefix: str = PREFIX,
        life_seconds: float | None = None,
    ) -> str:
        """A new token. This is the only time it can be read; `prefix` tells scanners whose it is."""
        minted = self.mint(name, roles=roles, scope=scope, prefix=prefix, life_seconds=life_seconds)
        await self.write(minted, actor=actor)
        return minted.token

    async def write(self, minted: Minted, *, actor: str) -> None:
        """Write a token that was minted, and let it in."""
        await run_to_completion(self._write(minted, actor=actor))

    async def _write(self, minted: Minted, *, actor: str) -> None:
        await self._store.transact(
            lambda draft: self.put(draft, minted), actor=actor, action="secret.put", touches=()
        )
        self.admit(minted)

    # The same in three steps, for whoever has more to write in the same transaction.

    def mint(
        self,
        name: str,
        *,
        roles: frozenset[Role],
        scope: str = EVERYWHERE,
        prefix: str = PREFIX,
        life_seconds: float | None = None,
    ) -> Minted:
        if not name or len(name) > NAME_LIMIT:
            raise InvalidArgument(f"name must have 1 to {NAME_LIMIT} characters", field="name")
        token = prefix + base64.urlsafe_b64encode(self._clock.token_bytes(TOKEN_BYTES)).rstrip(b"=").decode()
        now_ns = self._clock.now_ns()
        record = TokenRecord(
            name=name,
            digest=_digest(token),
            roles=tuple(sorted(roles)),
            scope=scope,
            created_at_ns=now_ns,
            expires_at_ns=None if life_seconds is None else now_ns + round(life_seconds * 1e9),
        )
        return Minted(token=token, record=record)

    def put(self, draft: Draft, minted: Minted) -> None:
        """Raises `AlreadyExists` if there is a token of this name."""
        name, owner = minted.record.name, _owner(minted.record)
        if draft.claimed_by(TOKEN_NAME, "", _FIELD, name) not in (None, owner):
            raise AlreadyExists(f"there is a token named {name!r} already", field="name")
        draft.claim(TOKEN_NAME, "", _FIELD, name, owner)
        secret = _SECRETS + name
        draft.put_secret(secret, self._master.seal(msgspec.msgpack.encode(minted.record), purpose=secret))

    def admit(self, minted: Minted) -> None:
        """Once it is written: let it in."""
        self._by_digest[minted.record.digest] = minted.record

    async def revoke(self, name: str, *, actor: str) -> bool:
        """Whether there was such a token."""
        return await run_to_completion(self._delete(name, actor=actor))

    async def _delete(self, name: str, *, actor: str) -> bool:
        def change(draft: Draft) -> str | None:
            owner = draft.claimed_by(TOKEN_NAME, "", _FIELD, name)
            if owner is not None:
                draft.release(TOKEN_NAME, "", _FIELD, name, owner)
                draft.delete_secret(_SECRETS + name)
            return owner

        done = await self._store.transact(change, actor=actor, action="secret.delete", touches=())
        gone = [one.digest for one in self._by_digest.values() if _owner(one) == done.value]
        for digest in gone:  # another may have revoked it at the same time
            self._by_digest.pop(digest, None)
        return done.value is not None

    def authenticate(self, token: str) -> Principal:
        """The token's principal. Looked up by hash, so no timing tells how near a guess came."""
        record = self._by_digest.get(_digest(token))
        if record is None:
            raise Unauthenticated("the token is not known or was revoked")
        if record.expires_at_ns is not None and record.expires_at_ns <= self._clock.now_ns():
            raise Unauthenticated("the token has expired", hint="have a new one made")
        if has_ended(self._store, record.scope, record.created_at_ns):
            raise Unauthenticated(
                "the token has ended with the tenant that it was made for", hint="have a new one made"
            )
        return Principal(
            name=f"token/{record.name}",
            roles=frozenset(Role(role) for role in record.roles),
            scope=record.scope,
        )

    async def sweep(self, *, actor: str) -> list[str]:
        """Revoke tokens of places that are no more, and forget places of more than a day ago; their names."""
        over = [one for one in self.records() if has_ended(self._store, one.scope, one.created_at_ns)]
        for one in over:
            await self.revoke(one.name, actor=actor)
        before_ns = self._clock.now_ns() - ENDED_KEPT_NS
        old = [one for one in self._store.list(ENDED_PLACE) if one.spec.lives[-1][1] < before_ns]

        def change(draft: Draft) -> None:
            for one in old:
                current = draft.get(ENDED_PLACE, one.scope, one.name)
                if current is not None and current.revision == one.revision:
                    draft.delete(ENDED_PLACE, one.scope, one.name)

        if old:
            keys = [ENDED_PLACE.key(one.scope, one.name) for one in old]
            await self._store.transact(change, actor=actor, action="people.ended_places_sweep", touches=keys)
        return [one.name for one in over]

    def records(self) -> list[TokenRecord]:
        """What is known of every token; what could be presented is not among it."""
        return sorted(self._by_digest.values(), key=lambda record: record.name)

    def __len__(self) -> int:
        return len(self._by_digest)


def _owner(record: TokenRecord) -> str:
    """How a token is called that holds a name; tells nothing of what is kept of it."""
    return hashlib.sha256(b"fleetplane/token-name\0" + record.digest).hexdigest()[:32]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
