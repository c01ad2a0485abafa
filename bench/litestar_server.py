"""The reference for REST: a bare Litestar that says hello, on the HTTP server and event loop of ours.

It authenticates nobody, limits nothing, reads no body, keeps nothing and audits nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop
from litestar import Litestar, get, patch

from fleetplane.rpc import ListenerSpec, open_listener


@get("/hello")
async def hello() -> dict[str, str]:
    return {"hello": "world"}


@patch("/hello")
async def hello_again() -> dict[str, str]:
    return {"hello": "world"}


async def serve(ready: Path) -> None:
    app = Litestar([hello, hello_again], openapi_config=None, logging_config=None)
    spec = ListenerSpec(name="web", addresses=("127.0.0.1:0",), app=app, http1=True)
    async with open_listener(spec, grace_seconds=0.1) as listener:
        staging = ready.with_suffix(f".{os.getpid()}")
        staging.write_text(json.dumps({"listeners": {"web": listener.addresses}}))
        staging.replace(ready)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
