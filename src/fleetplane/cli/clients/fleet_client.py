"""The server's owner about every domain at once: why things are as they are, and freezes."""

from __future__ import annotations

from fleetplane.cli.clients.owner_client import OwnerClient
from fleetplane.gen.fleetplane.fleet.v1 import fleet_pb2_grpc


class FleetClient(OwnerClient):
    stub = fleet_pb2_grpc.FleetAdminStub
