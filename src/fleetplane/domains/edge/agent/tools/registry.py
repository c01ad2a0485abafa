"""Which tools there are on this machine: the built-in ones, and those of installed packages.

A package offers one as an entry point in the group `fleetplane.edge_tools`: its object is called
without arguments and gives a `Tool`. A name is given once; a package cannot take a built-in one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from fleetplane.domains.edge.agent.tools.command import RunCommand
from fleetplane.domains.edge.agent.tools.contract import Tool
from fleetplane.domains.edge.agent.tools.files import ListFolder, ReadFile, WriteFile
from fleetplane.kernel.errors import SettingsError

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
