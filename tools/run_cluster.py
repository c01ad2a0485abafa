"""Three servers on one PostgreSQL and one NATS behind HAProxy, and agents: `run_cluster.py [--show]`.

Everything lies in a folder of its own that is deleted at the end. A server that ends is started again after
a moment, as systemd would do. With --show it demonstrates a takeover by itself: it writes through the
balancer, kills the active server, goes on writing, and compares what was acknowledged with what is there.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

SERVERS = 3
START_SECONDS = 60.0
RESTART_SECONDS = 3.0
BUS_RESTART_SECONDS = 20.0
"""Long enough to see that everything goes on without it."""
SHOW_WRITES = 20
DAEMONS = 6
BIN = Path(sys.executable).parent
DATABASE_USER = "postgres"

HAPROXY = """
global
  maxconn 2000
defaults
  mode http
  timeout connect 2s
  timeout client 1h
  timeout server 1h
  default-server inter 500ms fall 1 rise 1 on-marked-down shutdown-sessions
# Everything: the active server, which alone is ready.
frontend everything
  bind 127.0.0.1:{everything}
  default_backend active
backend active
  option httpchk
  http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host fleetplane
{active}
# Reads of /apis/v1: every server.
frontend reads
  bind 127.0.0.1:{reads}
  default_backend readers
backend readers
  balance leastconn
  option httpchk
  http-check send meth GET uri /readyz/reads ver HTTP/1.1 hdr Host fleetplane
{readers}
# Agents: every server.
frontend gpus
  mode tcp
  bind 127.0.0.1:{gpus}
  default_backend gpu_servers
backend gpu_servers
  mode tcp
  balance leastconn
  option httpchk
  http-check send meth GET uri /readyz/reads ver HTTP/1.1 hdr Host fleetplane
{gpu_servers}
frontend edge
  mode tcp
  bind 127.0.0.1:{edge}
  default_backend edge_servers
backend edge_servers
  mode tcp
  balance leastconn
  option httpchk
  http-check send meth GET uri /readyz/reads ver HTTP/1.1 hdr Host fleetplane
{edge_servers}
"""


def other_user() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam(DATABASE_USER)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def free_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Ports:
    def __init__(self, base: int) -> None:
        count = 6 + 3 * SERVERS
        found = [base + n for n in range(count)] if base else [free_port() for _ in range(count)]
        self.everything, self.reads, self.gpus, self.edge, self.database, self.bus, *rest = found
        self.web, self.device, self.daemons = (rest[n * SERVERS : (n + 1) * SERVERS] for n in range(3))


class Cluster:
    def __init__(self, folder: Path, ports: Ports, stack: ExitStack) -> None:
        self.folder = folder
        self.ports = ports
        self._stack = stack
        self.servers: list[subprocess.Popen[bytes]] = []
        self.bus: subprocess.Popen[bytes]
        self._ended: dict[int, float] = {}
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        self.environment = {
            **os.environ,
            "FLEETPLANE_STORE__URL": f"postgresql://{DATABASE_USER}@127.0.0.1:{ports.database}/fleetplane",
            "FLEETPLANE_BUS__URL": f"nats://127.0.0.1:{ports.bus}",
            "FLEETPLANE_BUS__TOKEN": secrets.token_urlsafe(),
            "FLEETPLANE_IDENTITY__MASTER_KEY": key,
            "FLEETPLANE_EDGE__PUBLIC_ENDPOINT": f"127.0.0.1:{ports.edge}",
        }
        self.config = folder / "fleetplane.toml"
        self.config.touch(mode=0o600)
        self.config.write_text(
            f'data_dir = "{folder}/server-1"\n[store]\nurl = "{self.environment["FLEETPLANE_STORE__URL"]}"\n'
        )

    def start(self) -> None:
        self.start_database()
        self.bus = self.start_bus()
        for number in range(SERVERS):
            self.servers.append(self._start_server(number))
        self._start_balancer()

    def start_database(self) -> None:
        """Make a PostgreSQL, and a database for the servers."""
        binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[4]))
        if not binaries:
            raise SystemExit("PostgreSQL is not installed: apt-get install postgresql")
        place = self.folder / "database"
        place.mkdir(mode=0o700)
        if os.geteuid() == 0:
            self.folder.chmod(0o711)
            shutil.chown(place, DATABASE_USER)
        subprocess.run(
            [binaries[-1] / "initdb", "-D", place / "data", f"-U{DATABASE_USER}", "-Atrust", "-EUTF8"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **other_user(),
        )
        options = ["-clisten_addresses=127.0.0.1", f"-k{place}", f"-p{self.ports.database}"]
        with (self.folder / "postgresql.log").open("ab") as told:
            self._kept(
                [binaries[-1] / "postgres", "-D", place / "data", *options], signal.SIGINT, told, other_user()
            )
        ready = [str(binaries[-1] / "pg_isready"), "-q", "-h127.0.0.1", f"-p{self.ports.database}"]
        self.until(lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL")
        make = ["createdb", "-h127.0.0.1", f"-p{self.ports.database}", f"-U{DATABASE_USER}", "fleetplane"]
        subprocess.run([str(binaries[-1] / make[0]), *make[1:]], check=True)

    def start_bus(self) -> subprocess.Popen[bytes]:
        """NATS, which lets in whoever shows the token of the settings."""
        program = shutil.which("nats-server") or "/usr/sbin/nats-server"
        if not Path(program).exists():
            raise SystemExit("NATS is not installed: apt-get install nats-server")
        config = self.folder / "nats.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"listen: 127.0.0.1:{self.ports.bus}\n"
            f'authorization {{ token: "{self.environment["FLEETPLANE_BUS__TOKEN"]}" }}\n'
        )
        with (self.folder / "nats.log").open("ab") as told:
            return self._kept([program, "-c", config], signal.SIGTERM, told, {})

    def _start_server(self, number: int) -> subprocess.Popen[bytes]:
        name = f"server-{number + 1}"
        data = self.folder / name
        data.mkdir(mode=0o700, exist_ok=True)
        listeners = {
            "web.addresses": f"127.0.0.1:{self.ports.web[number]}",
            "device-api.addresses": f"unix://{data}/gpus.sock,127.0.0.1:{self.ports.device[number]}",
            "device-api.tcp_writes": "true",
            "edge.addresses": f"127.0.0.1:{self.ports.daemons[number]}",
        }
        wanted = [word for key, value in listeners.items() for word in ("--set", f"listeners.{key}={value}")]
        command = [BIN / "fleetplane", "server", "--data-dir", data, "--only", "gpus,edge", *wanted]
        environment = {**self.environment, "FLEETPLANE_STORE__SERVER": name}
        with (self.folder / f"{name}.log").open("ab") as told:
            return self._kept(command, signal.SIGTERM, told, {"env": environment})

    def balancer(self) -> str:
        """The configuration of HAProxy."""

        def lines(ports: list[int]) -> str:
            pairs = enumerate(zip(ports, self.ports.web, strict=True))
            one = "  server s{} 127.0.0.1:{} check port {}"
            return "\n".join(one.format(n + 1, port, web) for n, (port, web) in pairs)

        ports = self.ports
        return HAPROXY.format(
            everything=ports.everything,
            reads=ports.reads,
            gpus=ports.gpus,
            edge=ports.edge,
            active=lines(ports.web),
            readers=lines(ports.web),
            gpu_servers=lines(ports.device),
            edge_servers=lines(ports.daemons),
        )

    def _start_balancer(self) -> None:
        (self.folder / "haproxy.cfg").write_text(self.balancer())
        program = shutil.which("haproxy") or "/usr/sbin/haproxy"
        with (self.folder / "haproxy.log").open("ab") as told:
            self._kept([program, "-db", "-f", self.folder / "haproxy.cfg"], signal.SIGTERM, told, {})

    def start_agents(self) -> None:
        """Edge daemons and a provider of simulated GPUs, which reach the servers through the balancer."""
        active = self.active() or 0
        owner = ["--data-dir", str(self.folder / f"server-{active + 1}")]
        for number in range(DAEMONS):
            state = self.folder / f"daemon-{number + 1}"
            environment = {
                **os.environ,
                "FLEETPLANE_EDGE_AGENT_STATE_DIR": str(state),
                "FLEETPLANE_EDGE_AGENT_USER_CONFIG": str(state / "user.yaml"),
            }
            token = self._asked(["edge", "token", "--name", f"daemon-{number + 1}", *owner])
            self._asked(["agent", "edge", "enroll", "-"], given=token, env=environment)
            self._agent(["agent", "edge", "run", "--log-level", "warning"], environment)
        gpus = ["agent", "gpu", "--simulate", "4", "--address", f"127.0.0.1:{self.ports.gpus}"]
        self._agent(gpus, {**os.environ})

    def _asked(self, words: list[str], given: str = "", **more: Any) -> str:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [BIN / "fleetplane", *words], input=given, capture_output=True, text=True, check=False, **more
        )
        if done.returncode != 0:
            raise SystemExit(f"fleetplane {' '.join(words[:3])}: {done.stderr}")
        return done.stdout

    def _agent(self, words: list[str], environment: dict[str, str]) -> None:
        with (self.folder / "agents.log").open("ab") as told:
            self._kept([BIN / "fleetplane", *words], signal.SIGTERM, told, {"env": environment})

    def agents(self) -> int:
        """How many streams of agents all servers together have."""
        return sum(one.get("agents") or 0 for one in self.seen() if one["state"] in ("active", "standby"))

    def _kept(
        self, command: list[Any], how: signal.Signals, told: Any, more: dict[str, Any]
    ) -> subprocess.Popen[bytes]:
        """Start a process that ends with this one."""
        process = subprocess.Popen(
            [str(word) for word in command], stdout=told, stderr=told, cwd="/", start_new_session=True, **more
        )
        self._stack.callback(_end, process, how)
        return process

    def until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                for log in sorted(self.folder.glob("*.log")):
                    say(f"{log.name}: {log.read_text(errors='replace')[-1000:]}")
                raise SystemExit(f"{what} did not come up")
            time.sleep(0.1)

    def tend(self) -> None:
        """Start again what has ended a moment ago."""
        for number, process in enumerate(self.servers):
            if process.poll() is not None:
                ended = self._ended.setdefault(process.pid, time.monotonic())
                if time.monotonic() - ended > RESTART_SECONDS:
                    self.servers[number] = self._start_server(number)
                    say(f"server-{number + 1} ended, and is started again: pid {self.servers[number].pid}")
        if self.bus.poll() is not None:
            ended = self._ended.setdefault(self.bus.pid, time.monotonic())
            if time.monotonic() - ended > BUS_RESTART_SECONDS:
                self.bus = self.start_bus()
                say(f"NATS ended, and is started again: pid {self.bus.pid}")

    def seen(self) -> list[dict[str, Any]]:
        """What `fleetplane servers` says."""
        command = [str(BIN / "fleetplane"), "servers", "--config", str(self.config), "-o", "json"]
        done = subprocess.run(command, capture_output=True, check=False)
        return list(json.loads(done.stdout)) if done.returncode == 0 else []

    def active(self) -> int | None:
        """The number of the active server."""
        names = [one["name"] for one in self.seen() if one["state"] == "active"]
        return int(names[0].removeprefix("server-")) - 1 if names else None

    def is_ready(self, port: int, path: str) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(how)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def say(text: str) -> None:
    print(text, flush=True)


def show(cluster: Cluster) -> int:
    """Write, kill the active server, write on; 0 if nothing acknowledged is lost."""
    import grpc

    from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

    acknowledged: list[str] = []
    pause = killed = 0.0
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports.gpus}", options=options) as channel:
        stub = provider_pb2_grpc.ProviderServiceStub(channel)
        number = 0
        while len(acknowledged) < 2 * SHOW_WRITES:
            number += 1
            try:
                stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=f"gpu-{number}"), timeout=2)
            except grpc.RpcError:
                time.sleep(0.05)
                continue
            acknowledged.append(f"gpu-{number}")
            if killed and not pause:
                pause = time.monotonic() - killed
            if len(acknowledged) == SHOW_WRITES:
                active = cluster.active()
                assert active is not None
                say(f"killing server-{active + 1} after {SHOW_WRITES} acknowledged writes")
                killed = time.monotonic()
                cluster.servers[active].kill()
        listed = gpu_pb2_grpc.GpuServiceStub(channel).ListGpus(gpu_pb2.ListGpusRequest(), timeout=20)
    there = {gpu.metadata.name for gpu in listed.gpu_list.items}
    lost = [name for name in acknowledged if name not in there]
    say(f"writes went on after {pause:.1f} seconds")
    say(f"{len(acknowledged)} writes were acknowledged, {len(lost)} of them are lost")
    return 1 if lost else 0


def describe(cluster: Cluster) -> None:
    ports, pids = cluster.ports, [process.pid for process in cluster.servers]
    say(f"""
three servers on one PostgreSQL (port {ports.database}) and one NATS (port {ports.bus}), behind HAProxy
everything lies in {cluster.folder}
  everything      http://127.0.0.1:{ports.everything}/     the active server
  reads           http://127.0.0.1:{ports.reads}/     all servers: GET /apis/v1/...
  GPU device API  127.0.0.1:{ports.gpus}             all servers
  edge daemons    127.0.0.1:{ports.edge}             all servers

{DAEMONS} edge daemons and a provider of 4 GPUs are connected; `AGENTS` says to which server:
  fleetplane servers --config {cluster.config}
  fleetplane edge ls --data-dir {cluster.folder}/server-1
  fleetplane edge run --data-dir {cluster.folder}/server-2 --target all -- uname -a

what to kill, and then look again with `fleetplane servers`; what ended is started again:
  the active one, server-{(cluster.active() or 0) + 1}:   kill -9 {pids[cluster.active() or 0]}
  all of them:   kill -9 {" ".join(str(pid) for pid in pids)}
  NATS:          kill -9 {cluster.bus.pid}; watches hear of changes half a second later, no more
  freeze one:    kill -STOP PID; ten seconds later: kill -CONT PID
Ctrl-C ends everything.
""")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--base-port", type=int, default=18080, help="first of fifteen; 0: any that are free")
    parser.add_argument("--show", action="store_true", help="demonstrate a takeover, and end")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="fleetplane-cluster-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(folder, Ports(given.base_port), stack)
        say("starting PostgreSQL, NATS, three servers and HAProxy")
        cluster.start()
        ports = cluster.ports
        cluster.until(lambda: cluster.is_ready(ports.everything, "/readyz"), "an active server")
        standing = [port for port in ports.web if not cluster.is_ready(port, "/readyz")]
        cluster.until(
            lambda: all(cluster.is_ready(port, "/readyz/reads") for port in standing), "reads on the others"
        )
        if given.show:
            return show(cluster)
        say(f"enrolling {DAEMONS} edge daemons")
        cluster.start_agents()
        cluster.until(lambda: cluster.agents() >= DAEMONS, "the agents")
        describe(cluster)
        with suppress(KeyboardInterrupt):
            while True:
                cluster.tend()
                time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
