"""`fleetplane agent instance`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetplane.cli.parameters import LOG_LEVELS
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations

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
    return _set(
        name,
        variable,
        type=FileMode(),
        default=default,
        show_default=True,
        help="Mode of the files in the folder.",
    )


@click.command()
@_set("--registration-address", "SERVER_REGISTRATION_ADDR", required=True, metavar="HOST:PORT")
@_set("--agent-address", "SERVER_AGENT_ADDR", required=True, metavar="HOST:PORT")
@_set("--instance-id", "INSTANCE_ID", required=True, help="Id of this instance.")
@_folder(
    "--identity-dir",
    "IDENTITY_DIR",
    "/opt/nstance-agent/identity",
    "Folder of nonce, CA certificate, key and certificate.",
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
    help="Time between health reports; 0 sends none.",
)
@_set(
    "--spot-poll-interval",
    "SPOT_POLL_INTERVAL",
    type=Interval(),
    default="2s",
    show_default=True,
    help="Time between polls of the cloud's spot interruption notice; 0 disables them.",
)
@_set("--kind", "INSTANCE_KIND", default="", expose_value=False, help="Ignored: the id contains the kind.")
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
    help="Answers HTTP: /healthz while the agent runs, /readyz while it is connected.",
)
@_set("--environment", "ENVIRONMENT", default="development", help="`production` logs in JSON.")
@_set("--debug", "DEBUG", is_flag=True, help="Log at debug level.")
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
    from fleetplane.agents.running import run_agent
    from fleetplane.domains.instances.agent.root import InstanceAgentSettings, run_instance_agent

    settings = InstanceAgentSettings(
        report_interval_seconds=report_interval,
        spot_interval_seconds=spot_poll_interval,
        hostname=hostname or fqdn,
        log_format=log_format or ("json" if environment == "production" else "text"),
        log_level="debug" if debug else log_level,
        **options,
    )
    run_agent(run_instance_agent, settings)
