"""A process that runs the product's own proxy agent with shorter times than in service.

Arguments: the server's address, the folder with `ca.pem` and `token`, a port of the configuration and the
one at which it is served instead, so that several can live on one machine.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from fleetplane.domains.proxies.agent.root import ProxyAgentSettings, Tuning, run_proxy_agent


def main(server: str, folder: str, port: str, instead: str) -> None:
    place = Path(folder)
    settings = ProxyAgentSettings(
        server=server,
        authority=place / "ca.pem",
        token=(place / "token").read_text(),
        state_dir=place / "state",
        managed=True,
        stop_nginx_on_exit=True,
        listen_addresses=("127.0.0.1",),
        ports={int(port): int(instead)},
        tuning=Tuning(metrics_seconds=0.5, steady_seconds=0.15, least_gap_seconds=0.0),
    )
    asyncio.run(run_proxy_agent(settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
