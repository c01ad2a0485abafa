"""The reference of the boards' logs: the same streams of the same boards, read by a plain grpc.aio client.

`python -m bench.boards_bare PLAN` opens `StreamLogs` at every board of the plan and counts what comes. It
passes nothing on to anyone, keeps nothing, and checks nothing but the boards' certificates.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.boards_nodes import orders, tell
from fleetplane.domains.boards.joining.credentials import host_of
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc


class Bare:
    def __init__(self) -> None:
        self.lines = 0
        self.dropped = 0

    async def read(self, board: tuple[int, str, int], own: grpc.ChannelCredentials) -> None:
        number, address, port = board
        options = (("grpc.ssl_target_name_override", host_of(number)), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.secure_channel(f"{address}:{port}", own, options=options) as channel:
            stub: Any = boards_pb2_grpc.NodeAgentStub(channel)
            async for entry in stub.StreamLogs(pb.LogFilter(follow=True)):
                self.lines += 1
                self.dropped += entry.dropped


async def main(plan: dict[str, Any]) -> None:
    own = grpc.ssl_channel_credentials(*(plan[name].encode() for name in ("ca", "key", "certificate")))
    bare = Bare()
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(bare.read(board, own)) for board in plan["boards"]]
        tell({})
        async for _ in orders():
            tell({"lines": bare.lines, "dropped": bare.dropped})
        for one in reading:
            one.cancel()


if __name__ == "__main__":
    uvloop.run(main(json.loads(Path(sys.argv[1]).read_text())))
