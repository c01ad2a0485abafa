"""A worker answers strangers: it can read no private key and not the agent's credential."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from support.proxies.nginx_rig import binary, paths_in, saying, state_folder, upstream
from support.proxies.proxy_server_double import TOKEN, ProxyServerDouble, proxy_server, until
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.agent.nginx.confinement import work_folder, worker_user
from fleetplane.domains.proxies.agent.nginx.processes import find_master, workers
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersions
from fleetplane.domains.proxies.nginx.site import Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import SettingsError

UNIT = Path(__file__).parents[3] / "packaging/systemd/fleetplane-proxy.service"
WORKER = "www-data"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="two users need root")


def unit() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_shipped_unit_keeps_the_state_to_the_agent() -> None:
    said = unit()
    assert "User" not in said, "the master must be root for its workers to be somebody else"
    assert said["StateDirectoryMode"] == "0700"
    assert said["UMask"] == "0077"
    assert f"--worker-user {WORKER}" in said["ExecStart"]
    assert "CAP_SYS_ADMIN" not in said["CapabilityBoundingSet"]
    assert "CAP_SYS_PTRACE" not in said["CapabilityBoundingSet"]


@contextlib.contextmanager
def as_shipped(folder: Path, server: ProxyServerDouble) -> Iterator[subprocess.Popen[bytes]]:
    """The agent with the options, the mask and the capabilities of the unit."""
    said = unit()
    kept = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in said["CapabilityBoundingSet"].split())
    options = said["ExecStart"].split()[1:]
    options[options.index("--state-dir") + 1] = str(folder)
    process = subprocess.Popen(
        [
            "setpriv",
            f"--bounding-set=-all,{kept}",
            "--inh-caps=-all",
            sys.executable,
            "-m",
            "fleetplane.cli.main",
            *options,
            "--workers",
            "2",
            "--server",
            server.address,
            "--ca-file",
            str(server.authority),
            "--token",
            TOKEN,
            "--listen-address",
            "127.0.0.1",
        ],
        umask=int(said["UMask"], 8),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.asynccontextmanager
async def swallowing() -> AsyncIterator[str]:
    """The address of a server that takes a whole request before it answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def as_worker(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["setpriv", f"--reuid={WORKER}", f"--regid={WORKER}", "--clear-groups", *command],
        capture_output=True,
        check=False,
    )


def served_with_a_key(port: int, plain: int, behind: str, folder: Path, ca: ThrowawayCa) -> pb.ConfigUpdate:
    folder.mkdir()
    chain, key = ca.server(folder)
    update = saying(1, port)
    update.virtual_hosts[0].server_name = "a.test localhost"
    update.virtual_hosts[0].ssl_enabled = True
    update.virtual_hosts[0].ssl_certificate_id = "cert-1"
    update.certificates["cert-1"].CopyFrom(
        pb.Certificate(id="cert-1", certificate_pem=chain.read_text(), private_key_pem=key.read_text())
    )
    update.upstreams.append(upstream(behind))
    update.virtual_hosts.add(
        id="h2",
        name="h2",
        server_name="up.test",
        listen_port=plain,
        locations=[pb.Location(path="/", upstream_id="u1", custom_directives={"client_max_body_size": "9m"})],
    )
    return update


@needs_root
async def test_under_the_shipped_unit_workers_are_another_user_who_reads_nothing_of_the_agents(
    tmp_path: Path,
) -> None:
    port, plain, ca = free_port(), free_port(), ThrowawayCa()
    with state_folder() as folder:
        paths = paths_in(folder)
        async with proxy_server(tmp_path / "server") as server, swallowing() as behind:
            with as_shipped(folder, server):
                await until(lambda: server.health, seconds=60)
                update = served_with_a_key(port, plain, behind, tmp_path / "c", ca)
                server.send(config_update=update)
                await until(lambda: "SUCCESS" in server.states(1), seconds=60)
                master = find_master(paths.pid, paths.config)
                assert master is not None
                assert _uid(master.pid) == 0
                worker = pwd.getpwnam(WORKER).pw_uid
                # One that has just been started is the master's user for a moment.
                await until(lambda: {_uid(one.pid) for one in workers(master)} == {worker}, seconds=60)

                private = [folder, *folder.rglob("*")]
                names = {path.name for path in private}
                assert {"credential", "cert-1.key", "update.pb", "nginx.conf"} <= names
                for path in private:
                    assert as_worker("cat" if path.is_file() else "ls", str(path)).returncode != 0, path
                assert folder.stat().st_mode & 0o777 == 0o700

                trust = ssl.create_default_context(cadata=ca.pem.decode())
                async with httpx.AsyncClient(verify=trust) as client:
                    assert (await client.get(f"https://localhost:{port}/")).text == "1", "the key is in use"
                    # Larger than any buffer: it goes through the workers' scratch files.
                    sent = await client.post(
                        f"http://127.0.0.1:{plain}/", headers={"host": "up.test"}, content=b"x" * 3_000_000
                    )
                    assert sent.status_code == 200, sent.text
                    paths.access_log.rename(paths.access_log.with_name("access.log.1"))
                    os.kill(master.pid, signal.SIGUSR1)
                    await until(paths.access_log.exists)
                    await until(lambda: _uid_of(paths.access_log) == worker)
                    before = paths.access_log.stat().st_size
                    async with asyncio.timeout(60):
                        while paths.access_log.stat().st_size <= before:  # workers reopen it after the master
                            await client.get(f"https://localhost:{port}/again")
                            await asyncio.sleep(0.05)
                # Without the right to look into processes of others, its orphans are found all the same.
                os.kill(master.pid, signal.SIGKILL)
                await until(lambda: find_master(paths.pid, paths.config) not in (None, master), seconds=60)
                reborn = find_master(paths.pid, paths.config)
                assert reborn is not None
                await until(lambda: workers(reborn), seconds=60)
                async with httpx.AsyncClient(verify=trust) as client:
                    assert (await client.get(f"https://localhost:{port}/")).text == "1"


def _uid(pid: int) -> int:
    """Whose a process is; -1 for one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return -1


def _uid_of(path: Path) -> int:
    return path.stat().st_uid


# Without root there is one user for everything.


def test_an_ordinary_agent_keeps_its_folders_to_itself(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "s")
    StagedVersions(paths).prepare()
    for folder in (paths.state, paths.releases, paths.logs, paths.temporary, paths.run):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "root", ["/", "/proc", "/etc/nginx", "/var", "/run/user", "STATE", "STATE/releases", "PARENT"]
)
def test_no_document_root_may_hold_the_state_or_the_system(tmp_path: Path, root: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    given = Path(root.replace("STATE", str(state)).replace("PARENT", str(tmp_path)))
    site = Site(paths=Paths(state=state), binary=binary(), document_roots=(given,))
    with pytest.raises(SettingsError):
        site.check_document_roots()


def test_a_link_to_the_state_is_no_document_root_either(tmp_path: Path) -> None:
    state, link = tmp_path / "state", tmp_path / "www"
    state.mkdir()
    link.symlink_to(state)
    with pytest.raises(SettingsError):
        Site(paths=Paths(state=state), binary=binary(), document_roots=(link,)).check_document_roots()


@needs_root
def test_workers_are_never_root() -> None:
    with pytest.raises(SettingsError):
        worker_user("root")
    with pytest.raises(SettingsError):
        worker_user("no-such-user-here")
    assert worker_user(WORKER) == f"{WORKER}:{WORKER}"


@needs_root
def test_what_workers_write_lies_outside_the_state(tmp_path: Path) -> None:
    assert work_folder(tmp_path / "s", None, managed=True) == tmp_path / "s-work"
    for inside in (tmp_path / "s" / "w", tmp_path):
        with pytest.raises(SettingsError):
            work_folder(tmp_path / "s", inside, managed=True)


@needs_root
@pytest.mark.parametrize("name", ["s-work", "s", "s-work/logs"])
def test_a_folder_that_somebody_else_made_first_is_not_used(tmp_path: Path, name: str) -> None:
    """Beside a state directory in a shared folder, a neighbour could wait with one of their own."""
    planted = tmp_path / name
    planted.mkdir(parents=True)
    os.chown(planted, pwd.getpwnam(WORKER).pw_uid, -1)
    with pytest.raises(SettingsError, match="belongs to somebody else"):
        StagedVersions(Paths(state=tmp_path / "s", work=tmp_path / "s-work")).prepare()


@needs_root
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s-work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="is a link"):
        StagedVersions(Paths(state=tmp_path / "s", work=tmp_path / "s-work")).prepare()
