"""Where libraries run that block: threads that nobody has to wait for.

A thread cannot be interrupted. So one who loses patience, or the whole process, goes on without
it; but the slot stays taken until the thread has ended, so that what hangs cannot pile up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fleetplane.domains.proxies.acme.orders import IssuanceFailed

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 4
"""Two orders at a time with one call each, and room for revocations and questions."""
CALL_SECONDS = 60.0
"""A call that takes longer has failed, waiting for a free slot included."""


class AcmeWorkers:
    def __init__(self, name: str, *, threads: int = THREADS, call_seconds: float = CALL_SECONDS) -> None:
        self._name = name
        self._slots = asyncio.Semaphore(threads)
        self._call_seconds = call_seconds
        self.running = 0

    def __repr__(self) -> str:
        return f"<Workers {self._name} running={self.running}>"

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            async with asyncio.timeout(self._call_seconds):
                return await self._run(partial(call, *args, **kwargs))
        except TimeoutError as error:
            raise IssuanceFailed(f"{self._name} did not answer in {self._call_seconds:g} seconds") from error

    async def _run(self, call: Callable[[], R]) -> R:
        loop = asyncio.get_running_loop()
        await self._slots.acquire()
        self.running += 1
        outcome: asyncio.Future[R] = loop.create_future()

        def settle(tell: Callable[[Any], None], what: object) -> None:
            self.running -= 1
            self._slots.release()
            if not outcome.done():  # whoever asked may have left
                tell(what)

        def work() -> None:
            tell: Callable[[Any], None] = outcome.set_result
            what: object
            try:
                what = call()
            except Exception as error:
                tell, what = outcome.set_exception, error
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, tell, what)

        threading.Thread(target=work, name=f"acme/{self._name}", daemon=True).start()
        return await outcome
