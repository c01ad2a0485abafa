"""Passing an execution on to the worker that runs it, and its events back.

The request goes on as it came: its envelope is the proof that the worker checks for itself. One hop
is allowed, so that two servers that hold each other for workers do not pass a call round in circles.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.gen.aegis.runtime.v1 import runtime_pb2
from fleetplane.kernel.errors import FailedPrecondition

HOP_FIELD = "x-fleetplane-forwarded"
EXECUTION_SECONDS = 3600.0
"""For one execution, unless its caller says less."""
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024


async def forward(
    request: pb.ForwardExecutionRequest, address: str, *, seconds: float | None
) -> AsyncIterator[runtime_pb2.ExecutionEvent]:
    """The events of an execution, as its worker tells them; raises the worker's own status."""
    timeout = min(seconds, EXECUTION_SECONDS) if seconds is not None else EXECUTION_SECONDS
    async with _channel(address) as channel:
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        call = stub.ForwardExecution(request, timeout=timeout, metadata=((HOP_FIELD, "1"),))
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()


def refuse_second_hop(hop: bytes | None) -> None:
    if hop is not None:
        raise FailedPrecondition("the execution was forwarded here, and nothing here runs it")


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """`https://` and port 443 mean TLS, anything else cleartext HTTP/2."""
    options = [("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES)]
    scheme, _, rest = address.rpartition("://")
    target = rest if ":" in rest else f"{rest}:443"
    if scheme == "https" or (not scheme and target.endswith(":443")):
        made = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=options)
    else:
        made = grpc.aio.insecure_channel(target, options=options)
    async with made as channel:
        yield channel
