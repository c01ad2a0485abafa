"""A server among several, as small as can be: `standby_server.py URL DIRECTORY NAME active|always`.

Says `standing by`, then `active TERM`, and then the name of everything that it was acknowledged to have
written: while it is active, or always.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from support.shared.storekit import KINDS, SCOPE, THING, Spec

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store import ABSENT, Draft, Store, StoreSettings
from fleetplane.kernel.store.engine import Superseded
from fleetplane.kernel.store.servers.replica import Replica

KEY = b"k" * 32
WRITERS = 4


async def write(store: Store, name: str, writer: int) -> None:
    number = 0
    while True:
        number += 1
        thing = f"{name}-{store.audit_head().seq}-{writer}-{number}"

        def change(draft: Draft, thing: str = thing) -> None:
            draft.put(THING, SCOPE, thing, spec=Spec(value=1), expect=ABSENT)
            draft.put(THING, SCOPE, f"{name}-{writer}", spec=Spec(value=draft.revision))

        touches = [THING.key(SCOPE, thing), THING.key(SCOPE, f"{name}-{writer}")]
        try:
            await store.transact(change, actor=name, action="write", touches=touches)
        except Unavailable:  # whatever it was, it was not acknowledged
            await asyncio.sleep(0.1)
            continue
        print(thing, flush=True)
        await asyncio.sleep(0.005)


async def write_meanwhile(standby: Replica) -> None:
    async with asyncio.TaskGroup() as writing:
        for number in range(WRITERS):
            writing.create_task(write(standby.store, standby.seat.author.server, number))


async def main(url: str, directory: Path, name: str, writes: str) -> None:
    settings = StoreSettings(path=directory / name / "store.db", url=url, server=name)
    print("standing by", flush=True)
    async with Store.open(
        settings,
        kinds=KINDS,
        clock=SystemClock(),
        audit_key=lambda _: KEY,
        meanwhile=write_meanwhile if writes == "always" else None,
    ) as store:
        writer = store._writer.author
        assert writer is not None
        print("active", writer.term, flush=True)
        tasks = [asyncio.create_task(write(store, name, number)) for number in range(WRITERS)]
        try:
            await store.writing()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
    except Superseded as error:
        print("superseded:", error.message, flush=True)
        sys.exit(3)
