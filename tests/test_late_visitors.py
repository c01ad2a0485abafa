"""Who comes to a stand-in while that closes is nobody's leak."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest


async def _visited(turns: int) -> socket.socket:
    """A server that closes so many turns of the loop after somebody has come."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        except asyncio.CancelledError:
            return  # Python asks for the outcome of whoever was cancelled
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    visitor = socket.create_connection(server.sockets[0].getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    server.close()
    return visitor


@pytest.mark.parametrize("turns", range(8))
def test_whoever_comes_in_the_last_turns_is_let_go_of(turns: int) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with asyncio.Runner() as runner:
            runner.run(_visited(turns)).close()
        gc.collect()
    assert not [str(one.message) for one in found]
