"""Doing something once for all who ask with the same request id.

Whoever asks again, after a lost answer say, gets the first one's outcome; whoever asks while it is
being done waits for it. What was refused has not been done, and may be asked for again. What was
begun and cut short has been done to nobody knows what extent, and is not begun a second time, unless
doing it twice is the same as doing it once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FleetplaneError, InvalidArgument

REMEMBERED: Final = 1024
REMEMBERED_BYTES: Final = 8 * 1024 * 1024
KEEP_SECONDS: Final = 600.0
ID_LIMIT: Final = 128

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Act(Generic[T]):
    request: bytes
    outcome: asyncio.Future[T]
    ends_at: float
    size: int


class OnceByMethod(Generic[T]):
    """One per method. `size_of` says what remembering an outcome costs."""

    def __init__(
        self, clock: Clock, *, repeatable: bool, size_of: Callable[[T], int] = lambda _: 256
    ) -> None:
        self._clock = clock
        self._repeatable = repeatable
        self._size_of = size_of
        self._acts: OrderedDict[tuple[str, str], _Act[T]] = OrderedDict()
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"<Once {len(self._acts)} acts, {self._held_bytes} bytes>"

    async def do(self, caller: str, request_id: str, request: bytes, act: Callable[[], Awaitable[T]]) -> T:
        """`request` is what must be the same when the id is."""
        if not request_id:
            return await act()
        if len(request_id) > ID_LIMIT:
            raise InvalidArgument(f"request_id has at most {ID_LIMIT} characters", field="request_id")
        self._forget_old()
        key = (caller, request_id)
        known = self._acts.get(key)
        if known is not None:
            if known.request != request:
                raise InvalidArgument("request_id was used for another request", field="request_id")
            return await asyncio.shield(known.outcome)
        return await self._begin(key, request, act)

    async def _begin(self, key: tuple[str, str], request: bytes, act: Callable[[], Awaitable[T]]) -> T:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_seen)
        entry = self._acts[key] = _Act(
            request=request,
            outcome=outcome,
            ends_at=self._clock.monotonic() + KEEP_SECONDS,
            size=len(request),
        )
        self._held_bytes += entry.size
        try:
            done = await act()
        except FleetplaneError as error:
            outcome.set_exception(error)
            self._drop(key)
            raise
        except BaseException:
            outcome.set_exception(
                Conflict("this was begun before, and cut short", details={"cause": "cut-short"}, hint="")
            )
            if self._repeatable:
                self._drop(key)
            raise
        outcome.set_result(done)
        size = self._size_of(done)
        entry.size += size
        self._held_bytes += size
        self._make_room()
        return done

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        while self._acts:
            key, entry = next(iter(self._acts.items()))
            if now < entry.ends_at or not entry.outcome.done():
                return
            self._drop(key)

    def _make_room(self) -> None:
        done = [key for key, entry in self._acts.items() if entry.outcome.done()]
        for key in done:
            if len(self._acts) <= REMEMBERED and self._held_bytes <= REMEMBERED_BYTES:
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        self._held_bytes -= self._acts.pop(key).size


def _seen(outcome: asyncio.Future[T]) -> None:
    """An outcome that nobody waits for is no news to the loop."""
    if not outcome.cancelled():
        outcome.exception()
