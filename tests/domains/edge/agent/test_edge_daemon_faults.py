"""What goes wrong around a daemon: servers that vanish, stall or lie, answers that are lost, and crashes."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_daemon_rig import configure, edge_section, enrolled, running
from support.edge.edge_server_double import EdgeServerDouble, edge_server, until

from fleetplane.domains.edge.agent import session
from fleetplane.domains.edge.agent.daemon import Pace
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, public_bytes
from fleetplane.domains.edge.agent.status import fingerprint


@pytest.fixture
async def state(server: EdgeServerDouble, tmp_path: Path) -> StateFolder:
    return await enrolled(tmp_path / "state", server)


# Servers that vanish.


async def test_it_comes_back_and_tells_what_ended_meanwhile(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done"
    async with running(state) as made:
        await until(lambda: server.hellos)
        command_id = server.invoke("cmd.run", {"command": "/bin/sh", "args": ["-c", wait]})
        await until(lambda: made.journal.find(command_id) is not None)
        await server.stop()
        (tmp_path / "go").touch()
        await until(lambda: made.node.work.active == 0)
        await server.start()
        await until(lambda: server.result(command_id) is not None)
    result = server.result(command_id)
    assert result is not None
    assert (result.outcome, result.stdout) == ("ok", b"done\n")
    assert server.hellos[-1].last_seen_command_id == command_id
    assert server.complaints == []


async def test_a_command_that_comes_twice_is_run_once_and_answered_twice(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    arguments = {"command": "/bin/sh", "args": ["-c", f"echo ran >> {tmp_path}/ran"]}
    async with running(state):
        await until(lambda: server.hellos)
        await server.outcome("cmd.run", arguments, command_id="one")
        server.invoke("cmd.run", arguments, command_id="one")
        await until(lambda: len(server.results) == 2)
    async with running(state):
        await until(lambda: len(server.hellos) == 2)
        server.results.clear()
        server.invoke("cmd.run", arguments, command_id="one")
        await until(lambda: server.results)
    assert {result.outcome for _, result in server.results} == {"ok"}
    assert (tmp_path / "ran").read_text() == "ran\n"


async def test_what_was_running_when_the_daemon_died_is_not_run_again(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    arguments = {"command": "/bin/sh", "args": ["-c", f"echo ran >> {tmp_path}/ran; sleep 300"]}
    async with running(state):
        await until(lambda: server.hellos)
        server.invoke("cmd.run", arguments, command_id="one")
        await until(lambda: (tmp_path / "ran").exists() and (tmp_path / "ran").read_text() == "ran\n")
    async with running(state):
        await until(lambda: len(server.hellos) == 2)
        found = await server.outcome("cmd.run", arguments, command_id="one")
    assert (found.outcome, found.code) == ("error", "interrupted")
    assert (tmp_path / "ran").read_text() == "ran\n"


async def test_results_go_out_again_on_a_new_stream_until_they_are_settled(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    async with running(state, settled_seconds=600.0) as made:
        await until(lambda: server.hellos)
        await server.outcome("cmd.run", {"command": "true"}, command_id="one")
        server.end_stream()
        await until(lambda: len(server.results) == 2)
        made.node.outbox._settled_seconds = 0.0  # by the next heartbeat the stream has stood for longer
        await until(lambda: made.journal.undelivered() == [])
        made.node.outbox._settled_seconds = 600.0
        server.end_stream()
        await until(lambda: len(server.hellos) == 3)
        await server.outcome("cmd.run", {"command": "true"}, command_id="two")
        assert made.journal.undelivered() != []
    assert [name for name, _ in server.results] == ["one", "one", "two"]


async def test_a_server_that_does_not_answer_a_hello_is_given_up(
    server: EdgeServerDouble, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    monkeypatch.setattr(session, "HELLO_SECONDS", 0.3)
    server.silent = True
    async with running(state):
        await until(lambda: server.hellos)
        server.silent = False
        monkeypatch.setattr(session, "HELLO_SECONDS", 60.0)
        await until(lambda: server.beats)  # on a later stream
        assert len(server.hellos) >= 2
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"


@pytest.mark.parametrize("server_is", ["silent", "away"])
async def test_asked_to_leave_it_does_not_wait_for_a_server(
    server: EdgeServerDouble, state: StateFolder, server_is: str
) -> None:
    server.silent = True
    if server_is == "away":
        await server.stop()
    async with running(state, pace=Pace()) as made:
        await until(lambda: made.daemon.sessions)
        if server_is == "silent":
            await until(lambda: server.hellos)
        made.leaving.ask(grace_seconds=0.0, reason="test")
        await until(lambda: made.daemon.ended)


async def test_refused_it_waits_longer_each_time(server: EdgeServerDouble, state: StateFolder) -> None:
    server.refuse_hello = (grpc.StatusCode.FAILED_PRECONDITION, "this daemon is told to be shut down")
    began = time.monotonic()
    async with running(state) as made:
        await until(lambda: made.daemon.sessions >= 5)
        # The waits are 1, 2, 5 and 15 s, or half of that, and a twentieth of that in this test.
        assert time.monotonic() - began > 0.5
        assert server.rotations == []  # nothing is wrong with the token
        server.refuse_hello = None
        await until(lambda: server.hellos)


async def test_a_server_that_does_not_read_holds_programs_up_until_their_deadline(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state) as made:
        await until(lambda: server.hellos)
        server.reads.clear()
        command_id = server.invoke("cmd.run", {"command": "cat", "args": ["/dev/zero"]}, seconds=1.0)
        await until(
            lambda: (record := made.journal.find(command_id)) is not None and record.result is not None
        )
        server.reads.set()
        await until(lambda: server.result(command_id) is not None)
    result = server.result(command_id)
    assert result is not None
    assert result.outcome == "timed_out"
    assert len(server.output(command_id)) < 64 * 1024 * 1024


# Servers that lie.


def mark(folder: Path) -> tuple[dict[str, object], Path]:
    return {"command": "touch", "args": [str(folder / "ran")]}, folder / "ran"


@pytest.mark.parametrize("lie", ["unsigned", "wrong key", "other stream", "changed", "old", "twice", "torn"])
async def test_a_command_that_is_not_the_servers_ends_the_stream_and_runs_nothing(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path, lie: str
) -> None:
    arguments, ran = mark(tmp_path)
    async with running(state):
        await until(lambda: server.hellos)
        command = server.call("cmd.run", arguments)
        good = server.sealed(command)
        match lie:
            case "unsigned":
                raw = command.SerializeToString()
            case "wrong key":
                kept, server.key = server.key, Ed25519PrivateKey.generate()
                raw, server.key = server.sealed(command), kept
            case "other stream":
                raw = server.sealed(command, stream_id="aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee")
            case "changed":
                raw = good.replace(b"/ran", b"/rat")
            case "old":
                raw = server.sealed(command, at_ms=(time.time_ns() // 1_000_000) - 3_600_000)
            case "twice":
                raw = good + good[len(command.SerializeToString()) :]
            case _:
                raw = good[:-3]
        server.send_raw(raw)
        await until(lambda: len(server.hellos) == 2)
        found = await server.outcome("cmd.run", {"command": "true"})
    assert found.outcome == "ok"  # a good one on the next stream is obeyed
    assert [name for name, _ in server.results if name == command.invoke_tool.command_id] == []
    assert not ran.exists()
    assert not (tmp_path / "rat").exists()


async def test_a_call_whose_inner_seal_is_wrong_is_refused(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    arguments, ran = mark(tmp_path)
    async with running(state):
        await until(lambda: server.hellos)
        for number, spoil in enumerate(("signature", "args", "token", "none")):
            command = server.call("cmd.run", arguments, command_id=str(number))
            call = command.invoke_tool
            match spoil:
                case "signature":
                    call.seal_envelope.signature = bytes(64)
                case "args":
                    call.args.update({"timeout_secs": 5})
                case "token":
                    call.seal_envelope.user_security_token = "a.b"
                case _:
                    call.ClearField("seal_envelope")
            server.send(command)
        await until(lambda: len(server.results) == 4)
    assert {result.code for _, result in server.results} == {"envelope_invalid"}
    assert not ran.exists()


async def test_a_server_without_proof_is_obeyed_only_where_that_is_wanted(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    server.signs = False
    async with running(state, tolerate_unsigned=True):
        await until(lambda: server.hellos)
        command = server.call("cmd.run", {"command": "true"}, command_id="a")
        command.invoke_tool.seal_envelope.signature = b""
        server.send(command)
        await until(lambda: server.result("a") is not None)
        wrong = server.call("cmd.run", {"command": "true"}, command_id="b")
        wrong.envelope.signature = bytes(64)
        server.send_raw(wrong.SerializeToString())
        await until(lambda: len(server.hellos) == 2)
    found = server.result("a")
    assert found is not None
    assert found.outcome == "ok"
    assert server.result("b") is None


async def test_a_server_that_never_named_a_key_is_obeyed_by_shape_alone(tmp_path: Path) -> None:
    async with edge_server(tmp_path / "server") as server:
        server.names_key = server.signs = False
        state = await enrolled(tmp_path / "state", server)
        assert state.load_server_key() == b""
        async with running(state):
            await until(lambda: server.hellos)
            assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"


# Keys and tokens.


async def test_a_token_is_renewed_before_its_end_and_used_on_the_open_stream(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    server.token_seconds = 1.0
    state = await enrolled(tmp_path / "state", server)
    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    async with running(state):
        await until(lambda: server.hellos)
        renewed = len(server.rotations)
        await until(lambda: len(server.rotations) >= max(2, renewed + 1))
        server.token_seconds = 3600.0
        await until(
            lambda: (
                server.tokens[server.rotations[0].current_envelope.payload[2:38].decode()]
                == state.load_token()
            )
        )
        await server.outcome("cmd.run", {"command": "true"})
        await until(lambda: state.load_token() in server.used_tokens)
    assert len(server.hellos) == 1
    assert len(set(server.used_tokens)) >= 2
    # Between an answer and its use an event may still carry the token before.
    assert [words for words in server.complaints if "token" not in words] == []


async def test_a_key_is_rotated_in_time_and_the_stream_goes_on(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    configure(state, edge_section(rotate_key_every_secs=300))
    before = public_bytes(state.load_key())
    async with running(state) as made:
        await until(lambda: server.hellos)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
        import os

        os.utime(state.key, (time.time() - 301, time.time() - 301))
        await until(lambda: public_bytes(made.node.keyring.current.key) != before)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
    assert len(server.hellos) == 1
    (node_id,) = server.keys
    assert server.keys[node_id] == public_bytes(state.load_key())
    assert [path.name[-4:] for path in sorted(state.archive.iterdir())] == [".key", ".pub"]
    assert server.complaints == []


async def test_the_server_may_ask_for_a_new_key(server: EdgeServerDouble, state: StateFolder) -> None:
    before = public_bytes(state.load_key())
    async with running(state):
        await until(lambda: server.hellos)
        found = await server.outcome("edge.rotate_key", {"keep_old_secs": 60})
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
        server.refuse_rotation = (grpc.StatusCode.FAILED_PRECONDITION, "unhealthy")
        failed = await server.outcome("edge.rotate_key", {})
    assert found.structured == {"key": fingerprint(public_bytes(state.load_key()))}
    assert before != public_bytes(state.load_key()) == next(iter(server.keys.values()))
    assert (failed.code, "unhealthy" in failed.message) == ("internal", True)
    assert (len(server.hellos), server.complaints) == (1, [])


async def test_a_key_rotated_by_another_program_is_taken_over_at_the_next_heartbeat(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    from fleetplane.domains.edge.cli.agent import _rotator

    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    async with running(state) as made:
        await until(lambda: server.hellos)
        await _rotator(state.root, None, None).rotate()
        await until(lambda: made.node.keyring.current.token == state.load_token())
        await until(lambda: state.load_token() in server.used_tokens)  # nothing older comes after that
        server.complaints.clear()
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
    assert server.complaints == []


async def test_a_key_is_not_taken_over_before_its_token_is_there(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state) as made:
        await until(lambda: server.hellos)
        keyring, before = made.node.keyring, made.node.keyring.current
        with state.changing_identity():
            state.store_key(Ed25519PrivateKey.generate())
            assert not await session.take_over_identity(made.node)
            assert keyring.current is before
            state.store_token(before.token)
        assert await session.take_over_identity(made.node)
        assert public_bytes(keyring.current.key) == public_bytes(state.load_key())


async def test_a_rotation_whose_answer_is_lost_is_found_out_about(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    from fleetplane.domains.edge.cli.agent import _rotator
    from fleetplane.node.link import LinkLost

    server.lose_rotation_answers = 1
    with pytest.raises(LinkLost):
        await _rotator(state.root, None, None).rotate()
    taken = state.load_next_key()
    assert taken is not None
    assert next(iter(server.keys.values())) == public_bytes(taken)
    server.refuse_hello = (grpc.StatusCode.UNAUTHENTICATED, "the signature is wrong")
    async with running(state):
        await until(lambda: public_bytes(state.load_key()) == public_bytes(taken))
        server.refuse_hello = None
        await until(lambda: server.hellos)
        server.complaints.clear()
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"
    assert state.load_next_key() is None
    assert server.complaints == []


async def test_a_next_key_that_the_server_never_took_is_dropped(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    from fleetplane.domains.edge.agent.identity.state_folder import new_key
    from fleetplane.domains.edge.cli.agent import _rotator

    kept = public_bytes(state.load_key())
    state.store_next_key(new_key())
    await _rotator(state.root, None, None).recover()
    assert state.load_next_key() is None
    assert public_bytes(state.load_key()) == kept


async def test_a_refused_rotation_leaves_the_key_as_it_was(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    from fleetplane.domains.edge.cli.agent import _rotator
    from fleetplane.node.link import ServerRefused

    kept = public_bytes(state.load_key())
    server.refuse_rotation = (grpc.StatusCode.FAILED_PRECONDITION, "unhealthy")
    with pytest.raises(ServerRefused, match="unhealthy"):
        await _rotator(state.root, None, None).rotate()
    assert (public_bytes(state.load_key()), state.load_next_key()) == (kept, None)
    assert len(server.rotations) == 1


async def test_a_token_that_is_not_taken_any_more_is_renewed_with_the_key(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    old = state.load_token()
    server.refuse_hello = (grpc.StatusCode.UNAUTHENTICATED, "the token has expired")
    async with running(state):
        await until(lambda: state.load_token() != old)
        server.refuse_hello = None
        await until(lambda: server.hellos)
        assert (await server.outcome("cmd.run", {"command": "true"})).outcome == "ok"


async def test_many_commands_with_much_output_arrive_whole(
    server: EdgeServerDouble, state: StateFolder
) -> None:
    async with running(state):
        await until(lambda: server.hellos)
        ids = [
            server.invoke("cmd.run", {"command": "head", "args": ["-c", "300000", "/dev/zero"]})
            for _ in range(20)
        ]
        await until(lambda: all(server.result(one) is not None for one in ids), seconds=60)
    assert [len(server.output(one)) for one in ids] == [300_000] * 20
    assert server.complaints == []
