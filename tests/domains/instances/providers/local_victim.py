"""A server that is killed in the middle of a local instance's life: `local_victim.py STATE ID STEP`.

It makes (and, for the later steps, deletes) one instance and kills itself at the named step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderContext
from fleetplane.domains.instances.providers.local import processes
from fleetplane.domains.instances.providers.local.provider import LocalProvider
from fleetplane.domains.instances.providers.local.records import LocalRecords
from fleetplane.kernel.clock import SystemClock

AGENT = [sys.executable, str(Path(__file__).with_name("stand_in_agent.py"))]

STEPS: dict[str, tuple[object, str, int]] = {
    # Step: what is about to be called for the nth time when the server dies.
    "before-record": (LocalRecords, "write", 1),
    "before-furnishing": (LocalRecords, "furnish", 1),
    "before-spawn": (processes, "start", 1),
    "after-spawn": (LocalRecords, "write", 2),
    "after-create": (LocalRecords, "write", 3),
    "before-kill": (processes, "end", 1),
    "before-removal": (LocalRecords, "remove", 1),
    "in-removal": (sys.modules["shutil"], "rmtree", 1),
}


def die_at(step: str) -> None:
    target, name, nth = STEPS[step]
    original: Callable[..., Any] = getattr(target, name)
    calls = 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(target, name, fatal)


async def main(state: Path, instance_id: str, step: str) -> None:
    context = ProviderContext(clock=SystemClock(), state_directory=state, command=tuple(AGENT))
    provider = LocalProvider(context)
    provider.configure({})
    await provider.start()
    die_at(step)
    await provider.create_instance(CreateRequest(cluster="c", shard="s", instance_id=instance_id))
    await provider.delete_instance(instance_id, "")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
