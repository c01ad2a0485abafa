"""Failed logins that every server counts, where several share a database.

Whoever guesses passwords at three servers must not have three times as many guesses. Beside what each server
counts in memory, attempts from addresses that are not known are rows: counted before the password is checked,
and taken back once it was right. Accounts are spread over a fixed number of rows by the hash of their name,
and a row holds a fixed number of entries, so strangers who make names up fill no store: they push out the
oldest entries of a row, and then each server's own limit still holds. A database file has no such rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from fleetplane.kernel.identity.passwords import PAUSE_SECONDS
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS

SCOPE = "people"
ENTRIES_LIMIT = 64
"""In a row. There are 256 rows, of 64 entries with at most 100 moments: 2 MB in all, if they are full."""
ACTOR = "system/logins"
_ALL = "all"
"""The entry of an account for all addresses that are not known."""


class LoginFailuresSpec(msgspec.Struct, frozen=True, kw_only=True):
    at: Mapping[str, tuple[int, ...]] = {}
    """The seconds of failed attempts, by hashes of account and network; what changed last is the last."""


LOGIN_FAILURES: Kind[LoginFailuresSpec, Nothing] = Kind("login-failures", LoginFailuresSpec, Nothing)

Entries = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailurePlace:
    """Where an account's attempts from a network are counted."""

    row: str
    account: str
    pair: str

    @property
    def everywhere(self) -> str:
        return f"{self.account}/{_ALL}"


def _place(namespace: str, account: str, network: str = "") -> _FailurePlace:
    name = hashlib.sha256(f"{namespace}\0{account}".encode("utf-8", "replace")).hexdigest()
    near = hashlib.sha256(network.encode("utf-8", "replace")).hexdigest()[:16]
    return _FailurePlace(row=name[:2], account=name[:24], pair=f"{name[:24]}/{near}")


def wait_seconds(at: tuple[int, ...], limit: int, now: int) -> int:
    """How long the next attempt has to wait after those; 0 if it need not. Pure."""
    recent = [one for one in at if now - one < PAUSE_SECONDS]
    return recent[-limit] + PAUSE_SECONDS - now if len(recent) >= limit else 0


class SharedFailures:
    """Of the accounts of one domain. Only where the store is shared."""

    def __init__(self, store: Store, *, namespace: str, failures: int, everywhere: int) -> None:
        """After so many failures from one network, or from everywhere, the next attempt waits."""
        self._store = store
        self._namespace = namespace
        self._failures = failures
        self._everywhere = everywhere

    def __repr__(self) -> str:
        return f"<SharedFailures {self._namespace}>"

    async def begin(self, account: str, network: str) -> float:
        """How long an attempt has to wait; at 0 it goes on, and counts as failed until it succeeds."""
        place = _place(self._namespace, account, network)

        def change(entries: Entries, now: int) -> float:
            wait = max(
                wait_seconds(entries.get(place.pair, ()), self._failures, now),
                wait_seconds(entries.get(place.everywhere, ()), self._everywhere, now),
            )
            if not wait:
                for name, limit in ((place.pair, self._failures), (place.everywhere, self._everywhere)):
                    entries[name] = (*entries.pop(name, ()), now)[-limit:]
            return float(wait)

        return await self._changed(place, change, "people.login_attempt")

    async def succeeded(self, account: str, network: str) -> None:
        """The attempt was none of a guesser; what others did still counts."""
        place = _place(self._namespace, account, network)

        def change(entries: Entries, _now: int) -> float:
            entries.pop(place.pair, None)
            if kept := entries.get(place.everywhere, ())[:-1]:
                entries[place.everywhere] = kept
            else:
                entries.pop(place.everywhere, None)
            return 0.0

        await self._changed(place, change, "people.login_attempt")

    async def pardon(self, account: str) -> None:
        """Forget the failures of an account whose password was replaced."""
        place = _place(self._namespace, account)

        def change(entries: Entries, _now: int) -> float:
            for name in [one for one in entries if one.startswith(f"{place.account}/")]:
                del entries[name]
            return 0.0

        await self._changed(place, change, "people.login_pardon")

    async def _changed(
        self, place: _FailurePlace, change: Callable[[Entries, int], float], action: str
    ) -> float:
        def changing(draft: Draft) -> float:
            found, now = draft.get(LOGIN_FAILURES, SCOPE, place.row), draft.now_ns // NS
            before = found.spec.at if found is not None else {}
            entries = {name: at for name, at in before.items() if at and now - at[-1] < PAUSE_SECONDS}
            answer = change(entries, now)
            kept = dict(list(entries.items())[-ENTRIES_LIMIT:])
            if kept:
                draft.put(LOGIN_FAILURES, SCOPE, place.row, spec=LoginFailuresSpec(at=kept))
            elif found is not None:
                draft.delete(LOGIN_FAILURES, SCOPE, place.row)
            return answer

        touches = [LOGIN_FAILURES.key(SCOPE, place.row)]
        done = await self._store.transact(changing, actor=ACTOR, action=action, touches=touches)
        return done.value
