"""The operators' rig on a thread of its own, for tests whose client blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from structlog.testing import capture_logs
from support.instances.operator_rig import Rig, operator_rig

T = TypeVar("T")
SECONDS = 60.0


class Server:
    def __init__(self, rig: Rig, loop: asyncio.AbstractEventLoop) -> None:
        self.rig = rig
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def tell(self, tenant: str, group: str, instance: str, text: str) -> None:
        self._loop.call_soon_threadsafe(self.rig.errors.tell, tenant, group, instance, text)


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Server]:
    ready: list[Server] = []
    started, stop = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        async with operator_rig(folder, **options) as rig:
            ready.append(Server(rig, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            with capture_logs():  # whose standard output is the command's under test
                asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="operator-rig")
    thread.start()
    try:
        assert started.wait(SECONDS)
        if not ready:
            raise failures[0]
        yield ready[0]
    finally:
        if ready:
            ready[0]._loop.call_soon_threadsafe(stop.set)
        thread.join(SECONDS)
    if failures:
        raise failures[0]
