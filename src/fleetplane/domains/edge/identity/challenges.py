"""Nonces that were handed out and wait to be signed.

They are kept in memory: a server that restarts lets its callers ask again, which costs them a second. The
table is bounded by dropping what waits longest; to push a caller out between its two calls, others would
have to ask as often as the table is long. One challenge leads to one answer: a caller that lost it gets
the same again.

Where several servers share a database, a balancer may send the two calls of an enrolment to different
servers. `SharedChallenges` then keeps challenges in the database, sealed, since a worker's candidature
holds its token.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from fleetplane.domains.edge.expiring_records import ExpiringRecords
from fleetplane.domains.edge.identity.tokens import EnrolmentToken
from fleetplane.domains.edge.kinds import CHALLENGE, ChallengeSpec, NodeResources, WorkerRole, principal_name
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.ids import new_uuid

NONCE_BYTES = 32
CHALLENGES_LIMIT = 16_384
"""Half a kilobyte each: 8 MB, and ten thousand machines may enrol at once."""
TRIES_LIMIT = 5
"""Answers taken to one challenge, of which at most one is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentCandidate:
    """Who asks to come in, by its own words."""

    node_id: str
    public_key: bytes
    role: WorkerRole | None
    """None for edge daemons."""
    capabilities: NodeResources = field(default_factory=NodeResources)
    tags: tuple[str, ...] = ()
    grpc_address: str = ""
    enrolment_token: str = ""


@dataclass(slots=True, kw_only=True)
class Challenge:
    challenge_id: str
    nonce: bytes
    candidate: EnrolmentCandidate
    expires_at: float
    shared: bool = False
    """Other servers know of it."""
    tries: int = 0
    answer: EnrolmentToken | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Guards: one challenge is answered with one token, however often it is asked at once."""


class Challenges:
    def __init__(self, clock: Clock, *, life_seconds: float, limit: int = CHALLENGES_LIMIT) -> None:
        self._clock = clock
        self._life_seconds = life_seconds
        self._limit = limit
        self._waiting: OrderedDict[str, Challenge] = OrderedDict()
        self.crowded_out = 0

    def __repr__(self) -> str:
        return f"<Challenges {len(self._waiting)}/{self._limit}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def make(self, candidate: EnrolmentCandidate) -> Challenge:
        return self._add(
            Challenge(
                challenge_id=new_uuid(self._clock),
                nonce=self._clock.token_bytes(NONCE_BYTES),
                candidate=candidate,
                expires_at=self._clock.monotonic() + self._life_seconds,
            )
        )

    def _add(self, made: Challenge) -> Challenge:
        self._drop_expired(self._clock.monotonic())
        if len(self._waiting) >= self._limit:
            self._waiting.popitem(last=False)
            self.crowded_out += 1
        self._waiting[made.challenge_id] = made
        return made

    def knows(self, challenge_id: str) -> bool:
        return challenge_id in self._waiting

    def adopt(
        self, challenge_id: str, *, nonce: bytes, candidate: EnrolmentCandidate, seconds: float
    ) -> None:
        """Take answers to a challenge that another server made, for as long as it lasts."""
        expires_at = self._clock.monotonic() + seconds
        self._add(
            Challenge(
                challenge_id=challenge_id,
                nonce=nonce,
                candidate=candidate,
                expires_at=expires_at,
                shared=True,
            )
        )

    def attempt(self, challenge_id: str, node_id: str) -> Challenge:
        """The challenge that somebody claims to answer; counts the attempt."""
        found = self._waiting.get(challenge_id)
        if found is None or found.expires_at <= self._clock.monotonic():
            raise _refused("unknown", "there is no such challenge, or it has expired")
        if found.candidate.node_id != node_id:
            raise _refused("node", "the challenge was made for another node")
        found.tries += 1
        if found.tries > TRIES_LIMIT:
            if not found.shared:  # a shared one would be found again, and its tries forgotten
                del self._waiting[challenge_id]
            raise _refused("tries", "the challenge was answered too often")
        return found

    def _drop_expired(self, now: float) -> None:
        # They expire in the order in which they were made, but for those of other servers, which may stay a
        # little longer than they are good for.
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if oldest.expires_at > now:
                return
            del self._waiting[oldest.challenge_id]


def _refused(cause: str, message: str) -> Unauthenticated:
    return Unauthenticated(message, hint="attest again", details={"cause": f"challenge {cause}"})


SWEEP_SECONDS = 300.0
CONTENT_LIMIT_BYTES = 16 * 1024
"""Of what a machine says of itself; some hundred bytes are usual."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    nonce: bytes
    candidate: EnrolmentCandidate


class SharedChallenges:
    def __init__(self, store: Store, master: MasterKey, *, limit: int = CHALLENGES_LIMIT) -> None:
        self._records = ExpiringRecords(store, CHALLENGE, limit=limit)
        self._master = master

    def __repr__(self) -> str:
        return f"<SharedChallenges {self._records!r}>"

    async def keep(self, challenge: Challenge, *, life_seconds: float) -> None:
        """Let other servers know of a challenge; returns once they can."""
        name = challenge.challenge_id
        content = msgspec.msgpack.encode(_Sealed(nonce=challenge.nonce, candidate=challenge.candidate))
        if len(content) > CONTENT_LIMIT_BYTES:  # whoever asks has proved nothing yet
            raise InvalidArgument(
                f"capabilities and address take more than {CONTENT_LIMIT_BYTES} bytes", field="capabilities"
            )
        sealed = self._master.seal(content, purpose=_purpose(name))
        await self._records.keep(
            name,
            lambda now_ns: ChallengeSpec(sealed=sealed, expires_at_ns=now_ns + round(life_seconds * 1e9)),
            actor=principal_name(challenge.candidate.node_id),
            action="edge.attest",
        )

    def find(self, challenge_id: str) -> tuple[bytes, EnrolmentCandidate, int] | None:
        """The nonce, who asks, and when it expires; None if there is no such challenge."""
        found = self._records.get(challenge_id)
        if found is None:
            return None
        content = self._master.open(found.sealed, purpose=_purpose(challenge_id))
        kept = msgspec.msgpack.decode(content, type=_Sealed)
        return kept.nonce, kept.candidate, found.expires_at_ns

    async def sweep(self) -> int:
        """Forget those that have expired; how many."""
        return await self._records.sweep()


def _purpose(challenge_id: str) -> str:
    return f"edge-challenge/{challenge_id}"
