"""A server that is killed at chosen moments, and the two accounts of what exists that must agree.

One account is the server's own records, read from its database beside it; the other is the mock
provider's state file, which survives the server as machines in a cloud would.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from support.instances.instances_lab import CONFIG_PATH, TENANT, document
from support.shared.server_process import ServerProcess, running_server

from fleetplane.domains.instances.kinds import INSTANCE, Instance, InstanceStatus
from fleetplane.domains.instances.providers.mock.provider import read_state
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.server import BLUEPRINT
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.sealing import Sealer
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.server.offline import AUDIT_CHAIN

STATE_FILE = "machines.jsonl"
POLL_SECONDS = 0.005


def fault(operation: str, *, after: bool, seconds: float, count: int = 0) -> dict[str, Any]:
    """The next calls of the operation, or all of them, are slow: before the deed or after it."""
    return {"operation": operation, "count": count, "after": after, "delay_seconds": seconds, "error": ""}


@dataclass(frozen=True, slots=True)
class FaultLab:
    folder: Path

    def configure(self, size: int, *faults: dict[str, Any], delay_seconds: float = 0.0, **more: Any) -> None:
        """What the next server will find; each of these would take minutes at the default pace."""
        options = {"state_file": STATE_FILE, "faults": list(faults), "delay_seconds": delay_seconds, **more}
        infra = {"provider": "mock", "region": "here", "zone": "here-a", "options": options}
        # Nobody registers here: an instance must not be given up for it however long the test takes.
        patient = {"interval": "1s", "registration_timeout": "1h", "deleted_record_retention": "1h"}
        shard = {"infra": infra, "health_check_interval": "60s", "garbage_collection": patient}
        wanted = document(size, shard=shard)
        path = self.folder / "objects" / CONFIG_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted))

    @contextmanager
    def server(self) -> Iterator[ServerProcess]:
        """Killed at the end, whatever it was doing."""
        with running_server(self.folder, "--only", "instances") as server:
            yield server
            server.process.kill()
            server.process.wait()

    # The two accounts.

    def machines(self) -> set[str]:
        return set(read_state(self.folder / "instances" / STATE_FILE))

    def records(self) -> dict[str, Instance]:
        rows = self._rows("SELECT body FROM resources WHERE kind = ?")
        return {found.name: found for found in self._decoded(rows)}

    def history(self) -> list[Instance]:
        """Every version of every record there ever was, in order."""
        rows = self._rows("SELECT body FROM log WHERE kind = ? ORDER BY revision")
        return self._decoded(rows)

    def _decoded(self, rows: list[bytes]) -> list[Instance]:
        """As the server stores instances: sealed under its master key."""
        if not rows:
            return []
        kind = replace(INSTANCE, sealer=Sealer(self._audit_key(), SystemClock()))
        return [kind.decode(row) for row in rows]

    def _audit_key(self) -> bytes:
        master = MasterKey.from_file(self.folder / "master.key", SystemClock(), may_create=False)
        return master.derive(AUDIT_CHAIN)

    def _rows(self, query: str) -> list[bytes]:
        path = self.folder / "fleetplane.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as database:
            return [row[0] for row in database.execute(query, (INSTANCE.name,))]

    def statuses(self) -> list[InstanceStatus]:
        return [found.status for found in self.records().values() if found.status is not None]

    def counts(self) -> tuple[int, int]:
        """How many instances are recorded, and how many exist."""
        return len(self.records()), len(self.machines())

    # While no server runs.

    def register_everyone(self) -> None:
        """As if every agent had come: only what has registered is drained with notice."""
        asyncio.run(self._register_everyone())

    async def _register_everyone(self) -> None:
        def registered(status: InstanceStatus, now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, registered_at_ns=now_ns)

        settings = StoreSettings(path=self.folder / "fleetplane.db")
        kinds = (*KERNEL_KINDS, *BLUEPRINT.kinds)
        key = self._audit_key()
        async with Store.open(settings, kinds=kinds, clock=SystemClock(), audit_key=lambda _: key) as store:
            for name in self.records():
                await Instances(store).step(TENANT, name, registered, action="register")


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(POLL_SECONDS)
