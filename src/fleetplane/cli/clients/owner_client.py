"""The server's owner, at its socket: reaching it is the credential.

As in `client`, gRPC is never called on the main thread.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc

from fleetplane.cli.clients.client import CHANNEL_OPTIONS, away
from fleetplane.cli.output import working
from fleetplane.cli.parameters import parse_address
from fleetplane.client.local import socket_of
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2_grpc


class OwnerConnection:
    """One channel and one stub; a context manager."""

    def __init__(self, channel: grpc.Channel, stub: Any, call_seconds: float) -> None:
        self._channel = channel
        self._stub = stub
        self._call_seconds = call_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        away(self._channel.close)

    def call(self, method: str, request: Any) -> Any:
        with working("waiting for the server"):
            return away(lambda: getattr(self._stub, method)(request, timeout=self._call_seconds))


class OwnerClient(OwnerConnection):
    """The server's owner, at its socket."""

    stub: ClassVar[type[Any]]

    def __init__(self, data_dir: Path, *, call_seconds: float) -> None:
        socket = socket_of(data_dir)
        channel = grpc.insecure_channel(parse_address(f"unix://{socket}"), options=CHANNEL_OPTIONS)
        super().__init__(channel, self.stub(channel), call_seconds)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class OperatorsClient(OwnerClient):
    """Operators' tokens, and sessions for the person at the socket."""

    stub = operators_pb2_grpc.OperatorsAdminStub
