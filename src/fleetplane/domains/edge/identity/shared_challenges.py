"""Challenges that any of several servers on one database can see answered.

A machine that enrols makes two calls, and a balancer may send each to another server. What was asked of
it is then kept in the database, sealed: a worker's candidature has its token in it. A single server keeps
challenges in memory alone.
"""

from __future__ import annotations

import msgspec

from fleetplane.domains.edge.expiring_records import ExpiringRecords
from fleetplane.domains.edge.identity.challenges import CHALLENGES_LIMIT, Challenge, EnrolmentCandidate
from fleetplane.domains.edge.kinds import CHALLENGE, ChallengeSpec, principal_name
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store

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
