"""`fleetplane agent proxy`: the agent of an NGINX as a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

LOG_LEVELS = ["debug", "info", "warning", "error"]
MODES = ["standalone", "docker_sidecar", "kubernetes_sidecar"]

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)


class Label(click.ParamType[tuple[str, str]]):
    name = "label"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is no label; write env=production", param, ctx)
        return key, text


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
@_set("--server", default="127.0.0.1:8995", show_default=True, metavar="HOST:PORT", help="Of NGINX agents.")
@_set("--ca-file", "authority", type=FILE, help="Whom to trust as the server; else whom the machine trusts.")
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
@_set("--managed", is_flag=True, help="Start NGINX and keep it running, instead of signalling somebody's.")
@_set("--stop-nginx-on-exit", is_flag=True, help="With --managed: do not leave NGINX serving.")
@_set("--nginx", type=FILE, default="/usr/sbin/nginx", show_default=True, help="The program.")
@_set(
    "--listen-address",
    "listen_addresses",
    multiple=True,
    metavar="ADDRESS",
    help="What virtual hosts listen on, such as 127.0.0.1; repeat it. Default: everything.",
)
@_set(
    "--map-port",
    "ports",
    type=PortMapping(),
    multiple=True,
    metavar="ASKED:SERVED",
    help="Serve a port under another number, such as 443:8443; repeat it.",
)
@_set("--acme-responder", default="", metavar="HOST:PORT", help="Who answers HTTP-01 challenges.")
@_set("--workers", default="auto", show_default=True, help="NGINX's worker processes.")
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
    import asyncio

    from fleetplane.agents.proxy import ProxyAgentSettings, run_proxy_agent

    if token_file is not None:
        token = token_file.read_text().strip()
    settings = ProxyAgentSettings(token=token, ports=dict(ports), labels=dict(labels), **options)
    asyncio.run(run_proxy_agent(settings))
