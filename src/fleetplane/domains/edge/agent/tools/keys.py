"""`edge.rotate_key`: have the daemon replace its own key, for servers that rotate a fleet in waves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fleetplane.domains.edge.agent.tools import arguments as read
from fleetplane.domains.edge.agent.tools.contract import (
    Claims,
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ToolFailed,
)
from fleetplane.kernel.errors import FleetplaneError

KNOWN: Final = frozenset({"keep_old_secs"})
KEEP_OLD_SECONDS: Final = 24 * 3600.0
LONGEST_SECONDS: Final = 366 * 24 * 3600.0


class RotateKey:
    name = "edge.rotate_key"

    def __init__(self, rotate: Callable[[float], Awaitable[str]]) -> None:
        self._rotate = rotate
        """Given for how many seconds to keep the former key, the new one's fingerprint."""

    def __repr__(self) -> str:
        return "<RotateKey>"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        read.only(arguments, KNOWN)
        _keep(arguments)
        return Claims()

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        try:
            made = await self._rotate(_keep(call.arguments))
        except FleetplaneError as error:
            raise ToolFailed(ErrorKind.INTERNAL, f"the key was not replaced: {error.message}") from error
        return CommandOutcomeReport(structured={"key": made})


def _keep(arguments: Mapping[str, object]) -> float:
    return read.number(arguments, "keep_old_secs", KEEP_OLD_SECONDS, low=0, high=LONGEST_SECONDS)
