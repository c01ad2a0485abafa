"""People who follow the logs of boards over REST, each over a connection of its own, and count what comes.

`python -m bench.boards_readers PLAN` follows one board with each reader. Lines are numbered, so that a line
that is missing, and that nobody told of, is found.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.boards_nodes import orders, tell

ENTRY: Final = b"event: entry\n"
_DROPPED: Final = re.compile(rb'"dropped":(\d+)')
_NUMBER: Final = re.compile(rb'"message":"(\d+) ')


class Reader(asyncio.Protocol):
    """One board's log, as server-sent events."""

    def __init__(self, board: int, authority: str, token: str) -> None:
        self._request = (
            f"GET /api/v1/nodes/{board}/logs?follow=true HTTP/1.1\r\nhost: {authority}\r\n"
            f"authorization: Bearer {token}\r\naccept: text/event-stream\r\n\r\n"
        ).encode()
        self._carry = b""
        self._last = 0
        self.lines = 0
        self.dropped = 0
        self.untold = 0
        """Lines that are missing without a word."""
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        *blocks, self._carry = (self._carry + data).split(b"\n\n")
        for block in blocks:
            if ENTRY in block:
                self._take(block)
            elif b"event: e" in block or b"HTTP/1.1 4" in block:
                self.failure = block.decode(errors="replace")[-500:]

    def _take(self, block: bytes) -> None:
        number, told = _NUMBER.search(block), _DROPPED.search(block)
        if number is None or told is None:
            self.failure = block.decode(errors="replace")[-500:]
            return
        dropped, at = int(told[1]), int(number[1])
        self.lines += 1
        self.dropped += dropped
        self.untold += at - self._last - 1 - dropped
        self._last = at

    def connection_lost(self, _error: Exception | None) -> None:
        self.failure = self.failure or "the server ended the connection"


async def main(plan: dict[str, Any]) -> None:
    host, _, port = plan["web"].rpartition(":")
    readers = [Reader(board, plan["web"], plan["token"]) for board in plan["boards"]]
    loop = asyncio.get_running_loop()
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, host, int(port))  # type: ignore[misc]
    tell({})
    async for _ in orders():
        failures = [reader.failure for reader in readers if reader.failure]
        tell(
            {
                "lines": sum(reader.lines for reader in readers),
                "dropped": sum(reader.dropped for reader in readers),
                "untold": sum(reader.untold for reader in readers),
                "failures": len(failures),
                "failure": failures[0] if failures else "",
            }
        )


if __name__ == "__main__":
    uvloop.run(main(json.loads(Path(sys.argv[1]).read_text())))
