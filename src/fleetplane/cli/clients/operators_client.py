"""The server's owner about operators: tokens for others, and sessions for the person at the socket."""

from __future__ import annotations

from fleetplane.cli.clients.owner_client import OwnerClient
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2_grpc


class OperatorsClient(OwnerClient):
    stub = operators_pb2_grpc.OperatorsAdminStub
