"""What daemons measure of their machines, told by a call of its own beside their stream.

The stream's own heartbeat says nothing but that a daemon lives, and is not ours to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleetplane.domains.edge.identity.assembly import CALL_RATE, LISTENER
from fleetplane.domains.edge.releases import DaemonRegister
from fleetplane.fleet.figures import CPU, DISK, LOAD, MEMORY, FigureKeeper, Measure
from fleetplane.fleet.figures_service import SERVICE
from fleetplane.rpc import Authentication, CallContext, Needs, service_rows

PREFIX: Final = "edge"
MEASURES: Final = (
    CPU,
    MEMORY,
    DISK,
    LOAD,
    Measure(name="runningCommands", title="Commands that run", unit="", most=1e6),
    Measure(name="waitingResults", title="Results that wait to be told", unit="", most=1e9),
)
# As with every call of daemons, the proof is in the request.
ROWS: Final = tuple(
    service_rows(
        SERVICE,
        None,
        listener=LISTENER,
        authentication=Authentication.ANONYMOUS,
        rate=CALL_RATE,
        needs=Needs.WRITES,
    )
)


class DaemonFigures:
    """Takes figures of the node whose token a call shows, and of no other."""

    def __init__(self, register: DaemonRegister, figures: FigureKeeper) -> None:
        self._register = register
        self._figures = figures

    def __repr__(self) -> str:
        return f"<DaemonFigures {self._figures!r}>"

    def take(self, context: CallContext, name: str, objects: Mapping[str, Mapping[str, float]]) -> None:  # noqa: ARG002  # the token says it
        """Daemons look after nothing but their own machine."""
        node = self._register.node(context)
        self._figures.take(node.scope, node.name, objects.get("", {}))
