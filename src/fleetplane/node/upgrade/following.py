"""What an agent's session lends to its upgrader and reporter: its connection, and what proves who calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import grpc.aio

Metadata = Callable[[], Sequence[tuple[str, str]]]
Follow = Callable[[grpc.aio.Channel, Metadata], Coroutine[None, None, None]]
"""Check in, or report, over a connection for as long as it lasts."""


async def no_check_in(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    """For agents that were started without the launcher: they are upgraded as they were installed."""
    del channel, metadata


def no_metadata() -> Sequence[tuple[str, str]]:
    """Where the connection itself says who calls."""
    return ()


def together(*follows: Follow) -> Follow:
    """Several at once over the same connection."""

    async def follow(channel: grpc.aio.Channel, metadata: Metadata) -> None:
        async with asyncio.TaskGroup() as tasks:
            for one in follows:
                tasks.create_task(one(channel, metadata))

    return follow
