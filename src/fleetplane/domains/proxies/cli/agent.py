"""`fleetplane agent proxy`: the agent of an NGINX as a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetplane.cli.parameters import LOG_LEVELS, Label

MODES = ["standalone", "docker_sidecar", "kubernetes_sidecar"]

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)


class PortMapping(click.ParamType[tuple[int, int]]):
    name = "ports"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        asked, colon, served = str(value).partition(":")
        try:
            pair = int(asked), int(served)
        except ValueError:
            pair = 0, 0
        if not colon or not all(1 <= port <= 65535 for port in pair):
            self.fail(f"{value!r} maps no ports; write 443:8443", param, ctx)
        return pair


def _set(name: str, *target: str, **options: Any) -> Callable[[F], F]:
    variable = "FLEETPLANE_PROXY_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *target, envvar=variable, show_envvar=True, **options)


@click.command()
@_set(
    "--server",
    default="127.0.0.1:8995",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the server's listener for NGINX agents.",
)
@_set(
    "--ca-file",
    "authority",
    type=FILE,
    help="CA certificates to verify the server against. Default: the system's.",
)
@_set("--plaintext", is_flag=True, help="No TLS. Private keys then travel in the clear; never in service.")
@_set("--token", default="", help="Registration token; better given by file. Needed only the first time.")
@_set("--token-file", type=FILE, help="File with the registration token.")
@_set(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default="/var/lib/fleetplane-proxy",
    show_default=True,
    help="Everything the agent keeps, NGINX's configuration included.",
)
@_set(
    "--managed",
    is_flag=True,
    help="Start NGINX and keep it running, instead of signalling one that runs already.",
)
@_set("--stop-nginx-on-exit", is_flag=True, help="With --managed: do not leave NGINX serving.")
@_set(
    "--observe",
    is_flag=True,
    help="Start beside an NGINX that runs already and touch nothing, until told to take it over.",
)
@_set(
    "--observed-config",
    type=FILE,
    help="With --observe: its nginx.conf. Default: where the NGINX program was built to look.",
)
@_set(
    "--observed-folder",
    "observed_folders",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="With --observe: a folder whose configuration files and logs may be shown, too; repeat it.",
)
@_set(
    "--observed-keys",
    is_flag=True,
    help="With --observe: let administrators fetch its certificates with their private keys.",
)
@_set("--nginx", type=FILE, default="/usr/sbin/nginx", show_default=True, help="Path of the NGINX program.")
@_set(
    "--listen-address",
    "listen_addresses",
    multiple=True,
    metavar="ADDRESS",
    help="Address that virtual hosts listen on, such as 127.0.0.1; repeatable. Default: all.",
)
@_set(
    "--map-port",
    "ports",
    type=PortMapping(),
    multiple=True,
    metavar="ASKED:SERVED",
    help="Serve a port under another number, such as 443:8443; repeat it.",
)
@_set("--acme-responder", default="", metavar="HOST:PORT", help="Address that answers HTTP-01 challenges.")
@_set("--repair-drift", is_flag=True, help="Revert manual changes of NGINX's configuration.")
@_set("--workers", default="auto", show_default=True, help="NGINX's worker processes.")
@_set(
    "--document-root",
    "document_roots",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="A folder that files may be served from; repeat it. Default: /var/www and its like.",
)
@_set(
    "--worker-user",
    default="",
    metavar="USER",
    help="User that NGINX's workers run as. Default: www-data, nginx or nobody.",
)
@_set(
    "--work-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="NGINX's logs and scratch files, where workers are another user. Default: STATE-work.",
)
@_set("--label", "labels", type=Label(), multiple=True, metavar="KEY=VALUE", help="Reported; repeat it.")
@_set("--deployment-mode", type=click.Choice(MODES), default="standalone", show_default=True)
@_set("--hostname", default="", help="Reported; else the system's.")
@_set("--ip-address", default="", help="Reported; else the address towards the server.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def proxy(
    *,
    token: str,
    token_file: Path | None,
    ports: tuple[tuple[int, int], ...],
    labels: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:
    """Drive this machine's NGINX as the server wants it served.

    A new configuration is tested, linked, and watched until it answers; if it does not, the one
    before it is brought back. Survives restarts of the server, and leaves NGINX serving when it ends.
    """
    from fleetplane.agents.running import run_agent
    from fleetplane.domains.proxies.agent.root import ProxyAgentSettings, run_proxy_agent

    if token_file is not None:
        token = token_file.read_text().strip()
    settings = ProxyAgentSettings(token=token, ports=dict(ports), labels=dict(labels), **options)
    run_agent(run_proxy_agent, settings)
