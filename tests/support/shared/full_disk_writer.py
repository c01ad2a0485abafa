"""Fills its disk quota, shows that reads go on, makes room again, and shows that writes recover.

The quota is the kernel's limit on file size, which needs no privileges; prints one line per step.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from support.shared.storekit import SCOPE, THING, audit_of, opened, put

from fleetplane.kernel.errors import StorageFull
from fleetplane.kernel.store import Store

QUOTA_BYTES = 1024 * 1024
WRITES_LIMIT = 500


def limit_files(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


async def fill(store: Store) -> int:
    """Write until the disk is full; returns how many writes were acknowledged."""
    for number in range(WRITES_LIMIT):
        try:
            await put(store, f"n{number}", number, padding="x" * 16_000)
        except StorageFull as error:
            print(f"full {error.reason} {error.http_status} {error.grpc_code}")
            return number
    raise AssertionError("the disk never filled up")


async def main(path: Path) -> None:
    async with opened(path) as store:
        await put(store, "before", 7)
        watch = store.watch(THING)
        limit_files(QUOTA_BYTES)
        written = await fill(store)
        for _ in range(5):  # and it goes on saying so, without harm
            try:
                await put(store, "refused", padding="x" * 64_000)
            except StorageFull:
                continue
            raise AssertionError("a write succeeded on a full disk")
        assert store.revision == written + 1
        assert store.get(THING, SCOPE, "before") is not None
        assert store.get(THING, SCOPE, "refused") is None
        assert len(store.list(THING)) == written + 1
        assert (await watch.next()).revision == store.revision
        assert not store.statistics().writable
        print(f"reads {written}")
        limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        assert (await put(store, "after", 8)).revision == written + 2
        assert store.statistics().writable
        assert (await audit_of(store)).intact
        print("recovered")
    async with opened(path) as store:
        assert store.revision == written + 2
        assert len(store.list(THING)) == written + 2
        print("reopened")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
