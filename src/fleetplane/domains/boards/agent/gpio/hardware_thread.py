"""One thread that owns a piece of hardware, and the way from the event loop to it.

Calls run one after another, in the order they came. A caller that gives up before its call began has
called nothing off the wire: the call is dropped, because a pin that moves minutes after its caller
was told "failed" is worse than one that does not. A driver that hangs holds up this thread only.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from fleetplane.domains.boards.agent.gpio.chip import HardwareOverloaded, HardwareSilent
from fleetplane.kernel.errors import Unavailable

CALL_SECONDS: Final = 5.0
"""A call takes microseconds; a bus that is held takes a second."""
WAITING_LIMIT: Final = 1024
JOIN_SECONDS: Final = 6.0
"""One call that runs into its limit, and a little."""

T = TypeVar("T")


class HardwareThread:
    def __init__(
        self, name: str, *, call_seconds: float = CALL_SECONDS, waiting_limit: int = WAITING_LIMIT
    ) -> None:
        self._name = name
        self._call_seconds = call_seconds
        self._waiting_limit = waiting_limit
        # Jobs differ in what they return; each caller knows its own.
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<HardwareThread {self._name} waiting={self._jobs.qsize()}>"

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Raises what it raises."""
        if self._closed:
            raise Unavailable(f"{self._name} is stopped", details={"cause": "stopped"})
        if self._jobs.qsize() >= self._waiting_limit:
            raise HardwareOverloaded(f"{self._waiting_limit} calls wait for {self._name} already")
        self._ensure_thread()
        job: Future[T] = Future()
        self._jobs.put((job, work))
        try:
            async with asyncio.timeout(self._call_seconds):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise HardwareSilent(
                f"{self._name} did not answer within {self._call_seconds:g} s",
                hint="see `dmesg` for what holds it up",
            ) from None

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """Let what waits finish, then `last`, which no cancellation can drop any more.

        A thread still stuck when the time is up is left behind, and HardwareSilent says so.
        """
        if self._closed:
            return
        self._closed = True
        job: Future[None] = Future()
        if last is not None:
            self._ensure_thread()
            self._jobs.put((job, last))
        if self._thread is None:
            return
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            raise HardwareSilent(f"{self._name} did not stop within {JOIN_SECONDS:g} s")
        if last is not None:
            job.result()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, work = entry
            if not job.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # whatever it is, it is the caller's to see
                job.set_exception(error)
            else:
                job.set_result(result)
            del job, work, entry
