"""Calls to a node as its callers make them, and what comes back when they fail."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi

CODE = grpc.StatusCode
LOW, HIGH = pb.GPIORequest.LOW, pb.GPIORequest.HIGH
READ, CONFIGURE, PWM, RELEASE = (
    pb.GPIORequest.READ,
    pb.GPIORequest.CONFIGURE,
    pb.GPIORequest.PWM,
    pb.GPIORequest.RELEASE,
)
OUTPUT, INPUT = pi.AGENT_GPIO_DIRECTION_OUTPUT, pi.AGENT_GPIO_DIRECTION_INPUT
SHELL = {
    "name": "tests",
    "rules": [
        {"program": "/bin/sh", "forms": [["-c", "(?s).*"]]},
        {"program": "/bin/echo", "forms": [["[a-z]+", "..."]]},
        {"program": "/bin/sleep", "forms": [["[0-9.]+"]]},
    ],
}
COMMANDS = {"profiles": [SHELL]}


class Failure:
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.words = error.details() or ""
        self.reason, self.cause = "", ""
        trailing = dict(error.trailing_metadata() or ())
        raw = trailing.get("grpc-status-details-bin")
        if isinstance(raw, bytes):
            for detail in status_pb2.Status.FromString(raw).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    self.reason, self.cause = info.reason, info.metadata.get("cause", "")


async def failing(call: Any) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return Failure(raised.value)


def gpio(pin: int = 18, **said: Any) -> pb.GPIORequest:
    return pb.GPIORequest(pin=pin, **said)


def command(script: str, **more: Any) -> pb.CommandRequest:
    return pb.CommandRequest(command="sh", args=["-c", script], **more)
