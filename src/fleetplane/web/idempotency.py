"""A POST that is sent twice happens once.

The answer to a POST with an `Idempotency-Key` is kept for a day, sealed (it may hold a token
that is shown once), and given again to the same caller for the same route, key and body. The
index is in memory, the answers in the store: they survive a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store

KEPT_SECONDS = 24 * 3600
KEY_LIMIT = 255
ANSWERS_LIMIT = 50_000
"""Keys kept at once: about 200 bytes of index each. Beyond it the oldest are forgotten early."""
ACTOR = "system/idempotency"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, inside the seal."""

    fingerprint: bytes
    status: int
    headers: Mapping[str, str]
    body: bytes


class Answers:
    """`namespace` keeps the secrets of different tables apart."""

    def __init__(self, store: Store, master: MasterKey, clock: Clock, *, namespace: str) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._prefix = f"{namespace}/idempotency/"
        self._names: dict[str, str] = {}
        """From a key's digest to its secret, oldest first."""
        self._running: set[str] = set()

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
    def running(self, digest: str) -> Iterator[None]:
        """From the first look to the last word: the same key meanwhile is a conflict."""
        if digest in self._running:
            raise Conflict("a request with this Idempotency-Key is still running", hint="wait for its answer")
        self._running.add(digest)
        try:
            yield
        finally:
            self._running.discard(digest)

    async def find(self, digest: str, body: bytes) -> Kept | None:
        """The answer given before; `Conflict` if it was to another question."""
        name = self._names.get(digest)
        if name is None or _expires(name, self._prefix) <= self._now():
            return None
        sealed = await self._store.get_secret(name)
        if sealed is None:
            return None
        kept = msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=Kept)
        if kept.fingerprint != hashlib.sha256(body).digest():
            raise Conflict("this Idempotency-Key was used with another body", hint="use a new key")
        return kept

    async def keep(
        self, digest: str, body: bytes, *, status: int, headers: Mapping[str, str], answer: bytes
    ) -> None:
        name = f"{self._prefix}{self._now() + KEPT_SECONDS:012d}/{digest}"
        kept = Kept(
            fingerprint=hashlib.sha256(body).digest(), status=status, headers=dict(headers), body=answer
        )
        sealed = self._master.seal(msgspec.msgpack.encode(kept), purpose=name)
        await self._store.put_secret(name, sealed, actor=ACTOR)
        self._names[digest] = name
        if len(self._names) > ANSWERS_LIMIT:
            await self._forget(next(iter(self._names)))

    async def sweep(self) -> int:
        """Forget what has been kept long enough; how many."""
        now = self._now()
        old = [digest for digest, name in self._names.items() if _expires(name, self._prefix) <= now]
        for digest in old:
            await self._forget(digest)
        return len(old)

    async def _forget(self, digest: str) -> None:
        await self._store.delete_secret(self._names.pop(digest), actor=ACTOR)

    def _now(self) -> int:
        return self._clock.now_ns() // 1_000_000_000


def _expires(name: str, prefix: str) -> int:
    return int(name.removeprefix(prefix).partition("/")[0])
