"""The boundary around work on one caller's, agent's or object's data: what fails there ends that work alone.

A failure in a plain task group ends all of its siblings, and by way of the groups around it the server. The
children of a `Boundary` end only themselves: the failure is logged and counted, and work that goes on for
ever is begun again, later each time. What must end the server says so with `essential`: the store's writer,
whose failed sync leaves the last writes in doubt, and which notices that another server is the active one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.errors import FleetplaneError

log = structlog.get_logger(__name__)

BACKOFF = Backoff(first_seconds=0.5, ceiling_seconds=60.0)
"""Seven failures in a row until the ceiling."""
STEADY_SECONDS = 120.0
"""Work that went on for this long begins again as if it had never failed."""
ERROR_LIMIT = 500
"""Characters logged of an error's text."""

Work = Callable[[], Awaitable[None]]


class Failures(Collector):
    """Counts contained failures, by the name of the work."""

    def __init__(self) -> None:
        self.by_work: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Failures {sum(self.by_work.values())}>"

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "fleetplane_contained_failures",
            "Failures that ended only the work on one caller's, agent's or object's data",
            labels=("work",),
        )
        for work, count in sorted(self.by_work.items()):
            family.add_metric((work,), count)
        yield family


_FAILURES: ContextVar[Failures] = ContextVar("failures")


def count_into(failures: Failures) -> None:
    """Count what fails in this task, and in those that it begins from now on."""
    _FAILURES.set(failures)


@contextmanager
def contained(work: str, about: object = "") -> Iterator[None]:
    """Let a failure end this block alone, in a loop over many objects. `work` is one of few names."""
    try:
        yield
    except Exception as error:
        note(work, error, about)


def note(work: str, error: BaseException, about: object = "", **more: object) -> None:
    """Log and count a failure that has been dealt with."""
    if (failures := _FAILURES.get(None)) is not None:
        failures.by_work[work] += 1
    text = error.message if isinstance(error, FleetplaneError) else f"{type(error).__name__}: {error}"
    log.error(
        "work.failed",
        work=work,
        about=str(about),
        error=text[:ERROR_LIMIT],
        # An error that we do not know how to explain is a defect: its place is wanted.
        exc_info=None if isinstance(error, FleetplaneError) else error,
        **more,
    )


class Boundary:
    """A task group whose children's failures end only themselves."""

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    def keep(self, work: str, begin: Work, about: object = "") -> asyncio.Task[None]:
        """Begin work, and begin it again whenever it fails, until it returns or is cancelled."""
        return self._tasks.create_task(kept(work, begin, about), name=_name(work, about))

    def once(self, work: str, begin: Work, about: object = "") -> asyncio.Task[None]:
        """Begin work that is given up if it fails."""
        return self._tasks.create_task(_tried(work, begin, about), name=_name(work, about))

    def essential(self, work: str, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work whose failure ends the whole group, and with it the server."""
        return self._tasks.create_task(running, name=work)


def _name(work: str, about: object) -> str:
    return f"{work}/{about}" if about else work


async def kept(work: str, begin: Work, about: object = "") -> None:
    """Do work, and begin it again whenever it fails, until it returns or is cancelled."""
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        begun = loop.time()
        if (error := await _failure(begin)) is None:
            return
        failures = 1 if loop.time() - begun >= STEADY_SECONDS else failures + 1
        wait = BACKOFF.delay_seconds(failures - 1, jitter=0.5)
        note(work, error, about, failures=failures, retry_seconds=wait)
        await asyncio.sleep(wait)


async def _tried(work: str, begin: Work, about: object) -> None:
    if (error := await _failure(begin)) is not None:
        note(work, error, about)


async def _failure(begin: Work) -> BaseException | None:
    """How work failed; None if it returned. Raises if it was cancelled."""
    try:
        await begin()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error  # something that it waited for was cancelled, and not the work
    except Exception as error:
        return error
    return None
