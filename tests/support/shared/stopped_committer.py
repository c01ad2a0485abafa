"""A process that sends a commit to PostgreSQL and stops before it hears the answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from support.shared.enginekit import group

from fleetplane.kernel.store.engines.postgres import PostgresEngine


async def main(url: str) -> None:
    engine = await PostgresEngine.open(url)
    mark = await engine.mark()
    first = group(mark, "warm")
    await engine.commit(first)
    print("ready", flush=True)
    sending = asyncio.ensure_future(engine.commit(group(first.after, "late", body=b"x" * 1_000_000)))
    while not sending.done():
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGSTOP)  # again whenever it is let go on
    await sending


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
