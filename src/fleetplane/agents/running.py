"""How every agent runs: until it is asked to stop, or until another version of it is to be tried."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

from fleetplane import environment, logs
from fleetplane.kernel.clock import SystemClock

if TYPE_CHECKING:  # only agents that were started by the launcher load it
    from fleetplane.node.upgrade.upgrader import Upgrader

S = TypeVar("S")
LAUNCH = "FLEETPLANE_AGENT_LAUNCH"


async def until_stopped(work: Coroutine[None, None, None], upgrader: Upgrader | None = None) -> None:
    """Run until SIGTERM or SIGINT, until another version is ready, or until the work fails."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(work)

        def stop() -> None:
            if upgrader is not None:
                upgrader.stop()
            running.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if upgrader is not None:
            waiting = tasks.create_task(_when_ready(upgrader, running.cancel))
            running.add_done_callback(lambda _: waiting.cancel())


async def _when_ready(upgrader: Upgrader, stop: Callable[[], object]) -> None:
    await upgrader.ready.wait()
    stop()


def run_agent(
    main: Callable[[S, Upgrader | None], Coroutine[None, None, None]], settings: S, *, name: str = ""
) -> None:
    """Run an agent's composition root. `name` says who it is to a server where no credential does."""
    made: list[Upgrader] = []

    async def run() -> None:
        upgrader = await _upgrader(name)
        made.extend([upgrader] if upgrader is not None else [])
        await main(settings, upgrader)

    asyncio.run(run())
    for upgrader in made:
        upgrader.relaunch()


async def _upgrader(name: str) -> Upgrader | None:
    """None for an agent that was started without the launcher."""
    if LAUNCH not in environment.current():
        return None
    from fleetplane.node.upgrade.launch import Launch
    from fleetplane.node.upgrade.upgrader import Upgrader

    launch = Launch.told(environment.current())
    assert launch is not None
    return Upgrader(launch, clock=SystemClock(), log=lambda: logs.logger(part="upgrade"), name=name)
