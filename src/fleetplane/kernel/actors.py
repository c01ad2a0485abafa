"""Names of actors, as the audit log stores and shows them.

A write that must happen once is signed with more than a name: with the digest of the key under
which its caller may send it again. That belongs to the write; whoever keeps or shows a name takes
`who` of it.
"""

from __future__ import annotations

_ONCE = "&once="
"""Between an actor and the digest. No actor has it otherwise: what callers say is quoted there."""


def signed(actor: str, digest: str) -> str:
    return f"{actor}{_ONCE}{digest}"


def who(actor: str) -> str:
    return actor.partition(_ONCE)[0]


def digest_of(actor: str) -> str:
    """What it was signed with; empty if with nothing."""
    return actor.partition(_ONCE)[2]
