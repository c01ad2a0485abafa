"""`fleetplane.fleet.v1.AgentFigures`: what agents measure, on the listener of their domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.rpc import CallContext

SERVICE = pb.DESCRIPTOR.services_by_name["AgentFigures"]
NEXT_SECONDS = 30.0
"""Between two reports of an agent: as often as heartbeats of daemons."""
OBJECTS_LIMIT = 1024
"""Of one report: the most GPUs that a machine is served for."""
VALUES_LIMIT = 64
"""Of one object."""


class FigureIntake(Protocol):
    """Where a domain takes figures of its agents."""

    def take(self, context: CallContext, name: str, objects: Mapping[str, Mapping[str, float]]) -> None:
        """Of the agent that a call proves; raises where it proves none."""
        ...


class FigureService:
    """The servicer for the agents of one domain."""

    def __init__(self, intake: FigureIntake) -> None:
        self._intake = intake

    def __repr__(self) -> str:
        return f"<FigureService {self._intake!r}>"

    async def Report(
        self, request: pb.ReportFiguresRequest, context: CallContext
    ) -> pb.ReportFiguresResponse:
        if len(request.objects) > OBJECTS_LIMIT:
            raise InvalidArgument(f"objects has more than {OBJECTS_LIMIT} entries", field="objects")
        objects: dict[str, Mapping[str, float]] = {}
        for index, one in enumerate(request.objects):
            if len(one.values) > VALUES_LIMIT:
                field = f"objects[{index}].values"
                raise InvalidArgument(f"{field} has more than {VALUES_LIMIT} entries", field=field)
            objects[one.object] = one.values
        self._intake.take(context, request.name, objects)
        return pb.ReportFiguresResponse(next_seconds=NEXT_SECONDS)
