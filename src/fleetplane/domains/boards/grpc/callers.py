"""Which board is calling, and for which boards it may speak.

A certificate settles it. On the listener without TLS nothing does: a caller there is the board
that it said it was over the same connection, and only boards without a certificate can be
spoken for in that way.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetplane.domains.boards.access import PLAIN_AGENT
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import Board, number_of
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.rpc import CallContext


@dataclass(frozen=True, slots=True)
class Callers:
    boards: Boards
    presence: BoardPresence

    def is_agent(self, context: CallContext) -> bool:
        return self.is_plain(context) or credentials.board_of(context.principal) is not None

    def is_plain(self, context: CallContext) -> bool:
        return PLAIN_AGENT in context.principal.roles

    def itself(self, context: CallContext) -> int | None:
        """The board behind a call that does not say; None if there is none, or it may not be trusted."""
        certified = credentials.board_of(context.principal)
        if certified is not None or not self.is_plain(context):
            return certified
        number = self.presence.behind(context.listener, context.peer())
        board = self.boards.get(number) if number is not None else None
        return number if board is not None and not status_of(board).key_digest else None

    def speaking_for(self, context: CallContext, number: int, *, field: str = "id") -> int:
        """The board that an agent's call is about, which must be itself."""
        certified = credentials.board_of(context.principal)
        if certified is not None:
            if number not in (0, certified):
                raise PermissionDenied(f"{field} is not that of the certificate", field=field)
            return certified
        if not number:
            known = self.itself(context)
            if known is None:
                raise InvalidArgument(f"{field} is required", field=field)
            return known
        if status_of(self.boards.require(number, field=field)).key_digest:
            raise PermissionDenied(
                f"board {number} has a certificate, and is spoken for only with it", field=field
            )
        return number

    def bind(self, context: CallContext, board: Board | int) -> None:
        """Remember who is at the other end."""
        number = board if isinstance(board, int) else number_of(board)
        self.presence.bind(context.listener, context.peer(), number)
