"""The public Python client of the resource API.

    async with fleetplane.client.connect() as fleet:
        async for change in fleet.gpus.watch():
            ...

    with fleetplane.client.connect_sync(context="prod") as fleet:
        for gpu in fleet.gpus.list(fields="status.health=unhealthy").items:
            print(gpu.name)

`connect` is for programs with an event loop (`fleetplane.client.aio`), `connect_sync` for those without
(`fleetplane.client.sync`). Both find the server as the command line does: by what is said, by the
environment, by the current context. Errors are those of `fleetplane.kernel.errors`, `TimeoutError` for an
answer that did not come in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetplane.client.aio import connect as connect
    from fleetplane.client.objects import Change as Change
    from fleetplane.client.objects import Condition as Condition
    from fleetplane.client.objects import Listing as Listing
    from fleetplane.client.objects import Metadata as Metadata
    from fleetplane.client.objects import Object as Object
    from fleetplane.client.places import Place as Place
    from fleetplane.client.requests import Plan as Plan
    from fleetplane.client.requests import Query as Query
    from fleetplane.client.sync import connect as connect_sync
    from fleetplane.client.watches import LogLine as LogLine

_HOMES = {
    "connect": "aio:connect",
    "connect_sync": "sync:connect",
    "Change": "objects:Change",
    "Condition": "objects:Condition",
    "Listing": "objects:Listing",
    "LogLine": "logs:LogLine",
    "Metadata": "objects:Metadata",
    "Object": "objects:Object",
    "Place": "places:Place",
    "Plan": "requests:Plan",
    "Query": "requests:Query",
}
"""Loaded when somebody asks: the command line starts without an event loop."""
__all__ = (  # noqa: RUF022  # as they are read
    "connect",
    "connect_sync",
    "Change",
    "Condition",
    "Listing",
    "LogLine",
    "Metadata",
    "Object",
    "Place",
    "Plan",
    "Query",
)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = home.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
