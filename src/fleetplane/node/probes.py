"""Answers those who ask about the agent, over plain HTTP.

`/healthz` is liveness: 200 for as long as the agent runs, connected or not. Whoever probes it, such as a load
balancer or a service manager, must not take every machine for dead while the server restarts. `/readyz` is
200 while the agent is connected, else 503. Nothing is told that a stranger should
not know, and nothing is read but the end of the request's head.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import structlog

from fleetplane.kernel.errors import SettingsError

HEAD_LIMIT_BYTES: Final = 8 * 1024
WAIT_SECONDS: Final = 5.0
"""For a request, and for its answer to be taken."""
ASKERS_LIMIT: Final = 32
"""Connections at once; further ones are closed."""
LIVENESS: Final = b"/healthz"
READINESS: Final = b"/readyz"
END_OF_HEAD: Final = b"\r\n\r\n"


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`; an empty host means every address of the machine."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"health address {address!r} is not HOST:PORT", field="health_addr")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Probes:
    def __init__(self, address: str, is_connected: Callable[[], bool]) -> None:
        self._host, self._port = split_address(address)
        self._is_connected = is_connected
        self._askers = 0
        self.port = 0
        """Where it answers, once it does."""

    def __repr__(self) -> str:
        return f"<Probes port={self.port}>"

    async def run(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """Until cancelled. An address that cannot be had is said; the machine is served all the same."""
        try:
            server = await asyncio.start_server(
                self._answer, self._host or None, self._port, limit=HEAD_LIMIT_BYTES
            )
        except OSError as error:
            log.error("health_address_not_served", host=self._host, port=self._port, error=str(error))
            return
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            log.info("health_address_served", host=self._host, port=self.port)
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._askers += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                if self._askers <= ASKERS_LIMIT:
                    head = await reader.readuntil(END_OF_HEAD)
                    writer.write(self._response(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it went away, or is no HTTP client: nobody to tell
        finally:
            self._askers -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b""
        elif path not in (LIVENESS, READINESS):
            status, body = "404 Not Found", b"ask /healthz or /readyz\n"
        elif path == LIVENESS or self._is_connected():
            status, body = "200 OK", b"ok\n"
        else:
            status, body = "503 Service Unavailable", b"not connected\n"
        lines = (
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        told = b"" if method == b"HEAD" else body
        return "\r\n".join(lines).encode() + END_OF_HEAD + told
