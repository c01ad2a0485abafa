"""Sign-ins that were finished: each is finished once, by whichever server, whatever the provider thinks.

Kept in the store until the sign-in's own end, ten minutes after it was begun, so that a restart does not
forget them. Written only once the provider has vouched for somebody: strangers write nothing.
"""

from __future__ import annotations

import hashlib

import msgspec

from fleetplane.fleet.people.account_kind import SCOPE
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

ACTOR = "system/people"


class UsedSignInSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Named by the hash of the sign-in's state."""

    ends_at_ns: int


USED_SIGN_IN: Kind[UsedSignInSpec, Nothing] = Kind("used-sign-in", UsedSignInSpec, Nothing)


class UsedSignIns:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def __repr__(self) -> str:
        return f"<UsedSignIns {self._store.count(USED_SIGN_IN)}>"

    def check(self, state: str) -> None:
        """Refuse a sign-in that was finished before, without asking the provider."""
        if self._store.get(USED_SIGN_IN, SCOPE, _name(state)) is not None:
            raise _used()

    async def use(self, state: str, *, ends_at_ns: int) -> None:
        """Finish a sign-in; of two who do so at once one is refused."""
        name = _name(state)

        def change(draft: Draft) -> None:
            if draft.get(USED_SIGN_IN, SCOPE, name) is not None or ends_at_ns <= draft.now_ns:
                raise _used()  # one that is over may be used and forgotten already
            draft.put(USED_SIGN_IN, SCOPE, name, spec=UsedSignInSpec(ends_at_ns=ends_at_ns))

        touches = [USED_SIGN_IN.key(SCOPE, name)]
        await self._store.transact(change, actor=ACTOR, action="people.oidc_finish", touches=touches)

    async def sweep(self) -> None:
        """Forget sign-ins whose own time is over: they are refused for that."""
        now_ns = self._clock.now_ns()
        over = [one.name for one in self._store.list(USED_SIGN_IN, SCOPE) if one.spec.ends_at_ns <= now_ns]

        def change(draft: Draft) -> None:
            for name in over:
                if draft.get(USED_SIGN_IN, SCOPE, name) is not None:
                    draft.delete(USED_SIGN_IN, SCOPE, name)

        if over:
            touches = [USED_SIGN_IN.key(SCOPE, name) for name in over]
            await self._store.transact(change, actor=ACTOR, action="people.oidc_sweep", touches=touches)


def _used() -> Unauthenticated:
    return Unauthenticated(
        "this sign-in was finished before", hint="sign in again", details={"cause": "state"}
    )


def _name(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()
