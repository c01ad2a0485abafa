"""The stand-in of the daemons in the field is true to what is written down of them.

Its bytes against known ones, and its habits against a double of the server that it is talking to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge import shipped_wire as wire
from support.edge.edge_server_double import EdgeServerDouble, edge_server, until
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.wire import messages as ours
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2

OLD, NEW = (
    Ed25519PrivateKey.from_private_bytes(b"\x07" * 32),
    Ed25519PrivateKey.from_private_bytes(b"\x09" * 32),
)
NODE, STREAM = "11111111-2222-4333-8444-555555555555", "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
COMMAND, AT = "cccccccc-1111-4222-8333-dddddddddddd", 1_700_000_000_000
SEALER = wire.Sealer(key=OLD, token="t", node_id=NODE, stream_id=STREAM)


def signature(event: bytes) -> str:
    parsed = tolerant_pb2.EdgeEvent.FromString(event)
    body = getattr(parsed, parsed.WhichOneof("event") or "")
    found: bytes = body.envelope.signature
    return found.hex()


# Bytes.


def test_events_carry_the_signatures_that_are_written_down() -> None:
    said = wire.capabilities()
    assert signature(SEALER.hello(said, AT)).startswith("0417f09935126792480295bb4799b3eed472ceec215b9839")
    assert signature(SEALER.heartbeat(AT)).startswith("07e114a3307adb5e06c286f36744f0aefde02fe6cfe4cbfb")
    assert signature(SEALER.result(COMMAND, wire.result(ok=True), AT)).startswith(
        "1f060364c9e5914e7b8ba86e5d23e945"
    )
    progress = SEALER.progress(COMMAND, b"oops\n", 5, True, AT)
    assert signature(progress).startswith("fddec89068d1473c31116838ffb2151ea9f7ae43efc0d293")
    assert wire.rotation_digest(NODE, NEW.public_key().public_bytes_raw(), bytes(range(32))).hex() == (
        "46f9095c1f37407110676c3d4aad8892e7d44bba8dc6df990ce5700e8aca2270"
    )


def test_hand_written_bytes_are_what_a_protobuf_library_writes() -> None:
    made = wire.result(ok=False, exit_code=-1, stdout=b"a", stderr=b"\xff", error_kind="k", error_message="m")
    assert (
        made
        == legacy_pb2.LegacyEdgeResult(
            exit_code=-1, stdout=b"a", stderr=b"\xff", error_kind="k", error_message="m"
        ).SerializeToString()
    )
    assert legacy_pb2.LegacyEdgeEvent.FromString(
        SEALER.heartbeat(AT)
    ).SerializeToString() == SEALER.heartbeat(AT)
    for event in (
        SEALER.hello(wire.capabilities(labels={"a": "b"}, tags=["x"]), AT),
        SEALER.result(COMMAND, wire.result(ok=True, stdout=b"out"), AT),
        SEALER.progress(COMMAND, b"\n", 0, False, AT),
        SEALER.progress(COMMAND, b"text\n", 7, True, AT),
    ):
        assert legacy_pb2.LegacyEdgeEvent.FromString(event).SerializeToString() == event


def test_its_results_are_known_for_what_they_are() -> None:
    for raw, outcome in (
        (wire.result(ok=True), "ok"),
        (wire.result(ok=True, stdout=b"\x0a\x00"), "ok"),
        (wire.result(ok=False, exit_code=3, error_kind="nonzero_exit"), "error"),
        (wire.error("timeout", "late"), "timed_out"),
        (wire.error("cancelled", "c"), "cancelled"),
    ):
        found, dialect = ours.decode_result(raw)
        assert (found.outcome, dialect) == (outcome, PayloadDialect.LEGACY)


# Habits.


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EdgeServerDouble]:
    async with edge_server(tmp_path / "server") as double:
        double.signs = False
        yield double


@pytest.fixture
async def daemon(server: EdgeServerDouble) -> ShippedDaemon:
    return await ShippedDaemon.enroll(
        server.address, server.enrollment_token(), heartbeat_seconds=0.2, wait_scale=0.05
    )


def sh(script: str) -> dict[str, object]:
    return {"command": "/bin/sh", "args": ["-c", script]}


async def test_it_enrols_and_serves_without_metadata(server: EdgeServerDouble, daemon: ShippedDaemon) -> None:
    async with daemon.running():
        await until(lambda: server.hellos)
        found = await server.outcome(
            "cmd.run", sh("echo one; echo; echo two >&2; printf three"), command_id="1"
        )
        await until(lambda: server.beats)
    assert (found.outcome, found.stdout, found.stderr) == ("ok", b"one\n\nthree\n", b"two\n")
    (metadata,) = server.metadata
    assert metadata["user-agent"] == "tonic/0.14.5"
    assert "authorization" not in metadata
    assert "x-aegis-edge-dialect" not in metadata
    chunks = [
        (chunk.stream, chunk.sequence, chunk.data) for _, chunk in server.chunks if chunk.stream == "stdout"
    ]
    assert chunks == [("stdout", 0, b"one\n"), ("stdout", 1, b"\n"), ("stdout", 2, b"three\n")]
    assert (server.attested[0].role, server.attested[0].enrolment_token) == (pb.NODE_ROLE_EDGE, "")


async def test_nothing_follows_its_hello_before_there_are_headers(
    server: EdgeServerDouble, daemon: ShippedDaemon
) -> None:
    server.silent = True
    async with daemon.running():
        await until(lambda: server.hellos)
        await asyncio.sleep(0.5)
        assert (daemon.sent, daemon.headers) == (["hello"], 0)


async def test_one_command_at_a_time_and_cancel_is_answered_late(
    server: EdgeServerDouble, daemon: ShippedDaemon, tmp_path: Path
) -> None:
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    async with daemon.running():
        await until(lambda: server.hellos)
        server.invoke("cmd.run", sh(wait), command_id="1")
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id="1", reason="r")))
        server.invoke("cmd.run", sh("echo second"), command_id="2")
        await until(lambda: server.beats)
        assert server.results == []
        (tmp_path / "go").touch()
        await until(lambda: len(server.results) == 3)
    assert [(name, found.outcome) for name, found in server.results] == [
        ("1", "ok"),
        ("1", "cancelled"),
        ("2", "ok"),
    ]


async def test_drained_it_falls_silent_and_shut_down_it_comes_back(
    server: EdgeServerDouble, daemon: ShippedDaemon
) -> None:
    async with daemon.running():
        await until(lambda: server.beats)
        server.send(pb.EdgeCommand(drain=pb.Drain()))
        found = await server.outcome("cmd.run", sh("true"))
        assert found.code == "draining"
        beats = len(server.beats)
        await asyncio.sleep(0.5)
        assert len(server.beats) <= beats + 1
        server.send(pb.EdgeCommand(shutdown=pb.Shutdown()))
        await until(lambda: len(server.hellos) == 2)
        assert (await server.outcome("cmd.run", sh("true"))).outcome == "ok"
    assert daemon.waits == [1]


async def test_refused_before_headers_its_waits_grow(server: EdgeServerDouble, daemon: ShippedDaemon) -> None:
    server.refuse_hello = (grpc.StatusCode.FAILED_PRECONDITION, "not now")
    async with daemon.running():
        await until(lambda: len(daemon.waits) >= 4)
    assert daemon.waits[:4] == [1, 2, 5, 15]
    assert daemon.refusals[0] == (9, "not now")
    assert daemon.headers == 0


async def test_a_pushed_text_breaks_its_stream_and_a_struct_does_not(
    server: EdgeServerDouble, daemon: ShippedDaemon
) -> None:
    async with daemon.running():
        await until(lambda: server.hellos)
        server.send(ours.push_config(PayloadDialect.LEGACY, version="v", document=b'{"a":{"b":[1,"x"]}}'))
        assert (await server.outcome("cmd.run", sh("true"))).outcome == "ok"
        server.send(ours.push_config(PayloadDialect.DOCUMENTED, version="v", document=b'{"a":1}'))
        await until(lambda: len(server.hellos) == 2)
    assert daemon.broken != []
    assert wire.PushConfig(delta={"a": {"b": [1.0, "x"]}}) in daemon.commands


@pytest.mark.parametrize(
    ("tool", "arguments", "spoil", "kind"),
    [
        ("fs.read", {"path": "/etc/hosts"}, "", "tool_not_locally_supported"),
        ("own.tool", {}, "", "tool_not_found"),
        ("cmd.run", {"command": "/nonexistent"}, "", "internal"),
        ("cmd.run", sh("exit 7"), "", "nonzero_exit"),
        ("cmd.run", sh("true"), "token", "envelope_invalid"),
        ("cmd.run", sh("true"), "context", "security_context_not_found"),
    ],
)
async def test_it_refuses_in_its_own_words(
    server: EdgeServerDouble,
    daemon: ShippedDaemon,
    tool: str,
    arguments: dict[str, object],
    spoil: str,
    kind: str,
) -> None:
    async with daemon.running():
        await until(lambda: server.hellos)
        command = server.call(
            tool, arguments, command_id="1", context="other" if spoil == "context" else "zaru-free"
        )
        if spoil == "token":
            command.invoke_tool.seal_envelope.user_security_token = ""
        server.send(command)
        await until(lambda: server.result("1") is not None)
    found = server.result("1")
    assert found is not None
    assert found.code == kind


async def test_its_rotation_has_an_empty_token_and_reaches_the_stream_only_when_it_connects_anew(
    server: EdgeServerDouble, daemon: ShippedDaemon
) -> None:
    before = daemon.token
    async with daemon.running():
        await until(lambda: server.hellos)
        await daemon.rotate_key()
        (asked,) = server.rotations
        assert asked.current_envelope.node_security_token == ""
        count = len(server.used_tokens)
        await until(lambda: len(server.used_tokens) > count)
        assert server.used_tokens[-1] == before
        server.end_stream()
        await until(lambda: len(server.hellos) == 2)
        assert server.hellos[-1].envelope.node_security_token == daemon.token != before
    await daemon.refresh_token()
    assert server.rotations[-1].new_public_key == daemon.key.public_key().public_bytes_raw()
