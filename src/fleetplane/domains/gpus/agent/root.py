"""`fleetplane agent gpu`: this node's GPUs, in the order that its parts come to life."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetplane import logs
from fleetplane.agents.running import until_stopped
from fleetplane.domains.gpus.agent.library import Library, NvmlLibrary
from fleetplane.domains.gpus.agent.provider import GpuProvider, ProviderPolicy
from fleetplane.domains.gpus.agent.session import DeviceLink
from fleetplane.domains.gpus.agent.settings import EffectiveSettings, SettingsKeeper
from fleetplane.domains.gpus.agent.simulated import SimulatedLibrary
from fleetplane.domains.gpus.xids import ignored_xids
from fleetplane.kernel.clock import SystemClock
from fleetplane.node.connection import no_check_in, together
from fleetplane.node.figures import FigureReporter, Measured
from fleetplane.node.tasks import in_thread

if TYPE_CHECKING:
    from fleetplane.node.upgrade.upgrader import Upgrader

SIMULATED_ENUMERATION_SECONDS = 60.0
"""Simulated GPUs are looked at anew so that a demonstration also shows them recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAgentSettings:
    address: Callable[[], str]
    """Where the device API is; asked anew for every connection, since servers come and go."""
    provider_id: str = "nvml-provider"
    driver_root: Path | None = None
    ignored_xids: frozenset[int] = frozenset()
    """Ignored in addition to the application's own."""
    heartbeat_seconds: float = 10.0
    health_check: bool = True
    lower_case_names: bool = False
    enumerate_every_seconds: float | None = None
    simulate: int | None = None
    """This many simulated GPUs in place of the driver's."""
    seed: int = 0
    state_dir: Path = Path("/var/lib/fleetplane-gpu")
    """Where settings are kept that the server sent."""
    given: frozenset[str] = frozenset()
    """Which of the settings above were named on the command line: the server cannot set these."""
    log_format: str = "text"
    log_level: str = "info"


async def run_gpu_agent(settings: GpuAgentSettings, upgrader: Upgrader | None = None) -> None:
    """Watch this node's GPUs until SIGTERM or SIGINT; SIGHUP enumerates them anew."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log = logs.logger(provider=settings.provider_id)
    clock = SystemClock()
    own = _own(settings)
    keeper = SettingsKeeper(
        own,
        given=settings.given,
        folder=settings.state_dir,
        provider_id=settings.provider_id,
        apply=lambda now: provider.set_to(**now.as_fields()),
        clock=clock,
        log=log,
    )

    async def measure() -> Measured:
        return await provider.measure()

    reporter = FigureReporter(measure, clock=clock, log=lambda: log, name=settings.provider_id)
    provider = GpuProvider(
        library=_library(settings),
        connect=lambda: DeviceLink(settings.address(), settings.provider_id),
        policy=ProviderPolicy(
            health_check=settings.health_check,
            lower_case_names=settings.lower_case_names,
            **own.as_fields(),
        ),
        clock=clock,
        log=log,
        check_in=together(
            upgrader.follow if upgrader is not None else no_check_in,
            reporter.follow,
        ),
        settings=keeper.follow,
    )
    await in_thread(keeper.load)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, provider.enumerate_again)
    await until_stopped(provider.run(), upgrader)
    log.info("agent_stopped")


def _library(settings: GpuAgentSettings) -> Library:
    if settings.simulate is not None:
        return SimulatedLibrary(settings.simulate, clock=time.monotonic, seed=settings.seed)
    import pynvml

    return NvmlLibrary(pynvml, driver_root=settings.driver_root)


def _own(settings: GpuAgentSettings) -> EffectiveSettings:
    """What holds unless the server sets something else."""
    enumerate_every_seconds = settings.enumerate_every_seconds
    if enumerate_every_seconds is None and settings.simulate is not None:
        enumerate_every_seconds = SIMULATED_ENUMERATION_SECONDS
    return EffectiveSettings(
        heartbeat_seconds=settings.heartbeat_seconds,
        ignored_xids=ignored_xids(settings.ignored_xids),
        enumerate_every_seconds=enumerate_every_seconds,
    )
