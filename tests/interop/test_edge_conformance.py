"""What a server must do for the daemons in the field, and for ours, point by point: joining and talking.

Most of it against a real server process, with the stand-in that emits the bytes and keeps the habits
of the daemons in the field; what needs the server's own keys or records, in this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import timestamp_pb2
from support.edge import edge_identity_rig
from support.edge.edge_company import (
    PRECONDITION,
    UNAUTHENTICATED,
    at_work,
    by_hand,
    only,
    ours_at_work,
    told,
)
from support.edge.edge_daemon_rig import running
from support.edge.edge_identity_rig import claims_of, identity_rig
from support.edge.edge_signer import legacy
from support.edge.edge_site import Rest, Site, a_tenant, new_key, refused, site, until
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.domains.edge.wire import envelope
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("conformance") / "data") as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


# 1: enrollment.


async def test_1_a_token_enrols_one_daemon_of_either_kind_once(
    house: Site, rest: Rest, tmp_path: Path
) -> None:
    token = await rest.invite("box")
    daemon = await ShippedDaemon.enroll(house.edge, token, heartbeat_seconds=0.5)
    assert (await rest.host(daemon.node_id))["name"] == "box"
    assert await refused(ShippedDaemon.enroll(house.edge, token)) == UNAUTHENTICATED
    state = await house.ours(rest, tmp_path / "ours", "mine")
    async with daemon.running(), running(state):
        node_ids = [one["node_id"] for one in (await rest.get("/hosts"))["items"]]
        assert len(node_ids) == 2
        await rest.connected(*node_ids)
        assert (await rest.do(mode="parallel"))["summary"]["ok"] == 2


@pytest.mark.parametrize(
    "wrong", [{"exp": 1_700_000_000}, {"aud": "x"}, {"iss": "x"}, {"nbf": 4_000_000_000}, {"tid": "umbrella"}]
)
async def test_1_a_signed_token_that_says_something_wrong_is_refused(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with identity_rig(tmp_path) as rig:
        claims = claims_of(await rig.invite()) | wrong
        token = rig.side.tokens._keys.sign(claims, life_seconds=900)
        assert await refused(ShippedDaemon.enroll(rig.address, token)) == UNAUTHENTICATED
        assert not rig.side.nodes.list(edge_identity_rig.TENANT)


# 2 and 3: the hello.


async def test_2_headers_come_right_after_a_good_hello_without_any_command(house: Site, rest: Rest) -> None:
    daemon = await house.shipped(rest, heartbeat_seconds=30)
    async with daemon.running():
        await until(lambda: daemon.headers == 1)
        await rest.connected(daemon.node_id)
        assert (daemon.commands, daemon.sent) == ([], ["hello"])


async def test_3_a_bad_hello_is_refused_without_headers_and_with_its_code(house: Site, rest: Rest) -> None:
    daemon = await house.shipped(rest)
    good = daemon.token, daemon.key
    for token, key in (("x.y.z", good[1]), ("", good[1]), (good[0], new_key())):
        daemon.token, daemon.key = token, key
        assert await refused(daemon.connect_once()) == UNAUTHENTICATED
    daemon.token, daemon.key = good
    assert (await rest.call("DELETE", f"/hosts/{daemon.node_id}")).status_code == 204
    assert await refused(daemon.connect_once()) == PRECONDITION
    assert daemon.headers == 0
    async with by_hand(house, rest) as other:
        other.call = other._method()
        await other.beat()
        assert (await other.turned_away())[0] is grpc.StatusCode.INVALID_ARGUMENT
        naked = tolerant_pb2.Hello(stream_id=other.sign.stream_id)
        assert (await other.refusal(hello=naked))[0] is grpc.StatusCode.INVALID_ARGUMENT


# 4, 5 and 6: results and output.


async def test_4_results_of_daemons_in_the_field(house: Site, rest: Rest) -> None:
    async with at_work(house, rest, contexts={"zaru-free": ["/bin/sh", "true"]}) as daemon:
        target = {"Node": daemon.node_id}

        async def outcome(**what: Any) -> tuple[Any, ...]:
            one = await only(rest, await rest.start(target, **what))
            return one["outcome"], one["exit_code"], one["stdout_tail"], one["stderr_tail"], one["code"]

        assert await outcome(script="echo out; echo err >&2") == ("ok", 0, "out\n", "err\n", None)
        assert await outcome(args={"command": "true"}) == ("ok", 0, "", "", None)
        assert await outcome(script="exit 3") == ("err", 3, "", "", "nonzero_exit")
        late = await outcome(script="exec sleep 30", deadline_secs=1)
        assert late[0] == "timed_out"
        assert (await outcome(args={"command": "rm"}))[::4] == ("err", "policy_violation")
        assert (await outcome(tool="fs.read"))[::4] == ("err", "tool_not_locally_supported")
        assert (await outcome(security_context_name="nosuch"))[4] == "security_context_not_found"


async def test_5_output_of_daemons_in_the_field_arrives_as_it_was_sent(house: Site, rest: Rest) -> None:
    async with by_hand(house, rest) as daemon:
        await daemon.open_legacy()
        await rest.connected(daemon.node_id)
        run_id = await rest.start()
        command_id = (await daemon.next("invoke_tool")).command_id
        lines = [
            (b"\n", 0, False),
            (b"text\n", 1, False),
            (b"oops\n", 0, True),
            (b"\xff\xfe\x00", 2, False),
            (b"\x0a\x03abc", 1, True),
        ]
        for data, sequence, stderr in lines:
            await daemon.send(
                command_progress=daemon.sign.line(command_id, data, sequence=sequence, stderr=stderr)
            )
        await daemon.answer(command_id, legacy(ok=True, stdout=b"\ntext\n"), digest=False)
        chunks = [event.data["chunk"] for event in await told(rest, run_id, "command_progress")]
    if chunks[:2] == [{"stdout": "\n"}, {"stdout": "text\n"}]:  # told together only if they came so
        chunks[:2] = [{"stdout": "\ntext\n"}]
    assert chunks == [
        {"stdout": "\ntext\n"},
        {"stderr": "oops\n"},
        {"stdout": "\ufffd\ufffd\x00", "stdout_base64": "//4A"},
        {"stderr": "\n\x03abc"},
    ]


async def test_6_documented_results_and_chunks_in_every_arm(house: Site, rest: Rest) -> None:
    arms = {
        "ok": pb.EdgeResult(ok=pb.EdgeResult.Ok(exit_code=0)),
        "err": pb.EdgeResult(err=pb.EdgeResult.Err(code="nope", message="m", exit_code=7)),
        "timed_out": pb.EdgeResult(timed_out=pb.EdgeResult.TimedOut()),
        "cancelled": pb.EdgeResult(cancelled=pb.EdgeResult.Cancelled(reason="r")),
    }
    chunks = [
        pb.Chunk(stdout=b"o"),
        pb.Chunk(stderr=b"e"),
        pb.Chunk(status=pb.StatusUpdate(state="half", message="way")),
    ]
    async with by_hand(house, rest) as daemon:
        await daemon.open()
        await rest.connected(daemon.node_id)
        for arm, result in arms.items():
            run_id = await rest.start()
            command_id = (await daemon.next("invoke_tool")).command_id
            for chunk in chunks:
                await daemon.send(command_progress=daemon.sign.chunk(command_id, chunk))
            await daemon.answer(command_id, result.SerializeToString())
            assert (await only(rest, run_id))["outcome"] == arm
            said = [event.data["chunk"] for event in await told(rest, run_id, "command_progress")]
            assert said == [{"stdout": "o"}, {"stderr": "e"}, {"status": "half way"}]


async def test_4_to_6_results_and_output_of_daemons_of_ours(house: Site, rest: Rest, tmp_path: Path) -> None:
    async with ours_at_work(house, rest, tmp_path / "ours"):
        run_id = await rest.start(script="printf '\\ntext\\n\\377\\000'; printf oops >&2; exit 3")
        one = await only(rest, run_id)
        assert (one["outcome"], one["exit_code"]) == ("err", 3)
        assert (one["stdout_tail"], one["stderr_tail"]) == ("\ntext\n\ufffd\x00", "oops")
        assert (await only(rest, await rest.start()))["outcome"] == "ok"
        late = await only(rest, await rest.start(script="exec sleep 30", deadline_secs=1))
        assert late["outcome"] == "timed_out"
        denied = await only(rest, await rest.start(security_context_name="nosuch"))
        assert (denied["outcome"], denied["code"]) == ("err", "security_context_not_found")


# 7 and 8: heartbeats and tags.


async def test_7_a_heartbeat_may_have_a_time_a_count_or_nothing(house: Site, rest: Rest) -> None:
    async with by_hand(house, rest) as daemon:
        await daemon.open_legacy()
        sealed = daemon.sign.heartbeat
        for event in (
            tolerant_pb2.EdgeEvent(heartbeat=sealed()),
            pb.EdgeEvent(
                heartbeat=pb.Heartbeat(
                    envelope=sealed().envelope, sent_at=timestamp_pb2.Timestamp(seconds=1_700_000_000)
                )
            ),
            legacy_pb2.LegacyEdgeEvent(
                heartbeat=legacy_pb2.LegacyHeartbeat(envelope=sealed().envelope, active_invocations=3)
            ),
        ):
            await daemon.call.write(event.SerializeToString())
        run_id = await rest.start()  # and it is still taken seriously
        await daemon.answer((await daemon.next("invoke_tool")).command_id)
        assert (await only(rest, run_id))["outcome"] == "ok"


async def test_8_tags_come_from_operators_and_never_from_daemons(house: Site, rest: Rest) -> None:
    async with at_work(house, rest, tags=("admin",)) as daemon:
        assert (await rest.host(daemon.node_id))["tags"] == []
        assert (await rest.call("POST", f"/hosts/{daemon.node_id}/tags", {"add": ["prod"]})).json()[
            "tags"
        ] == ["prod"]
    async with by_hand(house, rest) as other:
        await other.open()
        boast = pb.EdgeCapabilities(os="plan9")
        said = legacy_pb2.LegacyCapabilities(os="plan9", tags=["admin"]).SerializeToString()
        event = other.sign.update(boast, inner=envelope.capabilities_inner(said))
        event.capabilities = said
        await other.send(capability_update=event)
        await other.beat()
        await until(lambda: os_is(rest, other.node_id, "plan9"))
        assert (await rest.host(other.node_id))["tags"] == []


async def os_is(rest: Rest, node_id: str, wanted: str) -> bool:
    return bool((await rest.host(node_id))["os"] == wanted)
