"""An NGINX that somebody else started, with a configuration of its own, for agents that observe."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from support.proxies.nginx_rig import NGINX, binary
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.nginx import processes
from fleetplane.domains.proxies.agent.nginx.processes import Master
from fleetplane.domains.proxies.agent.observing import observed, origin
from fleetplane.domains.proxies.agent.observing.configuration import ReadingPolicy
from fleetplane.domains.proxies.agent.observing.observed import BuiltPaths, ObservedNginx
from fleetplane.domains.proxies.agent.observing.origin import NginxOrigin
from fleetplane.kernel.clock import SystemClock

MAIN = """
user root;
pid {folder}/nginx.pid;
error_log {folder}/logs/error.log;
worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log {folder}/logs/access.log;
    client_body_temp_path {folder}/tmp; proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp;
    uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
    include sites/*.conf;
}}
"""
SITE = """
server {{
    listen 127.0.0.1:{port};
    server_name a.test;
    location / {{ return 200 "found"; }}
    location = /nginx_status {{ stub_status; access_log off; }}
}}
"""


class FoundNginx:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.config = folder / "nginx.conf"
        self.pid_file = folder / "nginx.pid"
        for one in ("sites", "logs", "tmp"):
            (folder / one).mkdir()
        self.config.write_text(MAIN.format(folder=folder))
        (folder / "sites" / "a.conf").write_text(SITE.format(port=self.port))

    def start(self) -> None:
        subprocess.run([NGINX, "-c", self.config, "-g", "worker_priority 0;"], check=True)
        deadline = time.monotonic() + 60
        while not self.workers():
            assert time.monotonic() < deadline, "NGINX does not start"
            time.sleep(0.02)

    def pid(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            pid = int(self.pid_file.read_text())
            if processes.title_of(processes.PROC, pid).startswith("nginx: master process"):
                return pid
        return 0

    def workers(self) -> int:
        """Which come after the number of their master."""
        pid = self.pid()
        return len(processes.workers(Master(pid=pid, started=0))) if pid else 0

    def title(self) -> str:
        """How it was started."""
        return processes.title_of(processes.PROC, self.pid()).strip()

    def stop(self) -> None:
        deadline = time.monotonic() + 60
        while pid := self.pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            assert time.monotonic() < deadline, "NGINX does not stop"
            time.sleep(0.02)

    def texts(self) -> dict[str, bytes]:
        """Every file of it, to see that none was changed."""
        files = [one for one in self.folder.rglob("*.conf") if one.is_file()]
        return {str(one): one.read_bytes() for one in files}

    def observed(self, *, sends_keys: bool = False, systemctl: Path | None = None) -> ObservedNginx:
        told = subprocess.run([NGINX, "-V"], capture_output=True, text=True, check=True).stderr
        built_in = BuiltPaths.parse(told)
        return ObservedNginx(
            place=NginxOrigin(
                program=NGINX, config=self.config, default_config=built_in.config, systemctl=systemctl
            ),
            built_in=built_in,
            binary=binary(),
            policy=ReadingPolicy(folders=()),
            clock=SystemClock(),
            sends_keys=sends_keys,
        )


@contextlib.contextmanager
def found_nginx() -> Iterator[FoundNginx]:
    found = FoundNginx(Path(tempfile.mkdtemp(prefix="fp-found-")))
    try:
        found.start()
        # How long it takes to end, to begin and to answer says something about the machine.
        with (
            patch.multiple(origin, STOP_SECONDS=60.0, START_SECONDS=60.0),
            patch.object(observed, "ASK_SECONDS", 60.0),
        ):
            yield found
    finally:
        found.stop()
        shutil.rmtree(found.folder, ignore_errors=True)
