"""What an agent should be sent next: keys to make, files to hold. Pure.

An agent's last report tells which files it holds and under which hash. Files are sent in
patches; a patch is repeated only once a report that came after it shows that it did not take,
and ever more slowly if it keeps failing, so that one bad file does not become a storm. A
certificate among them is sent anew well before it runs out, and when another authority signs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.values.times import NS

RETRY = Backoff(first_seconds=2.0, ceiling_seconds=300.0)
KEY_PATIENCE_SECONDS = 30.0
"""How long an agent may take to make its keys before it is asked again."""


CERTIFICATE_USE = 2 / 3
"""The share of its life after which a certificate is issued anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a report says the agent holds."""

    at_ns: int
    config_hash: str
    files: Mapping[str, str]
    """By name; empty text for one that is well."""
    outdated: Collection[str] = ()
    """Those of them that are well but should not be used for much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The last patch that was sent."""

    at_ns: int
    config_hash: str
    names: frozenset[str]
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPatch:
    names: frozenset[str]
    config_hash: str
    attempt: int


def next_patch(
    wanted: Collection[str], config_hash: str, holding: Holding | None, sent: Sent | None, *, now_ns: int
) -> SentPatch | None:
    """The files to send now, if any."""
    needed = _needed(wanted, config_hash, holding)
    if not needed and (holding is None or holding.config_hash == config_hash):
        return None if holding is not None or not wanted else _first(wanted, config_hash, sent)
    if sent is None or sent.config_hash != config_hash:
        return SentPatch(names=needed, config_hash=config_hash, attempt=0)
    if holding is None or holding.at_ns <= sent.at_ns:
        return None  # no word yet about the patch that was sent
    wait_ns = round(RETRY.delay_seconds(sent.attempt, jitter=0.5) * NS)
    if now_ns < sent.at_ns + wait_ns:
        return None
    return SentPatch(names=needed, config_hash=config_hash, attempt=sent.attempt + 1)


def _needed(wanted: Collection[str], config_hash: str, holding: Holding | None) -> frozenset[str]:
    """All files under another hash; under the same one those that are missing or in error."""
    if holding is None or holding.config_hash != config_hash:
        return frozenset(wanted)
    outdated = holding.outdated
    return frozenset(name for name in wanted if holding.files.get(name, "missing") or name in outdated)


def _first(wanted: Collection[str], config_hash: str, sent: Sent | None) -> SentPatch | None:
    """Nothing reported yet: send everything once, do not wait for the first report."""
    if sent is not None and sent.config_hash == config_hash:
        return None
    return SentPatch(names=frozenset(wanted), config_hash=config_hash, attempt=0)


def outdated(
    lives_seconds: Mapping[str, float], issued_at_ns: Mapping[str, int], *, signing_since_ns: int, now_ns: int
) -> frozenset[str]:
    """The certificates that an agent holds and should be sent anew.

    When each was written is by the agent's clock: one that goes wrong costs a few more patches.
    """
    return frozenset(
        name
        for name, life_seconds in lives_seconds.items()
        if name in issued_at_ns
        and (
            issued_at_ns[name] < signing_since_ns
            or now_ns - issued_at_ns[name] >= life_seconds * CERTIFICATE_USE * NS
        )
    )


def keys_to_ask(
    wanted: Collection[str], present: Collection[str], asked_at_ns: Mapping[str, int], *, now_ns: int
) -> list[str]:
    """The key pairs to ask for now."""
    patience_ns = round(KEY_PATIENCE_SECONDS * NS)
    return sorted(
        name
        for name in set(wanted) - set(present)
        if name not in asked_at_ns or now_ns >= asked_at_ns[name] + patience_ns
    )
