"""Handing a message to the transport from outside the task that serves the call.

With a thousand watches, resuming a thousand tasks costs more than sending a thousand messages. A
transport that has room takes a message at once, and then there is nobody to resume. One that has
not, or that only begins to send when awaited, leaves something to await; whoever pushed sees to it
that the call's own task does so before anything else is sent.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any


def push(send: Callable[[dict[str, Any]], Awaitable[None]], event: dict[str, Any]) -> Awaitable[None] | None:
    """Send an event; None if the transport took it, else what the call's task must await first."""
    sending: Any = send(event)
    if asyncio.isfuture(sending) or not hasattr(sending, "__next__"):
        return sending  # type: ignore[no-any-return]
    try:
        pending = next(sending)
    except StopIteration:
        return None
    return _rest(sending, pending)


@types.coroutine
def _rest(steps: Generator[Any, None, None], pending: Any) -> Generator[Any, None, None]:
    """What is left of an awaitable whose first step is taken."""
    yield pending
    yield from steps
