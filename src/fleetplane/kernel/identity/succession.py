"""How one authority follows another: a table of three steps, so that nobody is left without trust.

    steady     one authority signs and is trusted
    announced  the next one is trusted too and signs nothing: everyone has time to learn of it
    switched   the next one signs; the one before is still trusted, and has signed the next one's certificate
               for those who know no other; its key is gone
    steady     the one before is trusted no more

A step cannot be left out. Who has learnt of an authority, and who still shows a certificate of the
one before, is known to those who issue; whether it is time for a step is decided there. Pure.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fleetplane.kernel.errors import FailedPrecondition


class SuccessionPhase(StrEnum):
    STEADY = "steady"
    ANNOUNCED = "announced"
    SWITCHED = "switched"


class AuthorityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One authority as it is kept, inside the seal."""

    certificate_der: bytes
    private_der: bytes | None = None
    """Gone as soon as it signs nothing any more."""


class Succession(msgspec.Struct, frozen=True, kw_only=True):
    current: AuthorityRecord
    """The one that signs."""
    following: AuthorityRecord | None = None
    preceding: AuthorityRecord | None = None
    cross_der: bytes | None = None
    """The certificate of the one that signs, signed by the preceding one: for those who trust that alone."""
    trusted_since_ns: int = 0
    """When the set of those that are trusted last changed."""
    signing_since_ns: int = 0
    """When the one that signs began to."""
    changes: int = 0
    """How often the set of those that are trusted has changed."""

    @property
    def phase(self) -> SuccessionPhase:
        if self.following is not None:
            return SuccessionPhase.ANNOUNCED
        return SuccessionPhase.SWITCHED if self.preceding is not None else SuccessionPhase.STEADY

    @property
    def trusted(self) -> tuple[AuthorityRecord, ...]:
        """The one that signs first."""
        return tuple(
            record for record in (self.current, self.following, self.preceding) if record is not None
        )

    def announce(self, following: AuthorityRecord, *, now_ns: int) -> Succession:
        _expect(self.phase, SuccessionPhase.STEADY)
        return self._after(following=following, trusted_since_ns=now_ns, changes=self.changes + 1)

    def switch(self, *, now_ns: int, cross_der: bytes | None = None) -> Succession:
        _expect(self.phase, SuccessionPhase.ANNOUNCED)
        assert self.following is not None
        before = msgspec.structs.replace(self.current, private_der=None)
        return self._after(
            current=self.following,
            following=None,
            preceding=before,
            cross_der=cross_der,
            signing_since_ns=now_ns,
        )

    def retire(self, *, now_ns: int) -> Succession:
        _expect(self.phase, SuccessionPhase.SWITCHED)
        return self._after(preceding=None, cross_der=None, trusted_since_ns=now_ns, changes=self.changes + 1)

    def _after(self, **changed: object) -> Succession:
        return msgspec.structs.replace(self, **changed)


_WORDS = {
    SuccessionPhase.STEADY: "only one authority is trusted, and no other was announced",
    SuccessionPhase.ANNOUNCED: "the next authority was announced and does not sign yet",
    SuccessionPhase.SWITCHED: "the authority before the present one is still trusted",
}
_HINTS = {
    SuccessionPhase.STEADY: "announce the next authority first",
    SuccessionPhase.ANNOUNCED: "switch to it next",
    SuccessionPhase.SWITCHED: "retire the one before first",
}


def _expect(found: SuccessionPhase, wanted: SuccessionPhase) -> None:
    if found is not wanted:
        raise FailedPrecondition(_WORDS[found], hint=_HINTS[found], details={"phase": found.value})
