"""The reference of `fan_out_effort.py`: streams on the same HTTP server and event loop, and nothing else.

`python -m bench.bare_streams READY`. Whoever calls `HOLD` has an open stream; the body of a call to `SEND`
goes to all of them as it came, and its own answer is an empty message. There is no gRPC layer: nothing is
checked, counted, encoded or kept.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from fleetplane.rpc import ListenerSpec, open_listener

HOLD, SEND = "/bare.Streams/Hold", "/bare.Streams/Send"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/grpc")],
    "trailers": False,
}
EMPTY_MESSAGE = bytes(5)


class Streams:
    def __init__(self) -> None:
        self._open: set[Any] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (event := await receive())["type"] == "http.request":
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        await send(START)
        if scope["path"] == SEND:
            for one in tuple(self._open):
                await one({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": EMPTY_MESSAGE})
            return
        self._open.add(send)
        try:
            # The client counts this one: then the stream is held.
            await send({"type": "http.response.body", "body": EMPTY_MESSAGE, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._open.discard(send)


async def serve(ready: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    spec = ListenerSpec(
        name="web", addresses=("127.0.0.1:0",), app=Streams(), connections=1024, per_address=1024
    )
    async with open_listener(spec, grace_seconds=0.1) as listener:
        staging = ready.with_suffix(".staging")
        staging.write_text(json.dumps({"listeners": {"web": listener.addresses}}))
        staging.replace(ready)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
