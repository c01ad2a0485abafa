"""A server among several that writes for as long as it is told to: see `cluster_writes.py`.

`python -m bench.cluster_writer URL FOLDER NAME CALLERS`. It writes while FOLDER/NAME.on exists, is late while
FOLDER/NAME.late exists, and counts what was acknowledged in FOLDER/NAME.count.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica

LATE_SECONDS = 0.03
LOOK_SECONDS = 0.02
BODY = "x" * 500


class Spec(msgspec.Struct, frozen=True):
    value: int = 0
    body: str = ""


THING: Kind[Spec, Spec] = Kind("thing", Spec, Spec)


class Writing:
    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._on, self._late = folder / f"{name}.on", folder / f"{name}.late"
        self._file = os.open(folder / f"{name}.count", os.O_RDWR | os.O_CREAT, 0o600)
        self._count = 0
        self._wanted = asyncio.Event()

    async def steer(self) -> None:
        """Look at what is wanted, and be late in every turn of the loop if that is."""
        looked = 0.0
        late = False
        while True:
            if time.monotonic() - looked > LOOK_SECONDS:
                late, looked = self._late.exists(), time.monotonic()
                (self._wanted.set if self._on.exists() else self._wanted.clear)()
            if late:
                time.sleep(LATE_SECONDS)  # noqa: ASYNC251
            await asyncio.sleep(0 if late else LOOK_SECONDS)

    async def write(self, store: Store, caller: int) -> None:
        number = 0
        while True:
            await self._wanted.wait()
            number += 1
            spec = Spec(value=number, body=BODY)
            key = THING.key("bench", f"{self._name}-{caller}")
            try:
                await store.transact(
                    lambda draft, key=key, spec=spec: draft.put(THING, key.scope, key.name, spec=spec),  # type: ignore[misc]
                    actor="bench",
                    action="put",
                    touches=[key],
                )
            except Unavailable:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            self._count += 1
            os.pwrite(self._file, self._count.to_bytes(8, "little"), 0)


async def main(url: str, folder: Path, name: str, callers: int) -> None:
    writing = Writing(folder, name)

    async def work(store: Store) -> None:
        (folder / f"{name}.ready").touch()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writing.steer())
            for caller in range(callers):
                tasks.create_task(writing.write(store, caller))

    async def meanwhile(standby: Replica) -> None:
        await work(standby.store)

    settings = StoreSettings(path=folder / name / "store.db", url=url, server=name)
    async with Store.open(settings, kinds=[THING], clock=SystemClock(), meanwhile=meanwhile) as store:
        await work(store)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
