"""`fleetplane agent`: the node side as a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleetplane.cli.address import default_address
from fleetplane.cli.lazy import LazyGroup
from fleetplane.cli.parameters import DURATION, address_option


@click.group(cls=LazyGroup)
def agent() -> None:
    """Run the node side: report on this machine."""


@agent.command()
@address_option
@click.option(
    "--provider-id", default="nvml-provider", show_default=True, help="How the device API knows us."
)
@click.option(
    "--driver-root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder the driver is installed below, such as /run/nvidia/driver.",
)
@click.option("--ignored-xids", default="", metavar="LIST", help="XIDs to ignore besides the usual: 62,63.")
@click.option(
    "--heartbeat-seconds",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    show_default=True,
    help="Between beats.",
)
@click.option("--no-health-check", is_flag=True, help="Register GPUs but do not wait for XID events.")
@click.option("--lower-case-names", is_flag=True, help="Name GPUs gpu-... instead of by the UUID as it is.")
@click.option(
    "--enumerate-every",
    "enumerate_every_seconds",
    type=DURATION,
    help="Look at all GPUs anew this often, which lets sound ones recover. Default: at start and on SIGHUP.",
)
@click.option(
    "--simulate", type=click.IntRange(0, 1024), metavar="N", help="N simulated GPUs; no driver is needed."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Fate of the simulated GPUs.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def gpu(*, address: str | None, ignored_xids: str, no_health_check: bool, **options: Any) -> None:
    """Report this node's NVIDIA GPUs to the device API.

    Registers every GPU the driver shows, sets its NVMLReady condition from XID events, and beats
    so that silence is noticed. Survives restarts of the server and may be started before it.
    """
    import asyncio

    from fleetplane.agent import GpuAgentSettings, run_gpu_agent
    from fleetplane.domains.gpus.agent.xids import parse_xids

    settings = GpuAgentSettings(
        address=default_address if address is None else lambda: address,
        ignored_xids=parse_xids(ignored_xids),
        health_check=not no_health_check,
        **options,
    )
    asyncio.run(run_gpu_agent(settings))
