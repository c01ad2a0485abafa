"""Keys that ask to take a known board's place, and what operators say to that.

A machine that comes back without its certificate may be the board after its card was replaced, or
someone who read its serial number off a label. Only a person can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.boards.kinds import (
    APPROVAL,
    SCOPE,
    Approval,
    ApprovalSpec,
    ApprovalState,
    ApprovalStatus,
)
from fleetplane.kernel.errors import FailedPrecondition, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

PER_BOARD_LIMIT = 8
"""Waiting for one board: more is an attack, not a mistake."""


class Approvals:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Approvals {len(self._store.list(APPROVAL, SCOPE))}>"

    def all(self) -> Sequence[Approval]:
        return self._store.list(APPROVAL, SCOPE)

    async def approve(self, name: str, *, actor: str) -> Approval:
        """Let the key in when it asks next; the board's present key is good no more from then on."""
        return await self._decide(name, ApprovalState.APPROVED, actor=actor)

    async def reject(self, name: str, *, actor: str) -> Approval:
        return await self._decide(name, ApprovalState.REJECTED, actor=actor)

    async def _decide(self, name: str, state: ApprovalState, *, actor: str) -> Approval:
        def change(draft: Draft) -> Approval:
            found = draft.get(APPROVAL, SCOPE, name)
            if found is None:
                raise NotFound(f"nothing named {name!r} waits for approval", field="name")
            if _state(found) not in (ApprovalState.PENDING, state):
                raise FailedPrecondition(f"{name} was {_state(found)} already")
            status = ApprovalStatus(state=state, decided_by=actor, decided_at_ns=draft.now_ns)
            return draft.put(APPROVAL, SCOPE, name, spec=found.spec, status=status)

        done = await self._store.transact(
            change, actor=actor, action=f"boards.{state.value}", touches=[APPROVAL.key(SCOPE, name)]
        )
        return done.value

    async def forget(self, board: int, *, actor: str) -> None:
        """Whatever waits for a board that is gone."""
        keys = [APPROVAL.key(SCOPE, one.name) for one in self.all() if one.spec.board == board]

        def change(draft: Draft) -> None:
            for key in keys:
                if draft.get(APPROVAL, SCOPE, key.name) is not None:
                    draft.delete(APPROVAL, SCOPE, key.name)

        if keys:
            await self._store.transact(change, actor=actor, action="boards.forget_approvals", touches=keys)


# Parts of the transaction that registers a board.


def approval_key(board: int, key_digest: str) -> Key:
    return APPROVAL.key(SCOPE, f"{board}-{key_digest[:32]}")


def ask(draft: Draft, spec: ApprovalSpec) -> ApprovalState:
    """How the request of this key stands; made if there is none."""
    name = approval_key(spec.board, spec.key_digest).name
    found = draft.get(APPROVAL, SCOPE, name)
    if found is not None:
        return _state(found)
    waiting = sum(
        one.spec.board == spec.board and _state(one) is ApprovalState.PENDING
        for one in draft.list(APPROVAL, SCOPE)
    )
    if waiting >= PER_BOARD_LIMIT:
        raise ResourceExhausted(f"{waiting} keys already wait to take the place of board {spec.board}")
    draft.put(APPROVAL, SCOPE, name, spec=spec, status=ApprovalStatus(state=ApprovalState.PENDING))
    return ApprovalState.PENDING


def used(draft: Draft, board: int, key_digest: str) -> None:
    """Forget an approval that has been made use of."""
    name = approval_key(board, key_digest).name
    if draft.get(APPROVAL, SCOPE, name) is not None:
        draft.delete(APPROVAL, SCOPE, name)


def _state(found: Approval) -> ApprovalState:
    return found.status.state if found.status is not None else ApprovalState.PENDING
