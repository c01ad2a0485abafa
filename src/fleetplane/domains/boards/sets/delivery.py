"""Bringing sets to boards: which version each is to have, sent in the answer to its report.

A board is sent what it should have once, and tells in its next reports what came of it. What it says is
written only when it is news. Where a rollout or a policy holds a set, its boards have the version at which
they are held (`fleet/rollouts/holds.py`), whatever is newest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.domains.boards.commands import runs
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board, number_of
from fleetplane.domains.boards.sets import rules
from fleetplane.domains.boards.sets.rules import (
    BOARD_APPLIED,
    BOARD_SET,
    SETS,
    SUBJECT,
    Applied,
    AppliedSpec,
    AppliedStatus,
    BoardSet,
    set_scope,
)
from fleetplane.fleet.rollouts import holds
from fleetplane.fleet.rollouts.holds import HoldReader, digest
from fleetplane.fleet.selectors import Facts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.kernel.watch import EventType

CAPABILITY = "programs"
"""Of agents that keep programs running; they report what they have of their set."""
PACKAGES = "packages"
"""Of agents that install packages; others would pass them over and report the rest as in place."""
TOO_OLD = "its agent is of a version that installs no packages"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSettings:
    """What a board is to have; of no set, nothing."""

    set: str = ""
    version: str = ""
    content: bytes = rules.encoded(None)


class BoardSets:
    def __init__(self, store: Store, clock: Clock, clusters: Callable[[], Mapping[int, str]]) -> None:
        """`clusters` has the names of clusters by number."""
        self._store = store
        self._clock = clock
        self._clusters = clusters
        self._holds = HoldReader(store, SUBJECT)
        self._ordered: tuple[int, Sequence[BoardSet]] = (-1, ())
        self._again: set[int] = set()
        """Boards that are to try once more what they could not take."""

    def __repr__(self) -> str:
        return f"<BoardSets {len(self.all())}>"

    # Reading.

    def all(self) -> Sequence[BoardSet]:
        """Every set, in the order in which they are asked whether a board is theirs."""
        revision = self._store.kind_revision(BOARD_SET)
        if self._ordered[0] != revision:
            self._ordered = revision, rules.ordered(self._store.list(BOARD_SET, SCOPE))
        return self._ordered[1]

    def set_of(self, board: Board) -> BoardSet | None:
        """The set that a board belongs to."""
        sets = self.all()
        return rules.chosen(_facts(board, self._clusters()), sets) if sets else None

    def members(self, name: str) -> Sequence[Board]:
        """The boards of a set whose agents keep programs running, by their names."""
        found, sets, clusters = [], self.all(), self._clusters()
        for board in self._store.list(BOARD, SCOPE):
            chosen = rules.chosen(_facts(board, clusters), sets) if is_able(board) else None
            if chosen is not None and chosen.name == name:
                found.append(board)
        return sorted(found, key=lambda one: (one.spec.name, number_of(one)))

    def applied(self, name: str, board: Board) -> AppliedStatus:
        """What a board has of a set."""
        found = self._store.get(BOARD_APPLIED, set_scope(name), board.name)
        return found.status if found is not None and found.status is not None else AppliedStatus()

    def wanted(self, board: Board) -> WantedSettings:
        """What a board is to have."""
        found = self.set_of(board)
        if found is None:
            return WantedSettings()
        newest = rules.encoded(found.spec)
        scope = set_scope(found.name)
        version = self._holds.wanted(scope, board.name) or digest(newest)
        content = newest if version == digest(newest) else self._holds.content(scope, version)
        if content is None:  # never: what targets are steered to is kept
            return WantedSettings(set=found.name, version=digest(newest), content=newest)
        return WantedSettings(set=found.name, version=version, content=content)

    # Reports.

    async def heard(self, board: Board, said: pb.AppliedState) -> pb.DesiredState | None:
        """Take in what a board has; what it is to have, if it was not sent that yet."""
        number, wanted = number_of(board), self.wanted(board)
        message = rules.message(wanted.set, wanted.version, wanted.content)
        if message.packages and PACKAGES not in status_of(board).capabilities:
            said = pb.AppliedState(
                set=said.set,
                version=said.version,
                wanted_set=wanted.set,
                wanted=wanted.version,
                error=TOO_OLD,
                failures=said.failures + 1,
                programs=said.programs,
            )
            await self._note(board, wanted.set, said)
            return None
        await self._note(board, wanted.set, said)
        is_sent = (said.wanted_set, said.wanted) == (wanted.set, wanted.version)
        if is_sent and not (said.error and await self._is_to_try_again(wanted.set, number)):
            return None
        self._again.discard(number)
        return message

    async def again(self, name: str, boards: Collection[int]) -> None:
        """Have boards of a set try once more what they could not take, after their next report."""
        if self._store.shared:
            await self._say_again(name, boards, again=True)
        else:
            self._again |= set(boards)

    async def _is_to_try_again(self, name: str, board: int) -> bool:
        """Whether it is; and if so, that it was told."""
        if not self._store.shared:
            return board in self._again
        stored = self._store.get(BOARD_APPLIED, set_scope(name), str(board))
        return stored is not None and stored.spec.again and await self._say_again(name, [board], again=False)

    async def _say_again(self, name: str, boards: Collection[int], *, again: bool) -> bool:
        scope = set_scope(name)

        def change(draft: Draft) -> bool:
            said = False
            for board in boards:
                stored = draft.get(BOARD_APPLIED, scope, str(board))
                if stored is not None and stored.spec.again is not again:
                    spec = msgspec.structs.replace(stored.spec, again=again)
                    draft.put(BOARD_APPLIED, scope, str(board), spec=spec, status=stored.status)
                    said = True
            return said

        touches = [BOARD_APPLIED.key(scope, str(board)) for board in boards]
        done = await self._store.transact(change, actor="server", action="board.again", touches=touches)
        return done.value

    async def _note(self, board: Board, name: str, said: pb.AppliedState) -> None:
        scope = set_scope(name)
        if not name:
            await self._forget([one for one in self._records() if one.name == board.name])
            return
        before = self._store.get(BOARD_APPLIED, scope, board.name)
        known = before.status if before is not None else None
        after = rules.reported(name, said, known or AppliedStatus(), now_ns=self._clock.now_ns())
        if after == known:
            return
        stale = [] if before else [one for one in self._records() if one.name == board.name]

        def change(draft: Draft) -> None:
            for one in stale:
                if draft.get(BOARD_APPLIED, one.scope, one.name) is not None:
                    draft.delete(BOARD_APPLIED, one.scope, one.name)
            if draft.get(BOARD, SCOPE, board.name) is not None:
                present = draft.get(BOARD_APPLIED, scope, board.name)
                spec = present.spec if present is not None else AppliedSpec(board=number_of(board))
                draft.put(BOARD_APPLIED, scope, board.name, spec=spec, status=after)

        keys = {one.key for one in stale} | {BOARD_APPLIED.key(scope, board.name), board.key}
        await self._store.transact(change, actor=f"boards/{board.name}", action="board.applied", touches=keys)

    def _records(self) -> Sequence[Applied]:
        return self._store.list(BOARD_APPLIED, SETS)

    async def _forget(self, records: Sequence[Applied]) -> None:
        if not records:
            return

        def change(draft: Draft) -> None:
            for one in records:
                if draft.get(BOARD_APPLIED, one.scope, one.name) is not None:
                    draft.delete(BOARD_APPLIED, one.scope, one.name)

        await self._store.transact(
            change, actor="server", action="board.applied", touches={one.key for one in records}
        )

    async def run(self) -> None:
        """Forget what boards had that are gone; until cancelled."""
        async with self._store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                gone = {one.resource.name for one in batch.events if one.type is EventType.DELETED}
                if gone:
                    self._again -= {int(name) for name in gone}
                    await self._forget([one for one in self._records() if one.name in gone])

    # Holding.

    def commit_hook(self, _actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
        """Part of every change of a set: holds its boards at what it was, where rollouts are asked for."""
        names = sorted({key.name for key in touches if key.kind == BOARD_SET.name})
        if not names:
            return None
        keys = frozenset[Key]().union(*(holds.keys_of(SUBJECT, set_scope(name)) for name in names))
        return HookedChange(change=lambda draft, _made: _hold(draft, names), touches=keys)


def _facts(board: Board, clusters: Mapping[int, str]) -> Facts:
    """What a board can be selected by; not how it is, or it would lose its programs when it is not well."""
    found = dict(runs.facts(board, clusters))
    found.pop(rules.STATUS, None)
    return found


def _hold(draft: Draft, names: Sequence[str]) -> None:
    changed: dict[str, tuple[BoardSet | None, BoardSet | None]] = {}
    for before, after in draft.differences():
        found = before or after
        if found is not None and found.kind == BOARD_SET.name:
            changed[found.name] = before, after
    for name in names:
        old, new = changed.get(name, (None, None))
        scope = set_scope(name)
        if new is None:  # a set that is gone holds nobody: another of its name begins anew
            if old is not None:
                holds.forget(draft, SUBJECT, scope)
            continue
        earlier = rules.encoded(old.spec if old is not None else None)
        later = rules.encoded(new.spec)
        if earlier != later:
            holds.changing(draft, SUBJECT, scope, before=earlier, after=later)


def is_able(board: Board) -> bool:
    """Whether a board's agent keeps programs running."""
    return CAPABILITY in status_of(board).capabilities


def content_of(source: Store | Draft, scope: str) -> bytes:
    """The newest version of a set, by the scope of its rollouts."""
    found = source.get(BOARD_SET, SCOPE, scope.removeprefix(f"{SETS}/"))
    return rules.encoded(found.spec if found is not None else None)
