"""The whole daemon, talking to a double of the server that checks every event it gets."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from support.edge.edge_daemon_rig import configure, edge_section, enrolled, running
from support.edge.edge_server_double import EdgeServerDouble, edge_server, until

from fleetplane.domains.edge.agent import session
from fleetplane.domains.edge.agent.commands.commands import CommandWork
from fleetplane.domains.edge.agent.commands.judge import PermittedJob
from fleetplane.domains.edge.agent.daemon import wait_seconds
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.agent.tools.contract import CommandOutcomeReport
from fleetplane.domains.edge.wire.protobuf_types import duration_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2


@pytest.fixture
async def state(server: EdgeServerDouble, tmp_path: Path) -> StateFolder:
    return await enrolled(tmp_path / "state", server)


def contexts(*capabilities: dict[str, object], deny: tuple[str, ...] = ()) -> dict[str, object]:
    held = {"name": "zaru-free", "capabilities": list(capabilities), "deny_list": list(deny)}
    return {"spec": {"security_contexts": [held]}}


# Speaking.


async def test_it_says_hello_and_every_event_is_signed_for_in_full(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    configure(state, edge_section(capabilities={"custom_labels": {"rack": "7"}}))
    async with running(state):
        await until(lambda: server.beats)
        found = await server.outcome("cmd.run", {"command": "echo", "args": ["hello"]})
    assert (found.outcome, found.exit_code, found.stdout) == ("ok", 0, b"hello\n")
    assert server.complaints == []
    said = pb.EdgeCapabilities.FromString(server.hellos[0].capabilities)
    assert said.custom_labels["rack"] == "7"
    assert "shell" in said.local_tools
    assert "cmd.run" in said.local_tools
    assert server.metadata[0]["x-aegis-edge-dialect"] == "documented"
    assert server.metadata[0]["authorization"].startswith("Bearer ")


async def test_the_same_over_tls(tmp_path: Path) -> None:
    async with edge_server(tmp_path / "server", tls=True) as server:
        state = await enrolled(tmp_path / "state", server)
        async with running(state, authority=server.authority):
            await until(lambda: server.hellos)
            found = await server.outcome("cmd.run", {"command": "true"})
    assert found.outcome == "ok"


async def test_output_comes_in_order_with_any_byte_in_it(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    script = "printf '\\000\\377'; head -c 200000 /dev/zero; printf 'end'; echo oops >&2; exit 4"
    async with running(state):
        await until(lambda: server.hellos)
        command_id = server.invoke("cmd.run", {"command": "/bin/sh", "args": ["-c", script]})
        await until(lambda: server.result(command_id) is not None)
    assert server.output(command_id) == b"\0\xff" + bytes(200_000) + b"end"
    assert server.output(command_id, "stderr") == b"oops\n"
    sequences = [chunk.sequence for name, chunk in server.chunks if name == command_id]
    assert sequences == list(range(1, len(sequences) + 1))
    result = server.result(command_id)
    assert result is not None
    assert (result.outcome, result.code, result.exit_code) == ("error", "nonzero_exit", 4)
    assert "oops" in result.message
    assert server.complaints == []


# Running.


async def test_commands_run_side_by_side_up_to_a_bound(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    configure(state, edge_section(max_concurrent_commands=3))
    here, counts, go = tmp_path / "here", tmp_path / "counts", tmp_path / "go"
    here.mkdir()
    script = f"touch {here}/$$; ls {here} | wc -l >> {counts}; until [ -e {go} ]; do sleep 0.05; done"
    script += f"; rm {here}/$$"
    async with running(state) as made:
        await until(lambda: server.hellos)
        ids = [server.invoke("cmd.run", {"command": "sh", "args": ["-c", script]}) for _ in range(6)]
        await until(lambda: made.node.work.active == 6)
        await until(lambda: counts.exists() and counts.read_text().count("\n") == 3)  # side by side
        quick = server.invoke("fs.list", {"path": "/etc"})
        go.touch()
        await until(lambda: all(server.result(one) is not None for one in [*ids, quick]))
    found = [int(line) for line in counts.read_text().split()]
    assert (len(found), max(found)) == (6, 3), "never more than three at once"


@pytest.mark.parametrize("how", ["pushed", "reloaded"])
async def test_commands_that_wait_begin_as_soon_as_more_may_run(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path, how: str
) -> None:
    script = f"echo >> {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.05; done"

    def begun() -> int:
        path = tmp_path / "begun"
        return path.read_text().count("\n") if path.exists() else 0

    def allow(count: int) -> None:
        if how == "reloaded":
            configure(state, edge_section(max_concurrent_commands=count))
            made.daemon.reload()
            return
        delta = f"spec: {{cluster: {{edge: {{max_concurrent_commands: {count}}}}}}}".encode()
        server.send(pb.EdgeCommand(push_config=pb.PushConfig(config_delta=delta, version=f"v{count}")))

    async with running(state) as made:
        await until(lambda: server.hellos)
        allow(1)
        await until(lambda: made.node.configuration.current.edge.max_concurrent_commands == 1)
        command = {"command": "sh", "args": ["-c", script]}
        ids = [server.invoke("cmd.run", command, seconds=600.0) for _ in range(2)]
        await until(lambda: made.node.work.active == 2 and begun() == 1)
        allow(2)
        await until(lambda: begun() == 2)
        (tmp_path / "go").touch()
        await until(lambda: all(server.result(one) is not None for one in ids))


async def test_cancel_ends_the_whole_process_group(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"
    async with running(state):
        await until(lambda: server.hellos)
        command_id = server.invoke("cmd.run", {"command": "/bin/sh", "args": ["-c", script]})
        await until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
        other = server.invoke("cmd.run", {"command": "sleep", "args": ["0.2"]})
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id=command_id, reason="no longer wanted")))
        await until(lambda: server.result(command_id) is not None and server.result(other) is not None)
        result, untouched = server.result(command_id), server.result(other)
        assert result is not None
        assert untouched is not None
        assert (result.outcome, result.message, untouched.outcome) == ("cancelled", "no longer wanted", "ok")
        child = (tmp_path / "child").read_text().strip()
        await until(lambda: not Path(f"/proc/{child}").exists())


async def test_cancelling_what_is_over_says_how_it_ended(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state):
        await until(lambda: server.hellos)
        await server.outcome("cmd.run", {"command": "true"}, command_id="one")
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id="one")))
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id="never-heard-of")))
        await until(lambda: len(server.results) == 3)
    assert sorted((name, result.outcome) for name, result in server.results) == [
        ("never-heard-of", "cancelled"),
        ("one", "ok"),
        ("one", "ok"),
    ]


async def test_so_does_cancelling_what_is_just_being_told(
    server: EdgeServerDouble, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have the result, and cancel, before the command's task has ended."""
    tell = CommandWork._end

    async def told_and_cancelled(
        commands: CommandWork, job: PermittedJob, outcome: CommandOutcomeReport
    ) -> None:
        await tell(commands, job, outcome)
        await until(lambda: server.result(job.command_id) is not None)
        commands.cancel(job.command_id, "too late")

    monkeypatch.setattr(CommandWork, "_end", told_and_cancelled)
    async with running(state):
        await until(lambda: server.hellos)
        await server.outcome("cmd.run", {"command": "true"}, command_id="one")
        await until(lambda: len(server.results) == 2)
    assert [(name, result.outcome) for name, result in server.results] == [("one", "ok"), ("one", "ok")]


@pytest.mark.parametrize("by", ["deadline", "argument"])
async def test_a_command_that_takes_too_long_is_ended(
    server: EdgeServerDouble, state: StateFolder, by: str
) -> None:
    async with running(state):
        await until(lambda: server.hellos)
        arguments: dict[str, object] = {"command": "sleep", "args": ["300"]}
        if by == "argument":
            arguments["timeout_secs"] = 0.3
        found = await server.outcome("cmd.run", arguments, seconds=0.3 if by == "deadline" else 60)
    assert (found.outcome, found.code) == ("timed_out", "timeout")


async def test_programs_get_a_small_environment_and_the_root_as_their_folder(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    configure(state, edge_section(environment={"SITE": "north"}))
    permitted = {"tool_pattern": "cmd.run", "env_allowlist": ["MODE"]}
    configure(state, {"spec": {"security_contexts": [{"name": "zaru-free", "capabilities": [permitted]}]}})
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "hush"}
    async with running(state, environment=environment):
        await until(lambda: server.hellos)
        script = "pwd; env"
        found = await server.outcome(
            "cmd.run", {"command": "/bin/sh", "args": ["-c", script], "env": {"MODE": "a b"}}
        )
    lines = found.stdout.decode().split("\n")
    assert lines[0] == "/"
    assert {"PATH=/usr/bin:/bin", "LC_ALL=C", "SITE=north", "MODE=a b"} <= set(lines)
    assert b"hush" not in found.stdout


async def test_output_beyond_the_limit_is_counted_and_not_sent(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    configure(state, edge_section(output_limit_bytes=1000))
    async with running(state):
        await until(lambda: server.hellos)
        command_id = server.invoke("cmd.run", {"command": "head", "args": ["-c", "5000", "/dev/zero"]})
        await until(lambda: server.result(command_id) is not None)
    result = server.result(command_id)
    assert result is not None
    assert len(server.output(command_id)) == 1000
    assert result.structured == {"dropped_bytes": 4000}


# Refusing.


@pytest.mark.parametrize(
    ("tool", "arguments", "options", "kind"),
    [
        ("cmd.run", {"command": "touch"}, {"context": "unheard-of"}, "security_context_not_found"),
        ("cmd.run", {"command": "touch"}, {"tenant": "u-other"}, "envelope_invalid"),
        ("cmd.run", {"command": "bash"}, {}, "policy_violation"),
        ("cmd.run", {"command": "touch", "env": {"LD_PRELOAD": "/x.so"}}, {}, "policy_violation"),
        ("cmd.run", {}, {}, "invalid_arguments"),
        ("fs.write", {"path": "/tmp/x", "content": ""}, {}, "policy_violation"),
        ("fs.read", {"path": "/etc/passwd"}, {}, "policy_violation"),
        ("fs.stat", {"path": "/srv"}, {}, "tool_not_locally_supported"),
        ("nothing.such", {}, {}, "policy_violation"),
        ("own.tool", {}, {}, "tool_not_found"),
    ],
)
async def test_what_is_not_permitted_is_refused_before_anything_runs(
    server: EdgeServerDouble,
    state: StateFolder,
    tool: str,
    arguments: dict[str, object],
    options: dict[str, str],
    kind: str,
) -> None:
    configure(
        state,
        contexts(
            {"tool_pattern": "cmd.run", "command_allowlist": ["touch"]},
            {"tool_pattern": "fs.*", "path_allowlist": ["/srv"]},
            {"tool_pattern": "own.*"},
            deny=("fs.write",),
        ),
    )
    async with running(state) as made:
        await until(lambda: server.hellos)
        found = await server.outcome(tool, arguments, command_id="1", **options)
        assert (found.outcome, found.code) == ("error", kind)
        assert made.journal.find("1") is None  # it was never begun


async def test_the_daemons_own_keys_are_out_of_reach_of_file_tools(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state):
        await until(lambda: server.hellos)
        for tool, extra in (("fs.read", {}), ("fs.write", {"content": "x"}), ("fs.list", {})):
            path = state.root if tool == "fs.list" else state.key
            found = await server.outcome(tool, {"path": str(path), **extra})
            assert found.code == "policy_violation"
        for memory in ("/proc/self/mem", f"/proc/{os.getpid()}/environ", "/proc/thread-self/mem"):
            found = await server.outcome("fs.read", {"path": memory, "length": 1})
            assert found.code == "policy_violation"
        assert (await server.outcome("fs.read", {"path": "/proc/version"})).outcome == "ok"


# Draining, shutting down, being configured.


async def test_drained_it_finishes_what_it_has_and_takes_no_more(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    async with running(state):
        await until(lambda: server.hellos)
        running_one = server.invoke("cmd.run", {"command": "/bin/sh", "args": ["-c", wait]})
        server.send(pb.EdgeCommand(drain=pb.Drain()))
        await until(lambda: server.statuses("drain") == ["draining"])
        refused = await server.outcome("cmd.run", {"command": "true"})
        assert refused.code == "draining"
        (tmp_path / "go").touch()
        await until(lambda: "drained" in server.statuses("drain"))
        await until(lambda: server.result(running_one) is not None)
        result = server.result(running_one)
        assert result is not None
        assert result.outcome == "ok"
        await until(lambda: server.updates)
        assert server.updates[-1].draining is True
        server.end_stream()
        await until(lambda: len(server.hellos) == 2)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"


async def test_shut_down_it_lets_what_it_has_finish_and_is_gone(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GOODBYE_SECONDS", 60.0)
    short = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    # The one ends within its grace, the other would not.
    for number, (script, grace_seconds, outcome) in enumerate(
        ((short, 60.0, "ok"), ("sleep 300", 0.5, "cancelled")), 1
    ):
        async with running(state) as made:
            await until(lambda: len(server.hellos) == number)  # noqa: B023
            command_id = server.invoke("cmd.run", {"command": "/bin/sh", "args": ["-c", script]})
            await until(lambda: made.node.work.active == 1)
            server.send(pb.EdgeCommand(shutdown=pb.Shutdown(grace=duration_of(grace_seconds))))
            await until(made.leaving.asked.is_set)
            (tmp_path / "go").touch()
            await until(lambda: server.half_closed == number)  # noqa: B023
            result = server.result(command_id)
            assert result is not None
            assert result.outcome == outcome
            await until(lambda: made.daemon.ended)
        assert (len(server.hellos), made.daemon.sessions) == (number, 1)  # it did not come back


async def test_a_pushed_configuration_counts_from_the_next_command_on(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    narrow = b'{"name":"zaru-pro","capabilities":[{"tool_pattern":"fs.list"}]}'
    delta = b'{"spec":{"security_contexts":[%b]}}' % narrow
    async with running(state):
        await until(lambda: server.hellos)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
        server.send(pb.EdgeCommand(push_config=pb.PushConfig(config_delta=delta, version="v7")))
        gone = await server.outcome("cmd.run", {"command": "true"})
        assert gone.code == "security_context_not_found"
        assert (await server.outcome("fs.list", {"path": "/etc"}, context="zaru-pro")).outcome == "ok"
        denied = await server.outcome("cmd.run", {"command": "true"}, context="zaru-pro")
        assert denied.code == "policy_violation"
        assert server.statuses("v7") == ["config-applied"]
        await until(lambda: server.updates)
        assert server.updates[-1].config_version == "v7"
        bad = b'{"spec":{"cluster":{"controller":{"endpoint":"evil.example:443"}}}}'
        server.send(pb.EdgeCommand(push_config=pb.PushConfig(config_delta=bad, version="v8")))
        await until(lambda: server.statuses("v8") == ["config-refused"])
    async with running(state):
        await until(lambda: len(server.hellos) == 2)
        assert pb.EdgeCapabilities.FromString(server.hellos[1].capabilities).config_version == "v7"
        assert (await server.outcome("cmd.run", {"command": "true"})).code == "security_context_not_found"
    assert server.complaints == []


async def test_an_edited_configuration_is_taken_over_and_told(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state) as made:
        await until(lambda: server.hellos)
        configure(state, edge_section(capabilities={"custom_labels": {"rack": "9"}}))
        made.daemon.reload()
        await until(lambda: server.updates)
        assert server.updates[-1].custom_labels["rack"] == "9"
        state.config.write_text("kind: Nonsense")
        made.daemon.reload()
        assert made.node.configuration.current.edge.capabilities.custom_labels == {"rack": "9"}


# Waiting.


def test_the_waits_grow_along_the_list_and_stay_at_its_end() -> None:
    waits = (1.0, 2.0, 5.0, 15.0, 60.0)
    assert [wait_seconds(waits, failures, jitter=1.0) for failures in range(7)] == [1, 2, 5, 15, 60, 60, 60]
    assert [wait_seconds(waits, failures, jitter=0.0) for failures in range(2)] == [0.5, 1.0]


class Wire:
    """Stands in for a stream and its writer: what was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def send(self, message: bytes) -> None:
        update = tolerant_pb2.EdgeEvent.FromString(message).capability_update
        self.told.append(pb.EdgeCapabilities.FromString(update.capabilities).config_version)


async def test_capabilities_that_were_looked_at_earlier_are_not_told_after_later_ones(
    state: StateFolder,
) -> None:
    begun, go, versions = threading.Event(), threading.Event(), ["old", "new"]

    def look() -> pb.EdgeCapabilities:
        version = versions.pop(0)
        if version == "old":
            begun.set()
            assert go.wait(60)
        return pb.EdgeCapabilities(config_version=version)

    async with running(state) as made, asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel("a") as line:
        node = replace(made.node, capabilities=look)
        stream, wire = session.DaemonSession(line, node, on_established=lambda: None), Wire()
        stream._writer = wire  # type: ignore[assignment]
        first = tasks.create_task(stream._tell_capabilities())
        assert await asyncio.to_thread(begun.wait, 60)
        second = tasks.create_task(stream._tell_capabilities())
        await asyncio.wait({second}, timeout=0.2)
        go.set()
        await asyncio.wait({first, second})
        stream._call.cancel()
    assert wire.told[-1] == "new"
