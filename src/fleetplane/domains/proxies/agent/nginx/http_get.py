"""A minimal HTTP client (one GET with bounded waits and bytes) and the reading of NGINX's `stub_status`.

The agent asks its own NGINX and probes upstreams with it, many times a minute; a client library would be the
heaviest thing the agent loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TEXT: Final = re.compile(
    rb"Active connections:\s*(\d+)\s+server accepts handled requests\s+(\d+)\s+(\d+)\s+(\d+)\s+"
    rb"Reading:\s*(\d+)\s+Writing:\s*(\d+)\s+Waiting:\s*(\d+)"
)


@dataclass(frozen=True, slots=True)
class StubStatus:
    active: int
    accepted: int
    handled: int
    requests: int
    reading: int
    writing: int
    waiting: int


def parse_stub_status(text: bytes) -> StubStatus | None:
    found = _TEXT.search(text)
    return None if found is None else StubStatus(*(int(number) for number in found.groups()))


ANSWER_LIMIT_BYTES: Final = 64 * 1024
_REFUSED: Final = (OSError, ValueError, EOFError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes


async def get_unix(
    path: Path, target: str, *, timeout: float, sent: Callable[[], None] = lambda: None
) -> HttpAnswer | None:
    """None if there was no answer in time, or none that can be read. `sent` is called before either."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=ANSWER_LIMIT_BYTES)
            return await _exchange(reader, writer, target, host="localhost", sent=sent)
    except (*_REFUSED, TimeoutError):
        return None


async def get_tcp(
    address: str, target: str, *, host: str, timeout: float, with_body: bool = False
) -> HttpAnswer | None:
    """The status alone is read unless told otherwise; what a probe is answered with need not be small."""
    name, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(name.strip("[]"), int(port))
            return await _exchange(reader, writer, target, host=host, with_body=with_body)
    except (*_REFUSED, TimeoutError):
        return None


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: str,
    *,
    host: str,
    with_body: bool = True,
    sent: Callable[[], None] = lambda: None,
) -> HttpAnswer:
    try:
        lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "User-Agent: fleetplane", "Connection: close"]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        sent()
        await writer.drain()
        version, status, *_ = (await reader.readuntil(b"\n")).split(maxsplit=2)
        if not version.startswith(b"HTTP/"):
            raise ValueError("not HTTP")
        if not with_body:
            return HttpAnswer(int(status), b"")
        rest = bytearray()
        while chunk := await reader.read(4096):
            rest += chunk
            if len(rest) > ANSWER_LIMIT_BYTES:
                raise ValueError("the answer is too long")
        return HttpAnswer(int(status), bytes(rest).partition(b"\r\n\r\n")[2])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
