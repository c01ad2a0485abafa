"""What strangers, thieves and liars get from a real server: a refusal, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from support.edge.edge_company import PRECONDITION, UNAUTHENTICATED, at_work, by_hand, only
from support.edge.edge_identity_rig import Machine, claims_of
from support.edge.edge_site import Rest, Site, a_tenant, new_key, refused, site, until
from support.edge.edge_streams_rig import Daemon
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2

Code = grpc.StatusCode
REDEEMERS = 64
SKEW_MS = 300_000


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("security") / "data") as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


# Joining.


async def test_of_64_who_redeem_one_token_at_once_one_gets_in(house: Site, rest: Rest) -> None:
    token = await rest.invite("one")
    async with grpc.aio.insecure_channel(house.edge) as channel:
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        machines = [Machine(stub) for _ in range(REDEEMERS)]
        challenges = await asyncio.gather(*(machine.attest() for machine in machines))
        answers = [
            machine.respond(machine.answer(challenge, token))
            for machine, challenge in zip(machines, challenges, strict=True)
        ]
        found = await asyncio.gather(*answers, return_exceptions=True)
    errors = [one for one in found if isinstance(one, grpc.aio.AioRpcError)]
    assert len(errors) == REDEEMERS - 1
    assert {error.code() for error in errors} == {Code.UNAUTHENTICATED}
    (node,) = (await rest.get("/hosts"))["items"]
    winner = next(index for index, one in enumerate(found) if not isinstance(one, BaseException))
    assert node["node_id"] == machines[winner].node_id
    (token_row,) = (await rest.get("/enrollment-tokens"))["items"]
    assert (token_row["state"], token_row["redeemed_by"]) == ("redeemed", node["node_id"])


async def test_a_withdrawn_token_enrols_nobody(house: Site, rest: Rest) -> None:
    token = await rest.invite()
    gone = await rest.call("DELETE", f"/enrollment-tokens/{claims_of(token)['jti']}")
    assert gone.status_code == 204
    assert await refused(ShippedDaemon.enroll(house.edge, token)) == UNAUTHENTICATED


async def test_a_node_cannot_be_taken_over(house: Site, rest: Rest) -> None:
    async with house.rest(a_tenant()) as thief, at_work(house, rest) as daemon:
        other = await house.shipped(thief)
        attempts: list[dict[str, Any]] = [
            {"node_id": daemon.node_id, "key": other.key, "token": daemon.token},  # a stolen token
            {"node_id": daemon.node_id, "key": other.key, "token": other.token},  # a borrowed name
            {"node_id": other.node_id, "key": other.key, "token": daemon.token},
            {"node_id": other.node_id, "key": daemon.key, "token": other.token},
        ]
        for attempt in attempts:
            liar = ShippedDaemon(house.edge, **attempt)
            assert await refused(liar.connect_once()) == UNAUTHENTICATED, attempt
            assert liar.headers == 0
        for name, key in ((daemon.node_id, other.key), (daemon.node_id, new_key())):
            claim = ShippedDaemon(house.edge, node_id=name, key=key, token="")
            assert await refused(claim.rotate_key()) == UNAUTHENTICATED
        assert len(daemon.streams) == 1  # nobody disturbed it
        assert (await rest.do())["summary"]["ok"] == 1


# Events.


def _other_stream(daemon: Daemon, _liar: Daemon) -> bytes:
    return _beat(daemon, stream_id="aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee")


def _beat(daemon: Daemon, **wrong: Any) -> bytes:
    return tolerant_pb2.EdgeEvent(heartbeat=daemon.sign.heartbeat(**wrong)).SerializeToString()


LIES: dict[str, Any] = {
    "forged": lambda daemon, _: _beat(daemon, key=new_key()),
    "forged in its last bit": lambda daemon, _: _flipped(_beat(daemon)),
    "of another tenant": lambda _, liar: _beat(liar),
    "with another tenant's token": lambda daemon, liar: _beat(daemon, token=liar.identity.token),
    "of another stream": _other_stream,
    "of another kind": lambda daemon, _: _beat(daemon, kind=4),
    "too old": lambda daemon, _: _beat(daemon, ahead_ms=-SKEW_MS - 5000),
    "of the future": lambda daemon, _: _beat(daemon, ahead_ms=SKEW_MS + 60_000),
    "about something else": lambda daemon, _: _beat(daemon, inner=b"x"),
    "without a token": lambda daemon, _: _beat(daemon, token=""),
}


def _flipped(raw: bytes) -> bytes:
    event = tolerant_pb2.EdgeEvent.FromString(raw)
    signature = event.heartbeat.envelope.signature
    event.heartbeat.envelope.signature = signature[:-1] + bytes([signature[-1] ^ 1])
    return event.SerializeToString()


@pytest.mark.parametrize("lie", LIES)
async def test_an_event_that_is_not_what_it_claims_ends_its_stream(house: Site, rest: Rest, lie: str) -> None:
    async with house.rest(a_tenant()) as others, by_hand(house, others) as liar:
        await liar.open_legacy()
        async with by_hand(house, rest) as daemon:
            await daemon.open_legacy()
            await daemon.beat()
            await daemon.call.write(LIES[lie](daemon, liar))
            assert await daemon.ended() is Code.UNAUTHENTICATED
        await liar.beat()  # and nobody else is touched by it
        await others.connected(liar.node_id)


async def test_cut_short_an_event_ends_its_stream_wherever_it_was_cut(house: Site, rest: Rest) -> None:
    async with by_hand(house, rest) as daemon:
        whole = _beat(daemon)
        for length in (1, 7, len(whole) // 2, len(whole) - 1):
            await daemon.open_legacy()
            await daemon.call.write(_beat(daemon)[:length])
            assert await daemon.ended() in (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED)


async def test_events_far_out_of_their_order_end_the_stream(house: Site, rest: Rest) -> None:
    async with by_hand(house, rest) as daemon:
        await daemon.open_legacy()
        for ahead_ms in (0, 200_000, -50_000):  # output may have waited to be sent
            await daemon.beat(ahead_ms=ahead_ms)
        await rest.connected(daemon.node_id)
        await daemon.beat(ahead_ms=200_000 - SKEW_MS - 60_000)  # as old as that after a wait, too
        assert await daemon.ended() is Code.UNAUTHENTICATED
        assert await daemon.call.details() == "the envelope is older than what came before it"


async def test_what_was_recorded_is_of_no_use_again(house: Site, rest: Rest) -> None:
    async with by_hand(house, rest) as daemon:
        hello, beat = daemon.sign.hello(), daemon.sign.heartbeat()
        daemon.call = daemon._method()
        await daemon.send(hello=hello)
        await daemon.call.initial_metadata()
        await daemon.send(heartbeat=beat)
        daemon.leave()
        code, words = await daemon.refusal(hello=hello)
        assert (code, words) == (Code.UNAUTHENTICATED, "the hello was used before")
        await daemon.open_legacy()
        await daemon.send(heartbeat=beat)  # of the stream before
        assert await daemon.ended() is Code.UNAUTHENTICATED


async def test_one_daemon_cannot_answer_for_another(house: Site, rest: Rest) -> None:
    async with (
        by_hand(house, rest) as daemon,
        by_hand(house, rest) as neighbour,
        house.rest(a_tenant()) as others,
        by_hand(house, others) as stranger,
    ):
        for one in (daemon, neighbour, stranger):
            await one.open()
        await rest.connected(daemon.node_id, neighbour.node_id)
        run_id = await rest.start({"Node": daemon.node_id})
        command_id = (await daemon.next("invoke_tool")).command_id
        for liar in (neighbour, stranger):
            await liar.answer(command_id)
            await liar.beat()
        await until(lambda: others._is(stranger.node_id, "Connected"))
        assert (await rest.run(run_id))["ended_at"] is None
        await daemon.answer(command_id)
        assert (await only(rest, run_id))["outcome"] == "ok"
        await daemon.answer(command_id, b"\x12\x00")  # and it has only one word itself
        assert (await only(rest, run_id))["outcome"] == "ok"


# Revoking.


async def test_a_revoked_daemons_open_stream_is_cut_before_its_silence_is_noticed(
    house: Site, rest: Rest
) -> None:
    async with by_hand(house, rest) as daemon:
        await daemon.open()
        await rest.connected(daemon.node_id)
        run_id = await rest.start()
        await daemon.next("invoke_tool")
        assert (await rest.call("DELETE", f"/hosts/{daemon.node_id}")).status_code == 204
        assert await daemon.ended() is Code.FAILED_PRECONDITION
        assert (await only(rest, run_id))["outcome"] == "err"
        assert (await rest.host(daemon.node_id))["status"] == "Revoked"
        assert (await daemon.refusal())[0] is Code.FAILED_PRECONDITION
    shipped = await house.shipped(rest)
    assert (await rest.call("DELETE", f"/hosts/{shipped.node_id}")).status_code == 204
    assert await refused(shipped.rotate_key()) == PRECONDITION
