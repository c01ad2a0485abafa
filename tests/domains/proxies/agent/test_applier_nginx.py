"""Changes of a real NGINX: the good, the bad, those cut short, and those under load."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from support.proxies import proxy_agent_victim
from support.proxies.nginx_rig import NGINX, Rig, host, saying
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.agent.nginx import confirmation as journals
from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import ChangePhase, VersionState
from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


async def ask(port: int, *, tls: ssl.SSLContext | None = None) -> str:
    """One request on a connection of its own; the body of a 200, else an error."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:100]
        return answer.partition(b"\r\n\r\n")[2].decode()
    finally:
        writer.close()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def clashing(version: int, port: int, taken: int, words: str = "") -> pb.ConfigUpdate:
    """What `nginx -t` accepts and NGINX cannot do: a port that somebody else has."""
    update = saying(version, port, words)
    update.virtual_hosts.append(host(taken, identity="h2"))
    return update


async def serving(rig: Rig, port: int) -> VersionApplier:
    applier = rig.applier()
    await applier.open()
    assert (await applier.apply(saying(1, port), rig.report)).state is VersionState.SUCCESS
    return applier


async def test_a_version_comes_to_service_in_the_order_of_its_states(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    assert [status.state for status in rig.statuses] == ["PENDING", "VALIDATING", "APPLYING", "SUCCESS"]
    assert rig.statuses[-1].applied_at_ms > 0
    assert await ask(port) == "1"
    assert applier.last_status == rig.statuses[-1]
    await applier.forget_status(rig.statuses[-1])
    assert journals.read(rig.paths.journal).status is None


async def test_the_same_version_again_succeeds_without_touching_nginx(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    workers = await rig.workers()
    assert (await applier.apply(saying(1, port), rig.report)).state is VersionState.SUCCESS
    assert rig.nginx.workers() == workers


async def test_an_older_version_is_stale(rig: Rig) -> None:
    applier = await serving(rig, free_port())
    outcome = await applier.apply(saying(0, free_port()), rig.report)
    assert (outcome.state, "stale version" in outcome.error) == (VersionState.FAILED, True)


async def test_what_nginx_refuses_to_read_never_gets_near_service(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    workers = await rig.workers()
    update = saying(2, port)
    update.virtual_hosts[0].custom_directives["client_max_body_size"] = "much"
    outcome = await applier.apply(update, rig.report)
    assert (outcome.state, '"client_max_body_size" directive invalid value' in outcome.error) == (
        VersionState.FAILED,
        True,
    )
    assert rig.nginx.workers() == workers
    assert rig.releases.current() == "1-2"
    assert await ask(port) == "1"


async def test_what_passes_the_test_and_cannot_bind_is_rolled_back_in_nginxs_words(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    with taken_port() as taken:
        outcome = await applier.apply(clashing(2, port, taken, "1"), rig.report)
    assert outcome.state is VersionState.ROLLED_BACK
    assert f"bind() to 127.0.0.1:{taken} failed" in outcome.error
    assert rig.releases.current() == journals.read(rig.paths.journal).live == "1-2"
    assert await rig.nginx.answering() == "1-2"
    assert await ask(port) == "1"
    assert not applier.broken
    assert (await applier.apply(saying(3, port), rig.report)).state is VersionState.SUCCESS
    assert await ask(port) == "3"


GOOD = [
    StagingStep.STAGED,
    StagingStep.VALIDATED,
    StagingStep.JOURNALED,
    StagingStep.SWITCHED,
    StagingStep.SIGNALLED,
    StagingStep.RELOADED,
    StagingStep.RECORDED,
]
BAD = [
    StagingStep.REVERTING,
    StagingStep.SWITCHED_BACK,
    f"{StagingStep.SIGNALLED}#2",
    StagingStep.RELOADED_BACK,
]


def victim(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, proxy_agent_victim.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def die_at(rig: Rig, update: pb.ConfigUpdate, step: str) -> None:
    update_file = rig.paths.state / "victim.pb"
    update_file.write_bytes(update.SerializeToString())
    done = victim(rig.paths.state, update_file, step)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("step", GOOD)
async def test_an_agent_killed_during_a_good_change_leaves_one_version_or_the_other(
    rig: Rig, step: StagingStep
) -> None:
    port = free_port()
    applier = await serving(rig, port)
    assert applier.last_status is not None
    await applier.forget_status(applier.last_status)
    await asyncio.to_thread(die_at, rig, saying(2, port), step)
    assert await ask(port) in ("1", "2")

    successor = rig.applier()
    await successor.open()

    announced = step not in (StagingStep.STAGED, StagingStep.VALIDATED)
    assert await ask(port) == ("2" if announced else "1")
    journal = journals.read(rig.paths.journal)
    assert (journal.phase, journal.live) == (ChangePhase.LIVE, rig.releases.current())
    assert await rig.nginx.answering() == journal.live
    assert not list(rig.paths.releases.glob("*.unfinished"))
    if announced:  # the server hears of it, though another agent did it
        assert successor.last_status is not None
        assert (successor.last_status.version, successor.last_status.state) == (2, VersionState.SUCCESS)
    else:  # the server asks again
        assert successor.last_status is None
        assert (await successor.apply(saying(2, port), rig.report)).state is VersionState.SUCCESS


@pytest.mark.parametrize("step", BAD)
async def test_an_agent_killed_while_going_back_leaves_the_old_version(rig: Rig, step: str) -> None:
    port = free_port()
    await serving(rig, port)
    with taken_port() as taken:
        await asyncio.to_thread(die_at, rig, clashing(2, port, taken), step)
        assert await ask(port) == "1"

        successor = rig.applier()
        await successor.open()
    assert await ask(port) == "1"
    journal = journals.read(rig.paths.journal)
    assert (journal.phase, journal.live, rig.releases.current()) == (ChangePhase.LIVE, "1-2", "1-2")
    assert successor.last_status is not None
    assert (successor.last_status.version, successor.last_status.state) == (2, VersionState.ROLLED_BACK)
    assert "bind()" in successor.last_status.error


async def test_a_new_agent_adopts_the_running_nginx_without_touching_it(rig: Rig) -> None:
    port = free_port()
    await serving(rig, port)
    workers = await rig.workers()
    successor = rig.applier()
    await successor.open()
    assert rig.nginx.workers() == workers
    assert successor.live is not None
    assert successor.live.manifest.version == 1


async def test_an_nginx_that_was_killed_is_started_again_on_what_it_served(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    master = rig.nginx.master()
    assert master is not None
    os.kill(master.pid, signal.SIGKILL)  # its workers stay, and keep the port
    while rig.nginx.master() is not None:
        await asyncio.sleep(0.01)
    outcome = await applier.revive()
    assert outcome is not None
    assert outcome.state is VersionState.SUCCESS, outcome.error
    assert await ask(port) == "1"
    assert await applier.revive() is None


async def test_an_nginx_that_was_stopped_on_purpose_stays_so_until_it_is_restarted(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    assert (await applier.stop(graceful=True, within_seconds=60.0)).state is VersionState.SUCCESS
    assert rig.nginx.master() is None
    successor = rig.applier()
    await successor.open()
    assert await successor.revive() is None
    assert "stopped" in (await successor.apply(saying(2, port), rig.report)).error
    assert (await successor.restart(force=False, within_seconds=60.0)).state is VersionState.SUCCESS
    assert await ask(port) == "1"


async def test_somebody_elses_nginx_is_signalled_and_never_started(rig: Rig) -> None:
    port = free_port()
    applier = rig.applier(managed=False)
    await applier.open()
    assert rig.nginx.master() is None
    assert (await applier.apply(saying(1, port), rig.report)).error == "NGINX is not running"
    where = ("-p", rig.paths.state, "-e", rig.paths.error_log, "-c", rig.paths.config)
    service = await asyncio.create_subprocess_exec(NGINX, *where)  # as its service would start it
    assert await service.wait() == 0
    async with asyncio.timeout(60):
        while rig.nginx.master() is None:  # which goes to the background before it says its number
            await asyncio.sleep(0.01)
    assert (await applier.apply(saying(1, port), rig.report)).state is VersionState.SUCCESS
    assert await ask(port) == "1"
    assert "nobody started it" in (await applier.restart(force=True, within_seconds=0.3)).error
    assert await applier.revive() is None


async def test_an_ordinary_user_can_run_the_agent_and_nginx(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("everything here runs as an ordinary user already")
    shutil.chown(folder, "nobody")
    port = free_port()
    update_file = folder / "update.pb"
    update_file.write_bytes(saying(1, port).SerializeToString())
    done = await asyncio.to_thread(victim, folder, update_file, "never", "nobody")
    assert done.returncode == 0, done.stderr
    master = Rig(folder).nginx.master()
    assert master is not None
    assert Path(f"/proc/{master.pid}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert await ask(port) == "1"


async def test_files_that_somebody_changed_by_hand_are_noticed(rig: Rig) -> None:
    applier = await serving(rig, free_port())
    assert applier.live is not None
    assert not rig.releases.drifted(applier.live)
    with (rig.releases.folder(applier.live.name) / "nginx.conf").open("a") as file:
        file.write("# mine\n")
    assert rig.releases.drifted(applier.live)


def test_private_keys_and_updates_are_readable_by_their_owner_alone(rig: Rig, tmp_path: Path) -> None:
    update = secured(1, 443, tmp_path, ThrowawayCa())
    from fleetplane.domains.proxies.nginx.rendering import render

    rig.releases.prepare()
    rig.releases.stage("1-1", update, render(update, rig.site, release="1-1"), {})
    folder = rig.releases.folder("1-1")
    for name in ("certs/cert-1.key", "update.pb"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert rig.paths.releases.stat().st_mode & 0o777 == 0o700


# Under load.


class Load:
    """Clients that ask without a pause, and count."""

    def __init__(self, port: int, *, clients: int = 4, tls: ssl.SSLContext | None = None) -> None:
        self._port, self._clients, self._tls = port, clients, tls
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._enough = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._enough = True
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        while not self._enough:
            try:
                self.answers.append(await ask(self._port, tls=self._tls))
            except (OSError, AssertionError) as error:
                self.failures.append(repr(error))

    async def answered(self, words: str) -> None:
        while words not in self.answers[-1000:] and not self.failures:
            await asyncio.sleep(0.005)

    async def reach(self, count: int) -> None:
        while len(self.answers) < count and not self.failures:
            await asyncio.sleep(0.02)


async def test_ten_thousand_requests_across_twenty_reloads_all_succeed(rig: Rig) -> None:
    port = free_port()
    applier = await serving(rig, port)
    async with Load(port) as load:
        await load.answered("1")
        for version in range(2, 22):
            assert (await applier.apply(saying(version, port), rig.report)).state is VersionState.SUCCESS
            await load.answered(str(version))
        await load.reach(10_000)
    assert load.failures == []
    assert len(load.answers) >= 10_000
    assert set(load.answers) == {str(version) for version in range(1, 22)}
    assert await ask(port) == "21"


def secured(version: int, port: int, folder: Path, ca: ThrowawayCa) -> pb.ConfigUpdate:
    folder.mkdir(parents=True, exist_ok=True)
    chain, key = ca.server(folder)
    update = saying(version, port)
    update.virtual_hosts[0].server_name = "a.test localhost"
    update.virtual_hosts[0].ssl_enabled = True
    update.virtual_hosts[0].ssl_certificate_id = "cert-1"
    update.certificates["cert-1"].CopyFrom(
        pb.Certificate(id="cert-1", certificate_pem=chain.read_text(), private_key_pem=key.read_text())
    )
    return update


async def test_a_certificate_is_replaced_under_load_without_a_failed_request(
    rig: Rig, tmp_path: Path
) -> None:
    port, ca = free_port(), ThrowawayCa()
    applier = rig.applier()
    await applier.open()
    assert (
        await applier.apply(secured(1, port, tmp_path / "1", ca), rig.report)
    ).state is VersionState.SUCCESS
    trust = ssl.create_default_context(cadata=ca.pem.decode())
    before = _serial(port, trust)
    async with Load(port, clients=2, tls=trust) as load:
        await load.reach(50)
        assert (
            await applier.apply(secured(2, port, tmp_path / "2", ca), rig.report)
        ).state is VersionState.SUCCESS
        after = await asyncio.to_thread(_serial, port, trust)
        await load.reach(len(load.answers) + 50)
    assert load.failures == []
    assert before != after
    assert await ask(port, tls=trust) == "2"


def _serial(port: int, trust: ssl.SSLContext) -> object:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        trust.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        certificate = wrapped.getpeercert()
        assert certificate is not None
        return certificate["serialNumber"]


async def test_a_certificate_that_does_not_fit_its_key_leaves_the_old_one_in_service(
    rig: Rig, tmp_path: Path
) -> None:
    port, ca = free_port(), ThrowawayCa()
    applier = rig.applier()
    await applier.open()
    assert (
        await applier.apply(secured(1, port, tmp_path / "1", ca), rig.report)
    ).state is VersionState.SUCCESS
    broken = secured(2, port, tmp_path / "2", ca)
    other = secured(2, port, tmp_path / "3", ca)
    broken.certificates["cert-1"].private_key_pem = other.certificates["cert-1"].private_key_pem
    outcome = await applier.apply(broken, rig.report)
    assert outcome.state is VersionState.SUCCESS
    assert list(outcome.set_aside) == ["certificate/cert-1"]
    assert "key values mismatch" in outcome.set_aside["certificate/cert-1"]
    trust = ssl.create_default_context(cadata=ca.pem.decode())
    assert await ask(port, tls=trust) == "2"
