"""A process that applies a configuration and is killed at a step of it, as if by `kill -9`.

Arguments: the state folder, a file with the update, the step (which may come a second time: `step#2`),
and a user to become first.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import sys
from pathlib import Path

import crossplane  # noqa: F401  # while it may still be read
import structlog
from support.proxies.nginx_rig import Rig

from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


async def main(folder: str, update_file: str, fatal: str, user: str = "") -> None:
    if user:
        await asyncio.to_thread(int)  # imports what it needs while it may still be read
        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    step, _, turn = fatal.partition("#")
    turns = int(turn or 1)

    def witness(reached: StagingStep) -> None:
        nonlocal turns
        if reached == step:
            turns -= 1
            if turns == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    rig = Rig(Path(folder))
    applier = rig.applier(witness)
    await applier.open()
    await applier.apply(pb.ConfigUpdate.FromString(Path(update_file).read_bytes()), rig.report)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
