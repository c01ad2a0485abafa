"""The tools of this machine: the built-in ones, and those of installed packages.

A package offers one as an entry point in the group `fleetplane.edge_tools`: its object is called
without arguments and gives a `Tool`. A name is given once; a package cannot take a built-in one's.
`RotateKey` (`edge.rotate_key`) replaces the daemon's own key, for servers that rotate a fleet in waves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from fleetplane.domains.edge.agent.tools import contract as read
from fleetplane.domains.edge.agent.tools.command import RunCommand
from fleetplane.domains.edge.agent.tools.contract import (
    Claims,
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    Tool,
    ToolFailed,
)
from fleetplane.domains.edge.agent.tools.files import ListFolder, ReadFile, WriteFile
from fleetplane.kernel.errors import FleetplaneError, SettingsError

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


GROUP: Final = "fleetplane.edge_tools"


def installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def load(offers: Iterable[EntryPoint] | None = None) -> Mapping[str, Tool]:
    tools: dict[str, Tool] = {
        tool.name: tool for tool in (RunCommand(), ReadFile(), ListFolder(), WriteFile())
    }
    origins: dict[str, str] = {}
    for offer in installed() if offers is None else offers:
        if offer.value in origins.values():
            continue  # one package may be seen twice, from its source and from its metadata
        tool = _make(offer)
        if tool.name in tools:
            owner = origins.get(tool.name, "the daemon itself")
            raise SettingsError(f"{offer.value} offers the tool {tool.name!r}, and so does {owner}")
        tools[tool.name], origins[tool.name] = tool, offer.value
    return tools


def _make(offer: EntryPoint) -> Tool:
    try:
        tool = offer.load()()
    except Exception as error:
        # Someone else's code: whatever it raises, the reader should learn whose it was.
        raise SettingsError(f"tool {offer.name!r} ({offer.value}) cannot be loaded: {error!r}") from error
    if not isinstance(tool, Tool):
        raise SettingsError(f"tool {offer.name!r} ({offer.value}) has not a name, claims and run")
    return tool
