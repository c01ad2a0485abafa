"""Asking original agents for their figures, so that they have a past: they send none by themselves."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import structlog

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.inventory.boards import SERVER, Boards, status_of
from fleetplane.domains.boards.kinds import Board, BoardSilence, number_of
from fleetplane.domains.boards.metrics.history import MetricsHistory
from fleetplane.domains.boards.ports import MetricsIntake
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

log = structlog.get_logger(__name__)

AT_ONCE: Final = 8
"""Boards asked at the same time; each answers within a second, or is asked again at the next turn."""


class OriginalMetrics:
    def __init__(
        self,
        *,
        boards: Boards,
        links: NodeLinks,
        history: MetricsHistory,
        intake: MetricsIntake,
        clock: Clock,
        every_seconds: float,
    ) -> None:
        self._boards = boards
        self._links = links
        self._history = history
        self._intake = intake
        self._clock = clock
        self._every_seconds = every_seconds
        self._room = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<OriginalMetrics every {self._every_seconds:g}s>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(self._every_seconds)
            async with Boundary() as tasks:
                for board in self._boards.all():
                    if self._is_asked(board):
                        tasks.once(
                            "boards/original-metrics-of",
                            partial(self._ask, number_of(board)),
                            about=board.name,
                        )

    def _is_asked(self, board: Board) -> bool:
        status = status_of(board)
        return (
            status.speaks_original and status.silence is BoardSilence.NONE and self._links.is_callable(board)
        )

    async def _ask(self, number: int) -> None:
        async with self._room:
            try:
                sample = await self._history.now(number, asked=CallOrigin(actor=SERVER))
            except FleetplaneError as error:  # whether it is there at all is told elsewhere
                log.debug("boards.original_metrics_missed", board=number, error=error.message)
                return
            self._intake.metrics(number, sample)
