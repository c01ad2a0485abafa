"""Forgetting a board: its record, and whatever its certificate still opens."""

from __future__ import annotations

from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.joining import credentials
from fleetplane.kernel.identity.revocation import Revocations


async def delete_board(boards: Boards, revocations: Revocations, number: int, *, actor: str) -> None:
    board = await boards.delete(number, actor=actor)
    # Its certificate is refused already, because the board is gone; this ends what is open with it.
    await revocations.revoke(
        principal=credentials.principal_of(number),
        reason="the board was deleted",
        actor=actor,
        expires_at_ns=status_of(board).certificate_expires_at_ns,
    )
