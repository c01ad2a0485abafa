"""How every agent runs: until it is asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine


async def until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run until SIGTERM or SIGINT, or until the work fails."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
