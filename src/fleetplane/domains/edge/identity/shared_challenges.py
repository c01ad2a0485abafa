"""Challenges that any of several servers on one database can see answered.

A machine that enrols makes two calls, and a balancer may send each to another server. What was asked of
it is then kept in the database, sealed: a worker's candidature has its token in it. A single server keeps
challenges in memory alone.
"""

from __future__ import annotations

from functools import partial

import msgspec

from fleetplane.domains.edge.identity.challenges import CHALLENGES_LIMIT, Candidate, Challenge
from fleetplane.domains.edge.kinds import CHALLENGE, ChallengeSpec, principal_name
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

DROPPED_AT_ONCE = 256
"""Of those that wait longest, when there are too many."""
SWEEP_SECONDS = 300.0
ACTOR = "system/edge"


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    nonce: bytes
    candidate: Candidate


class SharedChallenges:
    def __init__(self, store: Store, master: MasterKey, *, limit: int = CHALLENGES_LIMIT) -> None:
        self._store = store
        self._master = master
        self._limit = limit

    def __repr__(self) -> str:
        return f"<SharedChallenges {self._store.count(CHALLENGE)}/{self._limit}>"

    async def keep(self, challenge: Challenge, *, life_seconds: float) -> None:
        """Let other servers know of a challenge; returns once they can."""
        name = challenge.challenge_id
        content = msgspec.msgpack.encode(_Sealed(nonce=challenge.nonce, candidate=challenge.candidate))
        sealed = self._master.seal(content, purpose=_purpose(name))
        doomed = self._crowded_out()

        def change(draft: Draft) -> None:
            _forget(draft, doomed)
            expires_at_ns = draft.now_ns + round(life_seconds * 1e9)
            draft.put(CHALLENGE, "", name, spec=ChallengeSpec(sealed=sealed, expires_at_ns=expires_at_ns))

        await self._store.transact(
            change,
            actor=principal_name(challenge.candidate.node_id),
            action="edge.attest",
            touches=[CHALLENGE.key("", name), *doomed],
        )

    def find(self, challenge_id: str) -> tuple[bytes, Candidate, int] | None:
        """The nonce, who asks, and when it expires; None if there is no such challenge."""
        found = self._store.get(CHALLENGE, "", challenge_id)
        if found is None:
            return None
        content = self._master.open(found.spec.sealed, purpose=_purpose(challenge_id))
        kept = msgspec.msgpack.decode(content, type=_Sealed)
        return kept.nonce, kept.candidate, found.spec.expires_at_ns

    def _crowded_out(self) -> list[Key]:
        if self._store.count(CHALLENGE) < self._limit:
            return []
        oldest = sorted(self._store.list(CHALLENGE), key=lambda found: found.spec.expires_at_ns)
        return [found.key for found in oldest[:DROPPED_AT_ONCE]]

    async def sweep(self) -> int:
        """Forget those that have expired; how many."""
        now_ns = self._store.clock.now_ns()
        ended = [found.key for found in self._store.list(CHALLENGE) if found.spec.expires_at_ns < now_ns]
        for start in range(0, len(ended), DROPPED_AT_ONCE):
            keys = ended[start : start + DROPPED_AT_ONCE]
            await self._store.transact(
                partial(_forget, keys=keys), actor=ACTOR, action="edge.sweep_challenges", touches=keys
            )
        return len(ended)


def _forget(draft: Draft, keys: list[Key]) -> None:
    for key in keys:
        if draft.get(CHALLENGE, key.scope, key.name) is not None:
            draft.delete(CHALLENGE, key.scope, key.name)


def _purpose(challenge_id: str) -> str:
    return f"edge-challenge/{challenge_id}"
