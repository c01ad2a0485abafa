"""`fleetplane agent gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fleetplane.cli.parameters import DURATION, LOG_LEVELS, address_option, default_address


@click.command()
@address_option
@click.option(
    "--provider-id",
    default="nvml-provider",
    show_default=True,
    help="Name under which this provider registers at the device API.",
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
    help="Seconds between heartbeats.",
)
@click.option("--no-health-check", is_flag=True, help="Register GPUs but do not wait for XID events.")
@click.option("--lower-case-names", is_flag=True, help="Name GPUs gpu-... instead of by the UUID as it is.")
@click.option(
    "--enumerate-every",
    "enumerate_every_seconds",
    type=DURATION,
    help="How often to enumerate GPUs, which lets recovered ones report. Default: at start and on SIGHUP.",
)
@click.option(
    "--simulate", type=click.IntRange(0, 1024), metavar="N", help="N simulated GPUs; no driver is needed."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the simulated GPUs' failures.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/var/lib/fleetplane-gpu"),
    show_default=True,
    help="Folder for settings that the server sends; see `provider-settings`.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@click.pass_context
def gpu(
    context: click.Context,
    /,
    *,
    address: str | None,
    ignored_xids: str,
    no_health_check: bool,
    **options: Any,
) -> None:
    """Report this node's NVIDIA GPUs to the device API.

    Registers every GPU the driver shows, sets its NVMLReady condition from XID events, and beats
    so that silence is noticed. Survives restarts of the server and may be started before it.
    Heartbeats, ignored XIDs and enumerations that are not given here can be set from the server.
    """
    from fleetplane.agents.running import run_agent
    from fleetplane.domains.gpus.agent.root import GpuAgentSettings, run_gpu_agent
    from fleetplane.domains.gpus.agent.settings import FLAGS
    from fleetplane.domains.gpus.xids import parse_xids

    sources = {name: context.get_parameter_source(name) for name in FLAGS}
    settings = GpuAgentSettings(
        address=default_address if address is None else lambda: address,
        ignored_xids=parse_xids(ignored_xids),
        health_check=not no_health_check,
        given=frozenset(name for name, source in sources.items() if source is not ParameterSource.DEFAULT),
        **options,
    )
    run_agent(run_gpu_agent, settings, name=settings.provider_id)
