"""`fleetplane agent`: the node side as a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from fleetplane.cli.address import default_address
from fleetplane.cli.lazy import Entry, LazyGroup
from fleetplane.cli.parameters import DURATION, address_option
from fleetplane.domains.instances import durations
from fleetplane.kernel.errors import InvalidArgument

LOG_LEVELS = ["debug", "info", "warning", "error"]

F = TypeVar("F", bound=Callable[..., Any])


class Interval(click.ParamType[float]):
    """`60s`, `1m30s`, `500ms`; `0` turns it off. As seconds."""

    name = "interval"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = durations.parse(str(value).strip())
        except InvalidArgument as error:
            self.fail(error.message, param, ctx)
        if seconds < 0:
            self.fail("must not be less than nothing", param, ctx)
        return seconds


class FileMode(click.ParamType[int]):
    """`0640`, as `chmod` takes it."""

    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            mode = int(str(value).removeprefix("0o"), 8)
        except ValueError:
            mode = -1
        if not 0o400 <= mode <= 0o777:
            self.fail(f"{value!r} is no file mode; write 0600 or 0640", param, ctx)
        return mode


def _set(name: str, variable: str, **options: Any) -> Callable[[F], F]:
    """An option that is usually given by the environment, under the protocol's own name."""
    return click.option(name, envvar=f"NSTANCE_{variable}", show_envvar=True, **options)


def _folder(name: str, variable: str, default: str, words: str) -> Callable[[F], F]:
    kind = click.Path(path_type=Path, file_okay=False)
    return _set(name, variable, type=kind, default=default, show_default=True, help=words)


def _mode(name: str, variable: str, default: str) -> Callable[[F], F]:
    return _set(name, variable, type=FileMode(), default=default, show_default=True, help="Of its files.")


class Agents(LazyGroup):
    entries: ClassVar[Mapping[str, Entry]] = {
        "board": Entry(
            target="fleetplane.cli.agent_board:board",
            help="Serve this board: its pins, metrics, logs and diagnostics.",
        ),
        "edge": Entry(
            target="fleetplane.cli.agent_edge:edge",
            help="Serve this machine from behind NAT: run tools as its owner allows.",
        ),
        "proxy": Entry(
            target="fleetplane.cli.agent_proxy:proxy",
            help="Drive this machine's NGINX as the server wants it served.",
        ),
    }


@click.group(cls=Agents)
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
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def gpu(*, address: str | None, ignored_xids: str, no_health_check: bool, **options: Any) -> None:
    """Report this node's NVIDIA GPUs to the device API.

    Registers every GPU the driver shows, sets its NVMLReady condition from XID events, and beats
    so that silence is noticed. Survives restarts of the server and may be started before it.
    """
    import asyncio

    from fleetplane.agents.gpu import GpuAgentSettings, run_gpu_agent
    from fleetplane.domains.gpus.agent.xids import parse_xids

    settings = GpuAgentSettings(
        address=default_address if address is None else lambda: address,
        ignored_xids=parse_xids(ignored_xids),
        health_check=not no_health_check,
        **options,
    )
    asyncio.run(run_gpu_agent(settings))


@agent.command()
@_set("--registration-address", "SERVER_REGISTRATION_ADDR", required=True, metavar="HOST:PORT")
@_set("--agent-address", "SERVER_AGENT_ADDR", required=True, metavar="HOST:PORT")
@_set("--instance-id", "INSTANCE_ID", required=True, help="Who this machine is.")
@_folder(
    "--identity-dir", "IDENTITY_DIR", "/opt/nstance-agent/identity", "Nonce, authority, key, certificate."
)
@_folder("--keys-dir", "KEYS_DIR", "/opt/nstance-agent/keys", "Key pairs made on request.")
@_folder("--recv-dir", "RECV_DIR", "/opt/nstance-agent/recv", "Received files.")
@_mode("--identity-mode", "IDENTITY_MODE", "0600")
@_mode("--keys-mode", "KEYS_MODE", "0640")
@_mode("--recv-mode", "RECV_MODE", "0640")
@_set(
    "--report-interval",
    "REPORT_INTERVAL",
    type=Interval(),
    default="60s",
    show_default=True,
    help="Between health reports; 0 sends none.",
)
@_set(
    "--spot-poll-interval",
    "SPOT_POLL_INTERVAL",
    type=Interval(),
    default="2s",
    show_default=True,
    help="Between questions to the cloud whether it wants the machine back; 0 asks none.",
)
@_set("--kind", "INSTANCE_KIND", default="", expose_value=False, help="Not needed: the id says it.")
@_set("--hostname", "INSTANCE_HOSTNAME", default="", help="Reported; else the system's.")
@_set("--fqdn", "INSTANCE_FQDN", default="", help="Reported if no host name is given.")
@_set("--ipv4", "INSTANCE_IPV4", default="", help="Reported; else the address towards the server.")
@_set("--ipv6", "INSTANCE_IPV6", default="", help="Reported; else the address towards the server.")
@_set("--metrics-interface", "METRICS_INTERFACE", default="", help="Network interface to report on.")
@_set("--ebpf-counters-path", "EBPF_COUNTERS_PATH", default="", help="Not read; reported as an error.")
@_set(
    "--health-addr",
    "HEALTH_ADDR",
    default="",
    metavar="HOST:PORT",
    help="Answers HTTP with 200 while the agent is connected, else 503.",
)
@_set("--environment", "ENVIRONMENT", default="development", help="`production` logs in JSON.")
@_set("--debug", "DEBUG", is_flag=True, help="Say everything.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def instance(
    *,
    report_interval: float,
    spot_poll_interval: float,
    hostname: str,
    fqdn: str,
    environment: str,
    debug: bool,
    log_format: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve this instance: register it, report its health, receive its files.

    Takes the same environment and the same folders as the protocol's first agent, so that
    either can take the other's place. Survives restarts of the server and may be started before it.
    """
    import asyncio

    from fleetplane.agents.instance import InstanceAgentSettings, run_instance_agent

    settings = InstanceAgentSettings(
        report_interval_seconds=report_interval,
        spot_interval_seconds=spot_poll_interval,
        hostname=hostname or fqdn,
        log_format=log_format or ("json" if environment == "production" else "text"),
        log_level="debug" if debug else log_level,
        **options,
    )
    asyncio.run(run_instance_agent(settings))
