"""The agent as a process: its environment, its signals, its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import InstanceServerDouble, commit, file, until
from support.shared.cli_runner import COMMAND, execute

from fleetplane.domains.instances.agent import root
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.node.lock import Occupied, sole_user


def environment(rig: Rig) -> dict[str, str]:
    """As the protocol's first agent is set up."""
    return {
        "NSTANCE_SERVER_REGISTRATION_ADDR": rig.settings.registration_address,
        "NSTANCE_SERVER_AGENT_ADDR": rig.settings.agent_address,
        "NSTANCE_INSTANCE_ID": rig.settings.instance_id,
        "NSTANCE_IDENTITY_DIR": str(rig.identity),
        "NSTANCE_KEYS_DIR": str(rig.keys),
        "NSTANCE_RECV_DIR": str(rig.recv),
        "NSTANCE_RECV_MODE": "0604",
        "NSTANCE_REPORT_INTERVAL": "500ms",
        "NSTANCE_SPOT_POLL_INTERVAL": "0",
        "NSTANCE_INSTANCE_HOSTNAME": "from-the-environment",
        "NSTANCE_INSTANCE_KIND": "abc",
        "NSTANCE_ENVIRONMENT": "production",
        "NSTANCE_DEBUG": "true",
    }


def start(rig: Rig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "agent", "instance"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(rig)},
    )


async def test_it_takes_everything_from_the_environment_and_sigterm_ends_it_cleanly(
    rig: Rig, server: InstanceServerDouble
) -> None:
    agent = start(rig)
    try:
        await until(lambda: server.files and len(server.raw_reports) >= 2, seconds=60)
        server.files[0].send(file("app.env"), commit("sha256:new"))
        await until(lambda: rig.config_hash == "sha256:new")
        agent.send_signal(signal.SIGTERM)
        _, err = await asyncio.to_thread(agent.communicate, timeout=60)
    finally:
        agent.kill()
    assert agent.returncode == 0
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert events[-1]["event"] == "agent_stopped"
    assert "registered" in [entry["event"] for entry in events]
    assert server.registrations[0].hostname == "from-the-environment"
    assert (rig.recv / "app.env").stat().st_mode & 0o777 == 0o604
    await until(lambda: server.report_ends)
    assert server.report_ends == ["client"]


async def test_a_running_agent_has_no_library_in_memory_that_it_seldom_needs(
    rig: Rig, server: InstanceServerDouble
) -> None:
    agent = start(rig)
    try:
        await until(lambda: server.keys and server.raw_reports, seconds=60)
        server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet"]))
        await until(lambda: server.submissions, seconds=60)
        mapped = Path(f"/proc/{agent.pid}/maps").read_text()
    finally:
        agent.terminate()
        await asyncio.to_thread(agent.communicate, timeout=60)
    assert "cygrpc" in mapped
    assert "cryptography" not in mapped


async def test_a_killed_agent_starts_again_where_it_was(rig: Rig, server: InstanceServerDouble) -> None:
    agent = start(rig)
    try:
        await until(lambda: server.keys and server.raw_reports, seconds=60)
        server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet"]))
        await until(lambda: server.submissions)
    finally:
        agent.kill()
        await asyncio.to_thread(agent.communicate, timeout=60)
    seen = len(server.keys)
    again = start(rig)
    try:
        await until(lambda: len(server.keys) > seen, seconds=60)
        server.keys[-1].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet"]))
        await until(lambda: len(server.submissions) == 2)
    finally:
        again.terminate()
        await asyncio.to_thread(again.communicate, timeout=60)
    assert server.submissions[0] == server.submissions[1]
    assert len(server.registrations) == 1


async def test_a_second_agent_on_one_identity_is_told_who_is_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "LOCK_WAIT_SECONDS", 0.2)
    told = pytest.raises(Occupied, match=f"another agent .process {os.getpid()}. works in {rig.identity}")
    with sole_user(rig.identity / root.LOCK_FILE, whose="a test"), told:
        await root.run_instance_agent(rig.settings)


async def test_an_agent_that_is_started_before_the_last_one_ended_waits_for_it(
    rig: Rig, server: InstanceServerDouble
) -> None:
    async with asyncio.TaskGroup() as tasks:
        with sole_user(rig.identity / root.LOCK_FILE, whose="a test"):
            agent = tasks.create_task(root.run_instance_agent(rig.settings))
            await asyncio.sleep(0.5)
            assert not server.registrations
        await until(lambda: server.files, seconds=60)
        agent.cancel()


def test_missing_settings_are_a_usage_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("NSTANCE_")]:
        monkeypatch.delenv(name)
    outcome = execute("agent", "instance")
    assert outcome.code == 2
    assert "NSTANCE_SERVER_REGISTRATION_ADDR" in outcome.err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--report-interval", "21d", "is no duration"),
        ("--recv-mode", "0999", "is no file mode"),
        ("--instance-id", "nobody", "an instance id has"),
        ("--keys-dir", "/nonexistent/keys", "is no folder"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(tmp_path: Path, option: str, value: str, words: str) -> None:
    given = {
        "--registration-address": "127.0.0.1:1",
        "--agent-address": "127.0.0.1:1",
        "--instance-id": "abc06awcb4f5hzmfey7qwt7s8a6q4",
        "--identity-dir": str(tmp_path),
        "--keys-dir": str(tmp_path),
        "--recv-dir": str(tmp_path),
    } | {option: value}
    outcome = execute("agent", "instance", *[word for pair in given.items() for word in pair])
    assert outcome.code == 2
    assert words in outcome.err.splitlines()[-1]
