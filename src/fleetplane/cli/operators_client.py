"""The server's owner, at its socket, about operators. As in `client`, gRPC is kept off the main thread."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from fleetplane.cli.address import parse_address
from fleetplane.cli.client import CHANNEL_OPTIONS, away
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2_grpc
from fleetplane.kernel.errors import Unavailable

SOCKET = "admin.sock"
"""In the server's data directory."""


class OperatorsClient:
    def __init__(self, data_dir: Path, *, call_seconds: float) -> None:
        socket = (data_dir / SOCKET).absolute()
        if not socket.exists():
            raise Unavailable(
                f"no server listens at {socket}",
                hint="--data-dir names the data directory of one that runs; elsewhere, use --server",
            )
        self._channel = grpc.insecure_channel(parse_address(f"unix://{socket}"), options=CHANNEL_OPTIONS)
        self._stub = operators_pb2_grpc.OperatorsAdminStub(self._channel)
        self._call_seconds = call_seconds

    def __repr__(self) -> str:
        return "<OperatorsClient>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        away(self._channel.close)

    def call(self, method: str, request: Any) -> Any:
        return away(lambda: getattr(self._stub, method)(request, timeout=self._call_seconds))
