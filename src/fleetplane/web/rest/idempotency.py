"""A POST that is sent twice happens once, whichever servers it is sent to.

A key that was used is a claim, named by the digest of caller, request and key, and held by the request that
used it. The first transaction in the course of a POST with an `Idempotency-Key`, whoever makes it, takes the
claim along. So the claim is durable with the effect, or before it: whatever calls an agent, a board or a
provider writes that down first. Of two requests with one key, at two servers, one has the claim; the other
writes nothing and answers what the first did. A handler whose answer follows from its one transaction signs
that with the key's digest: the answer is in the record then, and survives any crash. Otherwise it is added
when it is known, and a crash or an error before that leaves a record that says "begun": who asks again is
told that the outcome is unknown, and nothing is done twice. Records are kept for a day by the database's
clock, sealed: an answer may hold a token that is shown once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from fleetplane.kernel import access
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.web.rest.routes import Answer

KEPT_SECONDS = 24 * 3600
KEY_LIMIT = 255
ANSWERS_LIMIT = 50_000
"""Keys kept at once in a namespace, a claim of 300 bytes each. Beyond it the oldest of those callers who have
the most are forgotten early: nobody's keys give way to the many of somebody else."""
SWEEP_EACH = 1000
"""Keys that a server keeps before it looks whether there are too many; else they are swept every hour."""
SWEEP_BATCH = 256
"""Keys forgotten per transaction, so that a large sweep never holds up other writers."""
BODY_LIMIT_BYTES = 512 * 1024
"""Of an answer that is kept, half of what a secret may hold. Of a longer one it is kept that it was given."""
REQUEST_BYTES = 8
REQUEST_DIGITS = 2 * REQUEST_BYTES
CALLER_DIGITS = 12
"""By which the requests of a caller begin, of the digest of its name."""
ACTOR = "system/idempotency"
USED_KEY: Kind[Nothing, Nothing] = Kind("idempotency-key", Nothing, Nothing)
"""Of claims alone; their scope is the namespace."""
_FIELD = "digest"
_BEFORE = "before"
"""In place of a request, for records that were made before keys were claims."""

Encode = Callable[[Answer[Any]], "KeptAnswer"]
_COURSE: ContextVar[IdempotentRequest | None] = ContextVar("idempotency_course", default=None)
"""The request with a key that is under way in this context; in tasks that it began, also after its end."""


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for a key, inside the seal."""

    fingerprint: bytes
    status: int = 0
    """0: it was begun, and what was answered is not known."""
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Use(NamedTuple):
    """Who has used a key, and until when that is kept: what owns its claim."""

    request: str
    """It begins with whose it is; those that were made before that was so are nobody's."""
    expires: int
    """In seconds since 1970."""

    @property
    def caller(self) -> str:
        return self.request[:-REQUEST_DIGITS]

    @classmethod
    def read(cls, owner: str) -> Use:
        request, _, expires = owner.partition("@")
        return cls(request, int(expires))

    def __str__(self) -> str:
        return f"{self.request}@{self.expires}"

    def is_over(self, now_ns: int) -> bool:
        return self.expires * 1_000_000_000 <= now_ns


@dataclass(slots=True, eq=False, kw_only=True)
class IdempotentRequest:
    """One request that must happen once, while it runs. A `Receipt` for its handler."""

    digest: str
    fingerprint: bytes
    use: Use
    encode: Encode
    view: Callable[[Any], Answer[Any]] | None = None
    recorded: KeptAnswer | None = None
    """What lies in the store by now, as far as this request has been told."""

    def signed(self, actor: str) -> str:
        return access.signed(actor, self.digest)

    def promise(self, view: Callable[[Any], Answer[Any]]) -> None:
        self.view = view

    def record(self, value: object) -> KeptAnswer:
        """The record to keep for a transaction with this result."""
        return (
            KeptAnswer(fingerprint=self.fingerprint) if self.view is None else self.encode(self.view(value))
        )

    def note(self, recorded: KeptAnswer) -> None:
        self.recorded = recorded


class Answers:
    """`namespace` keeps the keys of different tables apart."""

    def __init__(self, store: Store, master: MasterKey, clock: Clock, *, namespace: str) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._namespace = namespace
        self._prefix = f"{namespace}/answered/"
        self._prefix_before = f"{namespace}/idempotency/"
        self._running: dict[str, IdempotentRequest] = {}
        self._unswept = 0
        store.add_hook(self._commit_hook)

    def __repr__(self) -> str:
        return f"<Answers {self._namespace} running={len(self._running)}>"

    async def adopt(self) -> None:
        """Claim the keys of records that were made before keys were claims, and forget what is over.

        On the active server, for all.
        """
        names = await self._store.secret_names(self._prefix_before)
        for start in range(0, len(names), SWEEP_BATCH):
            await self._store.transact(
                partial(self._adopt, names=names[start : start + SWEEP_BATCH]),
                actor=ACTOR,
                action="idempotency.adopt",
                touches=(),
            )
        await self.sweep()

    def _adopt(self, draft: Draft, names: Sequence[str]) -> None:
        for name in names:
            expires, _, digest = name.removeprefix(self._prefix_before).partition("/")
            if draft.claimed_by(USED_KEY, self._namespace, _FIELD, digest) is None:
                draft.claim(USED_KEY, self._namespace, _FIELD, digest, str(Use(_BEFORE, int(expires))))

    @staticmethod
    def digest(caller: str, route: str, key: str) -> str:
        if not 0 < len(key) <= KEY_LIMIT or not key.isprintable():
            raise InvalidArgument(f"Must have 1 to {KEY_LIMIT} visible characters", field="Idempotency-Key")
        return hashlib.sha256(f"{caller}\0{route}\0{key}".encode()).hexdigest()

    @contextmanager
    def running(
        self, digest: str, body: bytes, *, caller: str, status: int, encode: Callable[[Any], bytes]
    ) -> Iterator[IdempotentRequest]:
        """From the first look to the last word: the same key meanwhile is a conflict."""
        if digest in self._running:
            raise Conflict("a request with this Idempotency-Key is still running", hint="wait for its answer")
        fingerprint = hashlib.sha256(body).digest()

        def kept(answer: Answer[Any]) -> KeptAnswer:
            content = encode(answer.content)
            if len(content) > BODY_LIMIT_BYTES:
                return KeptAnswer(fingerprint=fingerprint)
            return KeptAnswer(
                fingerprint=fingerprint, status=status, headers=dict(answer.headers), body=content
            )

        whose = hashlib.sha256(caller.encode()).hexdigest()[:CALLER_DIGITS]
        request = whose + self._clock.token_bytes(REQUEST_BYTES).hex()
        use = Use(request, self._clock.now_ns() // 1_000_000_000 + KEPT_SECONDS)
        once = IdempotentRequest(digest=digest, fingerprint=fingerprint, use=use, encode=kept)
        self._running[digest] = once
        before = _COURSE.set(once)
        try:
            yield once
        finally:
            _COURSE.reset(before)
            del self._running[digest]

    async def find(self, once: IdempotentRequest) -> KeptAnswer | None:
        """The answer that another request with this key was given; `Conflict` if it was to another question,
        or is not known.

        Asked before a handler runs, and again if it was refused something: perhaps because of that request.
        """
        owner = self._store.claimed_by(USED_KEY, self._namespace, _FIELD, once.digest)
        if owner is None:
            return None
        use = Use.read(owner)
        if use == once.use or use.is_over(self._clock.now_ns()):
            return None
        name = self._name(once.digest, use)
        sealed = await self._store.get_secret(name)
        if sealed is None:  # forgotten meanwhile
            return None
        kept = msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=KeptAnswer)
        if kept.fingerprint != once.fingerprint:
            raise Conflict("this Idempotency-Key was used with another body", hint="use a new key")
        if not kept.status:
            raise Conflict(
                "a request with this Idempotency-Key was begun before, and its outcome is unknown: it may"
                " have been carried out",
                hint="it may be under way at another server: ask again in a moment; else look at what is"
                " there, and use a new key only if it is to be done again",
            )
        return kept

    async def keep(self, once: IdempotentRequest, answer: Answer[Any]) -> None:
        """For a request that has ended well. Nothing is left to do if its writes took the answer along.

        `Conflict` if another server has carried out a request with this key meanwhile.
        """
        await run_to_completion(self._keep(once, answer))

    async def _keep(self, once: IdempotentRequest, answer: Answer[Any]) -> None:
        final = once.encode(answer)
        if final != once.recorded:
            await self._store.transact(
                partial(self._record, once=once, kept=final),
                actor=ACTOR,
                action="idempotency.keep",
                touches=(),
            )
        self._unswept += 1
        if self._unswept >= SWEEP_EACH:
            await self.sweep()

    def _commit_hook(self, actor: str, _action: str, _touches: Collection[Key]) -> HookedChange | None:
        """The claim and the record of a running request, in what it signed and in what it writes first."""
        if not self._running or actor == ACTOR:  # nearly always, of writes that did not come by REST
            return None
        signed = self._running.get(access.digest_of(actor))
        once = signed or _COURSE.get()
        if once is None or self._running.get(once.digest) is not once:  # of another family, or at its end
            return None
        if signed is None and once.recorded is not None:
            return None

        def change(draft: Draft, value: Any) -> KeptAnswer:
            kept = KeptAnswer(fingerprint=once.fingerprint) if signed is None else once.record(value)
            self._record(draft, once, kept)
            return kept

        return HookedChange(change=change, kept=once.note)

    def _record(self, draft: Draft, once: IdempotentRequest, kept: KeptAnswer) -> None:
        """Claim the key for a request and say what it did; `Conflict` if another one has the key."""
        held = draft.claimed_by(USED_KEY, self._namespace, _FIELD, once.digest)
        use = None if held is None else Use.read(held)
        if use is not None and use != once.use:
            if not use.is_over(draft.now_ns):
                raise Conflict(
                    "a request with this Idempotency-Key was carried out meanwhile", hint="ask again"
                )
            self._forget(draft, once.digest, use)
        draft.claim(USED_KEY, self._namespace, _FIELD, once.digest, str(once.use))
        name = self._name(once.digest, once.use)
        draft.put_secret(name, self._master.seal(msgspec.msgpack.encode(kept), purpose=name))

    def _name(self, digest: str, use: Use) -> str:
        """The name of the secret that a key's record is."""
        if use.request == _BEFORE:
            return f"{self._prefix_before}{use.expires:012d}/{digest}"
        return self._prefix + digest

    def _forget(self, draft: Draft, digest: str, use: Use) -> None:
        draft.release(USED_KEY, self._namespace, _FIELD, digest, str(use))
        draft.delete_secret(self._name(digest, use))

    async def sweep(self) -> int:
        """Forget what has been kept long enough, and of too many the oldest; how many."""
        self._unswept = 0
        now_ns = self._clock.now_ns()
        found = self._store.claims(USED_KEY, self._namespace)
        used = [(Use.read(owner), claim.value) for claim, owner in found]
        old = [one for one in used if one[0].is_over(now_ns)]
        old += _too_many([one for one in used if not one[0].is_over(now_ns)])
        for start in range(0, len(old), SWEEP_BATCH):
            await self._store.transact(
                partial(self._sweep, old=old[start : start + SWEEP_BATCH]),
                actor=ACTOR,
                action="idempotency.sweep",
                touches=(),
            )
        return len(old)

    def _sweep(self, draft: Draft, old: Sequence[tuple[Use, str]]) -> None:
        for use, digest in old:
            # Somebody else may have done so, and the key may have been used again since.
            if draft.claimed_by(USED_KEY, self._namespace, _FIELD, digest) == str(use):
                self._forget(draft, digest, use)


def _too_many(used: Sequence[tuple[Use, str]]) -> Sequence[tuple[Use, str]]:
    """Those beyond the limit, when everybody's newest is kept before anybody's second newest, and so on."""
    seen = Counter[str]()
    ranked = []
    for one in sorted(used, key=lambda one: -one[0].expires):
        ranked.append((seen[one[0].caller], one))
        seen[one[0].caller] += 1
    ranked.sort(key=lambda each: each[0])
    return [one for _, one in ranked[ANSWERS_LIMIT:]]
