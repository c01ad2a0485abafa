"""Hold back threads and sockets at random, in every program that finds this folder on its path.

What usually comes first comes second now and then, so that a test, or a program of ours, that only happens
to be right fails in some runs: see `make faults`. Nothing is lost and nothing is turned around that Python
keeps in order: threads begin later, go on later after they have waited for one another, work in pools begins
and ends later, and an event loop hears of some sockets later. A loop that is not asyncio's own, such as a
server's, has its threads held back only.
"""

from __future__ import annotations

import os
import random
import selectors
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.thread import ThreadPoolExecutor
from typing import Any

THREAD_SHARE, THREAD_SECONDS = 0.1, 0.15
"""How much of what is done in threads begins, or is told to have ended, later, and by how much at most."""
WOKEN_SHARE, WOKEN_TIMES = 0.5, 200
"""How many of the threads that waited for another go on later, and how often one at most: whoever reads a
hundred thousand lines one by one would never come to an end."""
SOCKET_SHARE, SOCKET_SECONDS = 0.01, 0.1
LATER_SHARE = 0.2
"""How many of the sockets that are ready are heard of in the loop's next turn."""


def _seed() -> str:
    return f"{os.environ.get('HOLD_BACK')}/{os.getpid()}"


_dice = random.Random(_seed())
os.register_at_fork(after_in_child=lambda: _dice.seed(_seed()))
_submit = ThreadPoolExecutor.submit
_run = threading.Thread.run
_wait = threading.Condition.wait
_select = selectors.EpollSelector.select
_held: dict[tuple[int, int], float] = {}
"""Until when, by selector and file descriptor."""
_own = threading.local()
"""Of each thread: how often it went on later."""


def _nap(share: float = THREAD_SHARE) -> None:
    if _dice.random() < share:
        time.sleep(_dice.random() ** 2 * THREAD_SECONDS)


def _submit_later(
    self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    def work() -> Any:
        _nap()
        try:
            return fn(*args, **kwargs)
        finally:
            _nap()

    return _submit(self, work)


def _run_later(self: threading.Thread) -> None:
    _nap(WOKEN_SHARE)
    _run(self)


def _wait_longer(self: threading.Condition, timeout: float | None = None) -> bool:
    woken = _wait(self, timeout)
    times = getattr(_own, "times", 0)
    if times < WOKEN_TIMES and not _is_in_a_loop():
        _own.times = times + 1
        state = self._release_save()  # type: ignore[attr-defined]  # as if it had been woken later
        try:
            _nap(WOKEN_SHARE)
        finally:
            self._acquire_restore(state)  # type: ignore[attr-defined]
    return woken


def _is_in_a_loop() -> bool:
    events = sys.modules.get("asyncio.events")  # not imported for this: some programs do without
    return events is not None and events._get_running_loop() is not None


def _select_later(
    self: selectors.EpollSelector, timeout: float | None = None
) -> list[tuple[selectors.SelectorKey, int]]:
    """Without some of those that are ready; as long as they are, the next turn finds them again."""
    found = _select(self, timeout)
    if not found or not _is_in_a_loop():
        return found
    heard = [one for one in found if not _is_held((id(self), one[0].fd)) and _dice.random() >= LATER_SHARE]
    if not heard:
        time.sleep(0.0005)
    _dice.shuffle(heard)
    return heard


def _is_held(key: tuple[int, int]) -> bool:
    now = time.monotonic()
    if key in _held:
        if now < _held[key]:
            return True
        del _held[key]
        return False
    if _dice.random() >= SOCKET_SHARE:
        return False
    _held[key] = now + _dice.random() ** 2 * SOCKET_SECONDS
    return True


if os.environ.get("HOLD_BACK"):
    ThreadPoolExecutor.submit = _submit_later  # type: ignore[method-assign, assignment]
    threading.Thread.run = _run_later  # type: ignore[method-assign]
    threading.Condition.wait = _wait_longer  # type: ignore[method-assign]
    selectors.EpollSelector.select = _select_later  # type: ignore[method-assign, assignment]
