"""A POST that is sent twice happens once.

What a POST with an `Idempotency-Key` does and the record that it was done are one transaction:
its writes are signed with the key's digest, and whatever is written under that name is
accompanied by the record. Where the answer follows from what is written, it is in the record,
and so it survives any crash; otherwise it is added when it is known, and a crash before that
leaves a record that says "done" without saying what was answered. Records are kept for a day,
sealed (an answer may hold a token that is shown once); their index is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetplane.kernel import actors
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Beside, Draft, Store
from fleetplane.kernel.unbroken import finish
from fleetplane.web.rest.routes import Answer

KEPT_SECONDS = 24 * 3600
KEY_LIMIT = 255
ANSWERS_LIMIT = 50_000
"""Keys kept at once: about 200 bytes of index each. Beyond it the oldest are forgotten early."""
BODY_LIMIT_BYTES = 512 * 1024
"""Of an answer that is kept, half of what a secret may hold. Of a longer one it is kept that it was given."""
ACTOR = "system/idempotency"

Encode = Callable[[Answer[Any]], "Kept"]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for a key, inside the seal."""

    fingerprint: bytes
    status: int = 0
    """0: it was done, and what was answered is not known."""
    headers: Mapping[str, str] = {}
    body: bytes = b""


@dataclass(slots=True, eq=False, kw_only=True)
class Once:
    """One request that must happen once, while it runs. A `Receipt` for its handler."""

    digest: str
    fingerprint: bytes
    name: str
    """Of the secret that its record is."""
    encode: Encode
    view: Callable[[Any], Answer[Any]] | None = None
    recorded: Kept | None = None
    """What lies, or may lie, in the store by now."""

    def signed(self, actor: str) -> str:
        return actors.signed(actor, self.digest)

    def promise(self, view: Callable[[Any], Answer[Any]]) -> None:
        self.view = view

    def record(self, value: object) -> Kept:
        """The record to keep for a transaction with this result."""
        return Kept(fingerprint=self.fingerprint) if self.view is None else self.encode(self.view(value))


class Answers:
    """`namespace` keeps the secrets of different tables apart."""

    def __init__(self, store: Store, master: MasterKey, clock: Clock, *, namespace: str) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._prefix = f"{namespace}/idempotency/"
        self._names: dict[str, str] = {}
        """From a key's digest to its secret, oldest first."""
        self._running: dict[str, Once] = {}
        self._doubtful: set[str] = set()
        """Keys whose record may still be on its way to the disk, or may never get there."""
        store.accompany(self._beside)

    def __repr__(self) -> str:
        return f"<Answers {len(self._names)} running={len(self._running)}>"

    async def load(self) -> None:
        names = sorted(await self._store.secret_names(self._prefix))
        self._names = {name.rpartition("/")[2]: name for name in names}
        await self.sweep()

    @staticmethod
    def digest(caller: str, route: str, key: str) -> str:
        if not 0 < len(key) <= KEY_LIMIT or not key.isprintable():
            raise InvalidArgument(f"Must have 1 to {KEY_LIMIT} visible characters", field="Idempotency-Key")
        return hashlib.sha256(f"{caller}\0{route}\0{key}".encode()).hexdigest()

    @contextmanager
    def running(
        self, digest: str, body: bytes, *, status: int, encode: Callable[[Any], bytes]
    ) -> Iterator[Once]:
        """From the first look to the last word: the same key meanwhile is a conflict."""
        if digest in self._running:
            raise Conflict("a request with this Idempotency-Key is still running", hint="wait for its answer")
        fingerprint = hashlib.sha256(body).digest()

        def kept(answer: Answer[Any]) -> Kept:
            content = encode(answer.content)
            if len(content) > BODY_LIMIT_BYTES:
                return Kept(fingerprint=fingerprint)
            return Kept(fingerprint=fingerprint, status=status, headers=dict(answer.headers), body=content)

        name = f"{self._prefix}{self._now() + KEPT_SECONDS:012d}/{digest}"
        once = Once(digest=digest, fingerprint=fingerprint, name=name, encode=kept)
        self._running[digest] = once
        try:
            yield once
        finally:
            del self._running[digest]
            if once.recorded is not None and digest not in self._names:
                self._names[digest] = name
                self._doubtful.add(digest)

    async def find(self, once: Once) -> Kept | None:
        """The answer given before; `Conflict` if it was to another question, or is not known any more."""
        name = self._names.get(once.digest)
        if name is None:
            return None
        if _expires(name, self._prefix) <= self._now():
            await self._forget(once.digest, name)
            return None
        if once.digest in self._doubtful:
            await self._settled()
        sealed = await self._store.get_secret(name)
        self._doubtful.discard(once.digest)
        if sealed is None:
            self._names.pop(once.digest, None)  # unless it was forgotten meanwhile
            return None
        kept = msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=Kept)
        if kept.fingerprint != once.fingerprint:
            raise Conflict("this Idempotency-Key was used with another body", hint="use a new key")
        if not kept.status:
            raise Conflict(
                "the request was carried out before, and its answer is no longer stored",
                hint="look at what is there; use a new key to do it again",
            )
        return kept

    async def keep(self, once: Once, answer: Answer[Any]) -> None:
        """For a request that has ended well. Nothing is left to do if its writes took the answer along."""
        await finish(self._keep(once, answer))

    async def _keep(self, once: Once, answer: Answer[Any]) -> None:
        final = once.encode(answer)
        if final != once.recorded:
            await self._store.put_secret(once.name, self._sealed(once.name, final), actor=ACTOR)
        self._names[once.digest] = once.name
        self._doubtful.discard(once.digest)
        if len(self._names) > ANSWERS_LIMIT:
            await self._forget(*next(iter(self._names.items())))

    def _beside(self, actor: str, _action: str, _touches: Collection[Key]) -> Beside | None:
        """The record of a running request, in each of its transactions."""
        once = self._running.get(actors.digest_of(actor))
        if once is None:
            return None

        def change(draft: Draft, value: Any) -> None:
            once.recorded = once.record(value)
            draft.put_secret(once.name, self._sealed(once.name, once.recorded))

        return Beside(change=change)

    def _sealed(self, name: str, kept: Kept) -> bytes:
        return self._master.seal(msgspec.msgpack.encode(kept), purpose=name)

    async def _settled(self) -> None:
        """Everything accepted before is on disk or has failed: writes are done in order."""
        await self._store.transact(lambda _: None, actor=ACTOR, action="idempotency.settle", touches=())

    async def sweep(self) -> int:
        """Forget what has been kept long enough; how many."""
        now = self._now()
        old = [(digest, name) for digest, name in self._names.items() if _expires(name, self._prefix) <= now]
        for digest, name in old:
            await self._forget(digest, name)
        return len(old)

    async def _forget(self, digest: str, name: str) -> None:
        if self._names.get(digest) != name:
            return  # somebody else did so, and the key may have been used again since
        del self._names[digest]
        self._doubtful.discard(digest)
        await self._store.delete_secret(name, actor=ACTOR)

    def _now(self) -> int:
        return self._clock.now_ns() // 1_000_000_000


def _expires(name: str, prefix: str) -> int:
    return int(name.removeprefix(prefix).partition("/")[0])
