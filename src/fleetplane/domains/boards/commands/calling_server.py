"""Which server calls boards, as the outcome ledger sees it: sessions of targets that have none of their own.

Boards are called, and one of several servers calls them: the active one. When a server becomes that, it says
so in the store, and the revision of that record is the number of every board's session until the next one
does. So any server issues and cancels commands; those of a server that is gone are lost with its sessions.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board
from fleetplane.kernel.commands.sessions import SessionReader
from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store

ACTOR = "system/boards"
NAME = "commands"
BOARD_CALLER: Kind[Nothing, Nothing] = Kind("board-caller", Nothing, Nothing)


class CallingServer:
    """Keeps `kernel.commands.sessions.Places`."""

    def __init__(self, store: Store, is_callable: Callable[[Board], bool]) -> None:
        self._store = store
        self._is_callable = is_callable
        self._session: int | None = None

    def __repr__(self) -> str:
        return f"<CallingServer session={self._session}>"

    @property
    def shared(self) -> bool:
        return self._store.shared

    async def begin(self) -> None:
        """From now on this server calls boards."""
        if not self.shared:
            return

        def change(draft: Draft) -> Resource[Nothing, Nothing]:
            return draft.put(BOARD_CALLER, SCOPE, NAME, spec=Nothing(), renew=True)

        done = await self._store.transact(
            change, actor=ACTOR, action="boards.call", touches=[BOARD_CALLER.key(SCOPE, NAME)]
        )
        self._session = done.value.revision

    def session_here(self, agent: str) -> int | None:
        """The session of a board that this server calls."""
        if self._session is None or self.named(self._store, agent) is None:
            return None
        return self._session

    def named(self, reader: SessionReader, agent: str) -> int | None:
        """The session that counts; None for a board that cannot be called."""
        board = reader.get(BOARD, SCOPE, agent)
        caller = reader.get(BOARD_CALLER, SCOPE, NAME)
        if board is None or caller is None or not self._is_callable(board):
            return None
        return caller.revision
