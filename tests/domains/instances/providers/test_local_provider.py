"""Local instances are real processes: they outlive the server, are found again, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetplane.domains.instances.providers.conformance import (
    CHECKS,
    Check,
    Subject,
    name_of,
    new_instance_id,
)
from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    CreateRequest,
    InstanceGone,
    LoadBalancer,
    ProviderContext,
    ProviderError,
    ProviderStatus,
    QuotaExhausted,
)
from fleetplane.domains.instances.providers.local import processes
from fleetplane.domains.instances.providers.local.provider import LocalProvider
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, SettingsError

HERE = Path(__file__).parent
AGENT = (sys.executable, str(HERE / "stand_in_agent.py"))
DEADLINE_SECONDS = 60.0
SERVER_SECRET = "FLEETPLANE_IDENTITY__MASTER_KEY"

MakeLocal = Callable[..., LocalProvider]
Start = Callable[..., Awaitable[LocalProvider]]


@pytest.fixture
async def make_local(tmp_path: Path) -> AsyncIterator[MakeLocal]:
    def make(*agent_arguments: str, **options: object) -> LocalProvider:
        context = ProviderContext(
            clock=SystemClock(),
            state_directory=tmp_path,
            environment={"PATH": os.environ["PATH"], SERVER_SECRET: "hush"},
            command=(*AGENT, *agent_arguments),
            variables=frozenset({"EXTRA"}),
        )
        provider = LocalProvider(context)
        provider.configure({"stop_grace_seconds": 5.0, **options})
        assert provider.validate() == []
        return provider

    yield make
    # Whatever the test proved or failed to prove, nothing of it stays.
    for pid in ours(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def start(make_local: MakeLocal) -> AsyncIterator[Start]:
    started: list[LocalProvider] = []

    async def start(*agent_arguments: str, **options: object) -> LocalProvider:
        provider = make_local(*agent_arguments, **options)
        await provider.start()
        started.append(provider)
        return provider

    yield start
    for provider in started:
        await provider.close(kill=False)


def request(instance_id: str = "", **fields: Any) -> CreateRequest:
    return CreateRequest(
        cluster="c",
        shard="s",
        tenant="t",
        group="g",
        template="web",
        prefix="web",
        instance_id=instance_id or new_instance_id("web"),
        nonce="the-nonce",
        ca_certificate="the-ca",
        registration_address="127.0.0.1:8992",
        agent_address="127.0.0.1:8994",
        **fields,
    )


def ours(state: Path) -> list[int]:
    """Living processes that belong to any instance below `state`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            directory = process.environ().get(processes.MARKER, "")
            if directory.startswith(f"{state}/") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


async def eventually(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (answer := condition()):
            await asyncio.sleep(0.02)
        return answer


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def told(state: Path, instance_id: str) -> dict[str, Any]:
    """What the stand-in agent says it was given; from then on `ours` knows it for sure.

    A process that becomes another program has no environment for a moment.
    """
    path = state / "local" / instance_id / "recv" / "told.json"
    await eventually(path.exists)
    answer: dict[str, Any] = json.loads(path.read_text())
    return answer


async def status_of(provider: LocalProvider, instance_id: str) -> ProviderStatus:
    return (await provider.get_instance_status(instance_id, "")).status


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_the_local_provider_conforms(check: Check, make_local: MakeLocal, tmp_path: Path) -> None:
    await check(Subject(factory=make_local, request=request(), settle_seconds=DEADLINE_SECONDS))
    assert ours(tmp_path) == []


async def test_an_agent_gets_private_directories_and_its_variables(start: Start, tmp_path: Path) -> None:
    provider = await start(environment={"EXTRA": "1"})
    wanted = request(report_interval_seconds=1.5, args={"environment": {"NSTANCE_DEBUG": "true"}})
    await provider.create_instance(wanted)
    directory = tmp_path / "local" / wanted.instance_id
    environment = (await told(tmp_path, wanted.instance_id))["environment"]

    expected = {
        "EXTRA": "1",
        "NSTANCE_DEBUG": "true",
        "NSTANCE_INSTANCE_ID": wanted.instance_id,
        "NSTANCE_INSTANCE_KIND": "web",
        "NSTANCE_INSTANCE_HOSTNAME": wanted.instance_id,
        "NSTANCE_INSTANCE_IPV4": "127.0.0.1",
        "NSTANCE_REPORT_INTERVAL": "1.5s",
        "NSTANCE_SERVER_REGISTRATION_ADDR": "127.0.0.1:8992",
        "NSTANCE_SERVER_AGENT_ADDR": "127.0.0.1:8994",
        "NSTANCE_IDENTITY_DIR": str(directory / "identity"),
        "NSTANCE_KEYS_DIR": str(directory / "keys"),
        "NSTANCE_RECV_DIR": str(directory / "recv"),
    }
    assert environment.items() >= expected.items()
    assert SERVER_SECRET not in environment
    for folder in (directory, directory / "identity", directory / "keys", directory / "recv"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name, content in (("nonce.jwt", "the-nonce"), ("ca.crt", "the-ca")):
        file = directory / "identity" / name
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o600, content)
    made_by_agent = directory / "recv" / "told.json"
    assert stat.S_IMODE(made_by_agent.stat().st_mode) == 0o600
    assert "the-nonce" not in (directory / "record.json").read_text()


async def test_an_agent_leads_its_own_session_and_is_nobodys_child_here(start: Start, tmp_path: Path) -> None:
    provider = await start()
    created = await provider.create_instance(request())
    pid = (await told(tmp_path, created.instance_id))["pid"]
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    assert pid not in [child.pid for child in psutil.Process().children(recursive=True)]


async def test_an_agent_that_dies_is_a_machine_that_is_gone(start: Start, tmp_path: Path) -> None:
    provider = await start()
    wanted = request()
    await provider.create_instance(wanted)
    pid = (await told(tmp_path, wanted.instance_id))["pid"]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await status_of(provider, wanted.instance_id) is not ProviderStatus.DELETED:
            await asyncio.sleep(0.02)

    # A late retry of its creation does not bring it back, and it can still be cleared away.
    assert (await provider.create_instance(wanted)).status is ProviderStatus.DELETED
    assert ours(tmp_path) == []
    await provider.delete_instance(wanted.instance_id, "")
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.parametrize("temper", ["obedient", "stubborn"])
async def test_deleting_ends_the_agent_and_all_it_started(temper: str, start: Start, tmp_path: Path) -> None:
    provider = await start(temper, "brood", stop_grace_seconds=0.2)
    created = await provider.create_instance(request())
    family = await told(tmp_path, created.instance_id)
    await eventually(lambda: set(ours(tmp_path)) == {family["pid"], *family["children"]})

    await provider.delete_instance(created.instance_id, created.provider_id)
    assert ours(tmp_path) == []
    assert list((tmp_path / "local").iterdir()) == []


async def test_a_process_that_took_over_the_number_is_neither_believed_nor_killed(
    start: Start, tmp_path: Path
) -> None:
    provider = await start("brief")
    created = await provider.create_instance(request())
    await told(tmp_path, created.instance_id)
    await eventually(lambda: ours(tmp_path) == [])
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        note = tmp_path / "local" / created.instance_id / "process.json"
        was = json.loads(note.read_text())
        note.write_text(json.dumps({**was, "pid": stranger.pid}))
        assert await status_of(provider, created.instance_id) is ProviderStatus.DELETED

        ticks = int(Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19])
        note.write_text(json.dumps({"pid": stranger.pid, "start_ticks": ticks}))
        assert await status_of(provider, created.instance_id) is ProviderStatus.DELETED

        await provider.delete_instance(created.instance_id, created.provider_id)
        assert Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    finally:
        stranger.kill()
        await stranger.wait()


async def test_another_process_of_the_instance_with_the_number_is_not_the_agent(
    start: Start, tmp_path: Path
) -> None:
    provider = await start("brood")
    created = await provider.create_instance(request())
    family = await told(tmp_path, created.instance_id)
    note = tmp_path / "local" / created.instance_id / "process.json"
    # The child carries the instance's marker, and has got the number; only its start tells it apart.
    note.write_text(
        json.dumps({**json.loads(note.read_text()), "pid": family["children"][0], "start_ticks": 1})
    )
    assert await status_of(provider, created.instance_id) is ProviderStatus.DELETED
    await provider.delete_instance(created.instance_id, "")
    assert ours(tmp_path) == []


def test_a_process_that_only_waits_to_be_reaped_has_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], env={processes.MARKER: str(tmp_path)})
    try:
        wait_until(lambda: processes.members(tmp_path) == [child.pid])
        processes.end(tmp_path, None, grace_seconds=DEADLINE_SECONDS)  # would raise if it were still counted
        assert processes.members(tmp_path) == []
    finally:
        child.kill()
        assert child.wait() == -signal.SIGTERM


def test_a_process_that_becomes_another_program_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["sleep", "600"], env={processes.MARKER: str(tmp_path)})
    try:
        wait_until(lambda: processes.members(tmp_path) == [child.pid])
        stat = processes._stat(child.pid)
        assert stat is not None
        known = processes.Process(pid=child.pid, start_ticks=stat.start_ticks)
        read, empty = processes._environment, iter([b"", b""])
        monkeypatch.setattr(processes, "_environment", lambda pid: next(empty, read(pid)))
        assert processes.is_alive(known, tmp_path)
        assert next(empty, None) is None, "it was looked at again"
        assert not processes.is_alive(known, tmp_path / "another")
    finally:
        child.kill()
        child.wait()
    assert not processes.is_alive(known, tmp_path)


async def test_what_is_no_instance_is_cleared_away_at_the_start(start: Start, tmp_path: Path) -> None:
    barely = tmp_path / "local" / "web1"
    barely.mkdir(parents=True)
    provider = await start()
    assert not barely.exists()
    assert (await provider.list_instances("c", "s", limit=10)).items == ()


ALIVE_AFTERWARDS = {
    "before-record": False,
    "before-furnishing": False,
    "before-spawn": False,
    "after-spawn": True,
    "after-create": True,
    "before-kill": False,
    "before-removal": False,
    "in-removal": False,
}


@pytest.mark.parametrize("step", ALIVE_AFTERWARDS)
async def test_a_server_killed_at_any_step_leaves_one_instance_or_none(
    step: str, start: Start, tmp_path: Path
) -> None:
    wanted = request()
    victim = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "local_victim.py"), str(tmp_path), wanted.instance_id, step
    )
    assert await victim.wait() == -signal.SIGKILL
    alive = ALIVE_AFTERWARDS[step]
    if alive:
        await told(tmp_path, wanted.instance_id)
    left_running = ours(tmp_path)

    successor = await start()
    listed = (await successor.list_instances("c", "s", limit=10)).items
    assert [(each.instance_id, each.status) for each in listed] == (
        [(wanted.instance_id, ProviderStatus.RUNNING)] if alive else []
    )
    assert ours(tmp_path) == (left_running if alive else [])
    assert [entry.name for entry in (tmp_path / "local").iterdir()] == [wanted.instance_id] * alive

    # The retry that a restarted server makes ends in exactly one agent, whatever had happened.
    assert (await successor.create_instance(wanted)).status is ProviderStatus.RUNNING
    await told(tmp_path, wanted.instance_id)
    assert len(ours(tmp_path)) == 1
    await successor.delete_instance(wanted.instance_id, "")
    assert ours(tmp_path) == []


async def test_a_creation_that_was_given_up_is_found_by_its_retry(start: Start, tmp_path: Path) -> None:
    provider = await start()
    wanted = request()
    attempt = asyncio.create_task(provider.create_instance(wanted))
    record = tmp_path / "local" / wanted.instance_id / "record.json"
    await eventually(record.exists)
    attempt.cancel()
    with suppress(asyncio.CancelledError):
        await attempt

    assert (await provider.create_instance(wanted)).status is ProviderStatus.RUNNING
    await told(tmp_path, wanted.instance_id)
    assert len(ours(tmp_path)) == 1


async def test_closing_leaves_agents_or_ends_them_as_the_options_say(
    make_local: MakeLocal, tmp_path: Path
) -> None:
    leaving, ending = make_local(), make_local(stop_on_close=True)
    await leaving.start()
    created = await leaving.create_instance(request())
    await told(tmp_path, created.instance_id)
    await leaving.close()
    assert len(ours(tmp_path)) == 1

    await ending.start()
    assert await status_of(ending, created.instance_id) is ProviderStatus.RUNNING
    await ending.close()
    assert ours(tmp_path) == []
    with pytest.raises(ProviderError, match="not running"):
        await ending.create_instance(request())


async def test_a_creation_that_cannot_start_leaves_nothing(start: Start, tmp_path: Path) -> None:
    provider = await start()
    # The log cannot be opened for writing, so the launcher fails.
    wanted = request()
    directory = tmp_path / "local" / wanted.instance_id
    (directory / "agent.log").mkdir(parents=True)
    with pytest.raises(ProviderError, match="cannot start"):
        await provider.create_instance(wanted)
    assert list((tmp_path / "local").iterdir()) == []
    assert (await provider.create_instance(wanted)).status is ProviderStatus.RUNNING


async def test_a_log_past_its_limit_is_rolled_over(start: Start, tmp_path: Path) -> None:
    provider = await start("loud", log_limit_bytes=50)
    created = await provider.create_instance(request())
    await told(tmp_path, created.instance_id)
    await provider.get_instance_status(created.instance_id, "")
    directory = tmp_path / "local" / created.instance_id
    assert (directory / "agent.log").stat().st_size == 0
    assert (directory / "agent.log.1").read_text() == "x" * 100 + "\n"


async def test_there_are_no_more_instances_than_allowed(start: Start) -> None:
    provider = await start(max_instances=1)
    wanted = request()
    await provider.create_instance(wanted)
    assert not await provider.check_subnet_capacity("any")
    with pytest.raises(QuotaExhausted):
        await provider.create_instance(request())
    await provider.create_instance(wanted)  # a retry is no new one
    await provider.delete_instance(wanted.instance_id, "")
    assert await provider.check_subnet_capacity("any")


async def test_load_balancers_are_told_that_all_is_well(start: Start) -> None:
    provider = await start()
    created = await provider.create_instance(request())
    balancer = LoadBalancer(key="front")
    await provider.register_with_lb(created.provider_id, balancer)
    assert await provider.get_lb_target_state(created.provider_id, balancer) is BalancerTargetState.HEALTHY
    assert await provider.list_lb_instances(balancer) == (created.provider_id,)
    await provider.deregister_from_lb(created.provider_id, balancer)


@pytest.mark.parametrize("instance_id", ["../escape", "UPPER", "", "a/b", ".hidden", "x" * 65])
async def test_an_id_that_is_no_file_name_is_refused(instance_id: str, start: Start, tmp_path: Path) -> None:
    provider = await start()
    wanted = CreateRequest(cluster="c", shard="s", instance_id=instance_id)
    with pytest.raises(InvalidArgument):
        await provider.create_instance(wanted)
    with pytest.raises(InstanceGone):
        await provider.delete_instance(instance_id, "")
    assert list((tmp_path / "local").iterdir()) == []


async def test_arguments_and_options_that_are_unknown_are_refused(
    start: Start, make_local: MakeLocal
) -> None:
    provider = await start()
    with pytest.raises(InvalidArgument, match="ImageId"):
        await provider.create_instance(request(args={"ImageId": "ami-1"}))
    with pytest.raises(InvalidArgument, match="environment"):
        await provider.create_instance(request(args={"environment": {"A": 1}}))
    with pytest.raises(SettingsError, match="did you mean 'environment'"):
        make_local(enviroment={"NSTANCE_X": "x"})


def test_a_program_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    context = ProviderContext(clock=SystemClock(), state_directory=tmp_path, command=("no-such-agent",))
    provider = LocalProvider(context)
    provider.configure({})
    assert provider.validate() == ["instances.agent_command: there is no program 'no-such-agent'"]
