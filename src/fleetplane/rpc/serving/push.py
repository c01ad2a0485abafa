"""Handing a message to the transport from outside the task that serves the call.

With a thousand watches, resuming a thousand tasks costs more than sending a thousand messages. A
transport that has room takes a message at once, and then there is nobody to resume. One that has
not, or that only begins to send when awaited, leaves something to await; whoever pushed sees to it
that the call's own task does so before anything else is sent.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from fleetplane.rpc.serving.framing import Framed

_TAKEN: Final = object()


class Shared:
    """Messages for many streams, as the event that a transport takes: made once, and sent as it is."""

    __slots__ = ("event", "messages", "taken")

    def __init__(self, framed: Framed) -> None:
        self.event = {"type": "http.response.body", "body": framed.body, "more_body": True}
        self.messages = framed.messages
        self.taken: object = None
        """What the transport answered when it took the message. An iterator that has ended does not begin
        again: when it answers with the same one, it has taken the message as well."""

    def pushed(self, sending: Any) -> Awaitable[None] | None:
        """What `push` makes of the transport's answer."""
        left = _left(sending)
        if left is None:
            self.taken = sending
        return left


def push(send: Callable[[dict[str, Any]], Awaitable[None]], event: dict[str, Any]) -> Awaitable[None] | None:
    """Send an event; None if the transport took it, else what the call's task must await first."""
    return _left(send(event))


def _left(sending: Any) -> Awaitable[None] | None:
    if not hasattr(sending, "__next__"):
        return sending  # type: ignore[no-any-return]
    pending = next(sending, _TAKEN)
    return None if pending is _TAKEN else _rest(sending, pending)


@types.coroutine
def _rest(steps: Generator[Any, None, None], pending: Any) -> Generator[Any, None, None]:
    """What is left of an awaitable whose first step is taken."""
    yield pending
    yield from steps
