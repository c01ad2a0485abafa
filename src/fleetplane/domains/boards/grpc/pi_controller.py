"""`pi_controller.PiControllerService`, put together from parts that each hold some of its methods.

A part is any object with methods named as in the contract; which part has which is settled here,
once, and a method that two parts claim is a mistake. What no part has is answered UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

from google.protobuf.message import Message

from fleetplane.domains.boards.access import PI_CONTROLLER
from fleetplane.kernel.errors import SettingsError, Unimplemented
from fleetplane.rpc import CallContext


class PiControllerService:
    def __init__(self, parts: Iterable[object]) -> None:
        found = tuple(parts)
        self.missing: list[str] = []
        """Methods that no part has."""
        for method in PI_CONTROLLER.methods:
            offers = [part for part in found if hasattr(part, method.name)]
            if len(offers) > 1:
                names = ", ".join(type(part).__name__ for part in offers)
                raise SettingsError(f"{method.name} is offered by {names}")
            if offers:
                behaviour = getattr(offers[0], method.name)
            else:
                self.missing.append(method.name)
                behaviour = _nowhere(method.name, streaming=method.server_streaming)
            setattr(self, method.name, behaviour)

    def __repr__(self) -> str:
        return f"<PiControllerService missing={len(self.missing)}>"


def _nowhere(name: str, *, streaming: bool) -> Callable[[Message, CallContext], object]:
    def refusal() -> Unimplemented:
        return Unimplemented(f"this server does not offer {name}")

    async def unary(_request: Message, _context: CallContext) -> Message:
        raise refusal()

    async def stream(_request: Message, _context: CallContext) -> AsyncIterator[Message]:
        raise refusal()
        yield  # a generator, although it never gets here

    return stream if streaming else unary
