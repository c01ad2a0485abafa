"""The reference of the edge figures: the same stream on the same transport, and nothing behind it.

`python -m bench.edge_bare READY tls|plain CONNECTIONS` takes any message of any daemon without looking at
it, counts it, and can send one message to all of them. It keeps no records, checks no signature and
writes nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import uvloop

from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallContext,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    open_listener,
)
from fleetplane.rpc.listening.sockets import connections_of
from fleetplane.server import endpoints

LISTENER = "edge"
SERVICE = "aegis.cluster.v1.NodeClusterService"
COUNT, FAN = f"/{SERVICE}/Count", f"/{SERVICE}/Fan"
METHODS = ("ConnectEdge", "Count", "Fan")


class Bare:
    def __init__(self) -> None:
        self._open: set[CallContext] = set()
        self._heard = 0
        self._answers: asyncio.Queue[float] | None = None

    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        await context.send_initial_metadata(())
        await anext(requests)
        self._open.add(context)
        try:
            async for _ in requests:
                self._heard += 1
                if self._answers is not None:
                    self._answers.put_nowait(time.perf_counter())
        finally:
            self._open.discard(context)

    async def count(self, request: bytes, context: CallContext) -> bytes:
        return struct.pack(">Q", self._heard)

    async def fan(self, request: bytes, context: CallContext) -> bytes:
        """Send it to all; when the first answer came, and when the last."""
        self._answers = asyncio.Queue()
        begun, asked = time.perf_counter(), tuple(self._open)
        for one in asked:
            waiting = one.push(request)
            if waiting is not None:
                await waiting
        times = [await self._answers.get() - begun for _ in asked]
        self._answers = None
        return struct.pack(">dd", times[0], times[-1])


def _app(bare: Bare) -> GrpcApp:
    rows = [
        MethodRow(
            path=f"/{SERVICE}/{name}",
            listener=LISTENER,
            authentication=Authentication.ANONYMOUS,
            permission=None,
        )
        for name in METHODS
    ]
    anyone = Principal(name="anyone", roles=frozenset())
    app = GrpcApp(
        listener=LISTENER,
        table=MethodTable(rows),
        access=AccessTable({}),
        authenticators={Authentication.ANONYMOUS: lambda _connection: anyone},
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    handlers: dict[str, Any] = {
        "ConnectEdge": grpc.stream_stream_rpc_method_handler(bare.connect),
        "Count": grpc.unary_unary_rpc_method_handler(bare.count),
        "Fan": grpc.unary_unary_rpc_method_handler(bare.fan),
    }
    app.add_registered_method_handlers(SERVICE, handlers)
    app.seal()
    return app


async def serve(ready: Path, *, tls: bool, connections: int) -> None:
    clock, stop = SystemClock(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app, addresses = _app(Bare()), ("127.0.0.1:0",)
    settings = StoreSettings(path=ready.with_suffix(".db"))
    async with Store.open(settings, kinds=(), clock=clock) as store:
        spec = ListenerSpec(name=LISTENER, addresses=addresses, app=app)
        if tls:  # with a certificate of the same kind
            authority = await Authority.load_or_create(store, MasterKey(bytes(32), clock), clock)
            spec = endpoints.encrypted(spec, authority)
        (number,) = connections_of([connections])
        async with open_listener(replace(spec, connections=number), grace_seconds=1) as listener:
            staging = ready.with_suffix(".staging")
            staging.write_text(json.dumps({"listeners": {"web": listener.addresses}}))
            staging.replace(ready)
            await stop.wait()
            await app.drain(1)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), tls=sys.argv[2] == "tls", connections=int(sys.argv[3])))
