"""Writes to a store from many tasks until it is killed, telling its parent what was acknowledged.

Each line on standard output is one acknowledged transaction: `writer value revision`. A
transaction puts three things that carry the same value, replaces a fourth by one of another
name, and takes a claim, so that half a transaction would show.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from support.shared.storekit import SCOPE, THING, Spec, opened

from fleetplane.kernel.store import Draft, Store

WRITERS = 8
PARTS = ("a", "b", "c")


def transaction(draft: Draft, writer: int, value: int) -> None:
    for part in PARTS:
        draft.put(THING, SCOPE, f"w{writer}-{part}", spec=Spec(value=value))
    if draft.get(THING, SCOPE, f"w{writer}-old{value - 1}") is not None:
        draft.delete(THING, SCOPE, f"w{writer}-old{value - 1}")
    draft.put(THING, SCOPE, f"w{writer}-old{value}", spec=Spec(value=value))
    draft.claim(THING, SCOPE, "value", f"w{writer}-{value}", f"w{writer}")


async def write(store: Store, writer: int) -> None:
    before = store.get(THING, SCOPE, f"w{writer}-a")
    value = 0 if before is None else before.spec.value
    names = [f"w{writer}-{part}" for part in PARTS]
    while True:
        value += 1
        touches = [
            THING.key(SCOPE, name) for name in (*names, f"w{writer}-old{value}", f"w{writer}-old{value - 1}")
        ]
        done = await store.transact(
            partial(transaction, writer=writer, value=value),
            actor=f"writer/{writer}",
            action="crash.write",
            touches=touches,
        )
        os.write(1, f"{writer} {value} {done.revision}\n".encode())


async def main(path: Path) -> None:
    async with opened(path, ring_events=64) as store, asyncio.TaskGroup() as tasks:
        os.write(1, b"open\n")
        for writer in range(WRITERS):
            tasks.create_task(write(store, writer))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
