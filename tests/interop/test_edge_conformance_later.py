"""What a server must do for the daemons in the field, and for ours, point by point: keys, losses, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.edge import edge_streams_rig, shipped_wire
from support.edge.edge_company import (
    ABORTED,
    EXHAUSTED,
    INVALID,
    PRECONDITION,
    UNAUTHENTICATED,
    at_work,
    machine,
    only,
    ours_at_work,
)
from support.edge.edge_daemon_rig import configure, running
from support.edge.edge_identity_rig import Machine
from support.edge.edge_site import Rest, Site, a_tenant, new_key, refused, restarting, site, until
from support.edge.edge_streams_rig import streams_rig
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc

OVERLAP_SECONDS, STALE_SECONDS = 15, 8


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("conformance") / "data") as here:
        yield here


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One on which overlaps end and silence counts within seconds."""
    times = (f"edge.overlap_seconds={OVERLAP_SECONDS}", f"edge.stale_seconds={STALE_SECONDS}")
    with site(tmp_path_factory.mktemp("hasty") / "data", "--set", times[0], "--set", times[1]) as here:
        yield here


@pytest.fixture
async def rest(house: Site) -> AsyncIterator[Rest]:
    async with house.rest(a_tenant()) as opened:
        yield opened


# 9 and 10: keys.


async def test_9_a_key_is_replaced_in_every_layout_and_refused_for_every_reason(
    house: Site, rest: Rest
) -> None:
    shipped = await house.shipped(rest)
    first = shipped.token
    await shipped.rotate_key()
    renewed = shipped.token
    await shipped.refresh_token()
    assert len({first, renewed, shipped.token}) == 3
    async with machine(house, rest) as one:
        for form in (0, 1, 2):  # the digest, and both documented layouts
            new = new_key()
            one.token = (await one.rotate(one.wish(new, form=form))).node_security_token
            one.key = new
        replayed = one.wish(one.key)
        one.token = (await one.rotate(replayed)).node_security_token
        assert await refused(one.rotate(replayed)) == UNAUTHENTICATED
        wish = one.wish(new_key())
        wish.signature_with_new_key = bytes(64)
        assert await refused(one.rotate(wish)) == INVALID
        wish = one.wish(new_key())
        wish.current_envelope.signature = bytes(64)
        assert await refused(one.rotate(wish)) == UNAUTHENTICATED
        wishes = [one.wish(new_key()) for _ in range(8)]
        codes = await asyncio.gather(*(code_of(one.rotate(wish)) for wish in wishes))
        assert codes.count(0) == 1
        assert set(codes) <= {0, ABORTED, UNAUTHENTICATED}
    assert (await rest.call("DELETE", f"/hosts/{shipped.node_id}")).status_code == 204
    assert await refused(shipped.rotate_key()) == PRECONDITION


async def code_of(call: Any) -> int:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return int(error.code().value[0])
    return 0


async def test_9_an_unhealthy_daemon_keeps_its_key(hasty: Site) -> None:
    async with hasty.rest(a_tenant()) as rest:
        daemon = await hasty.shipped(rest, heartbeat_seconds=600)
        async with daemon.running():
            await until(lambda: rest._is(daemon.node_id, "Unhealthy"))
            assert await refused(daemon.rotate_key()) == PRECONDITION


async def test_10_a_stream_survives_a_rotation_and_returns_after_the_overlap(hasty: Site) -> None:
    async with hasty.rest(a_tenant()) as rest, at_work(hasty, rest) as daemon:
        await daemon.rotate_key()
        assert (await rest.do())["summary"]["ok"] == 1
        assert len(daemon.streams) == 1  # still with its former key
        await until(lambda: daemon.headers == 2)
        assert (await rest.do())["summary"]["ok"] == 1
        assert daemon.refusals == []


async def test_10_a_daemon_of_ours_takes_its_new_key_into_use_by_itself(hasty: Site, tmp_path: Path) -> None:
    async with hasty.rest(a_tenant()) as rest:
        state = await hasty.ours(rest, tmp_path / "ours")
        configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
        async with running(state):
            (node,) = (await rest.get("/hosts"))["items"]
            await rest.connected(node["node_id"])
            before = state.key.read_bytes()
            rotated = await rest.do(tool="edge.rotate_key", args={})
            assert rotated["summary"]["ok"] == 1, rotated
            assert (await rest.host(node["node_id"]))["key_version"] == 2
            assert (await rest.do())["summary"]["ok"] == 1
            assert state.key.read_bytes() != before


# 11, 12 and 13: cancelled, replaced and lost.


async def test_11_a_daemon_that_cannot_stop_is_told_to_and_its_own_word_is_the_outcome(
    house: Site, rest: Rest, tmp_path: Path
) -> None:
    async with at_work(house, rest) as daemon:
        wait = f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done"
        run_id = await rest.start(script=wait)
        await until((tmp_path / "begun").exists)
        told = await rest.post(f"/fleet/{run_id}/cancel")
        assert (told["cancelled"], told["told_to_stop"], told["already_terminal"]) == (0, 1, False)
        (going_on,) = (await rest.run(run_id))["per_node"]
        assert (going_on["outcome"], going_on["told_to_stop"]) == ("running", True)
        assert going_on["message"].startswith("told to stop; may finish")
        assert (await rest.run(run_id))["outcome"] == "cancelled"  # of the run
        (tmp_path / "go").touch()
        await until(lambda: daemon.sent.count("result") == 2)  # its own result, and the answer to the cancel
        assert (await rest.do(script="echo next"))["summary"]["ok"] == 1
        ended = await only(rest, run_id)
        assert (ended["outcome"], ended["stdout_tail"]) == ("ok", "done\n")
        assert (await rest.run(run_id))["outcome"] == "cancelled"
        assert (await rest.post(f"/fleet/{run_id}/cancel"))["already_terminal"] is True


async def test_12_a_daemon_that_returns_while_its_old_stream_lingers_keeps_its_place(
    house: Site, rest: Rest
) -> None:
    daemon = await house.shipped(rest)
    again = ShippedDaemon(
        house.edge, node_id=daemon.node_id, key=daemon.key, token=daemon.token, heartbeat_seconds=0.2
    )
    lingering = asyncio.ensure_future(daemon.connect_once())
    await rest.connected(daemon.node_id)
    async with again.running():
        await until(lambda: again.headers == 1)
        await asyncio.wait_for(lingering, 60)
        beats = again.sent.count("heartbeat")
        await until(lambda: again.sent.count("heartbeat") > beats + 1)
        await rest.connected(daemon.node_id)
        assert (await rest.do())["summary"]["ok"] == 1
        assert len(again.streams) == 1


async def test_13_a_daemon_that_leaves_in_mid_command_fails_it_at_once(house: Site, rest: Rest) -> None:
    async with at_work(house, rest) as daemon:
        run_id = await rest.start(script="exec sleep 30")
        await until(lambda: len(daemon.commands) == 1)
    async with asyncio.timeout(60):
        one = await only(rest, run_id)
    assert (one["outcome"], one["code"]) == ("err", "edge_disconnected")


async def test_11_and_13_a_daemon_of_ours_stops_what_is_cancelled_and_fails_what_it_leaves(
    house: Site, rest: Rest, tmp_path: Path
) -> None:
    async with ours_at_work(house, rest, tmp_path / "ours"):
        script = f"trap 'touch {tmp_path}/stopped; exit' TERM; touch {tmp_path}/begun; sleep 30 & wait"
        run_id = await rest.start(script=script)
        await until((tmp_path / "begun").exists)
        await rest.post(f"/fleet/{run_id}/cancel")
        assert (await only(rest, run_id))["outcome"] == "cancelled"
        await until((tmp_path / "stopped").exists)
        (tmp_path / "begun").unlink()
        run_id = await rest.start(script=script)
        await until((tmp_path / "begun").exists)
    one = await only(rest, run_id)
    assert (one["outcome"], one["code"]) == ("err", "edge_disconnected")


# 14 and 15: tenants.


async def test_14_another_tenants_things_are_not_there(house: Site, rest: Rest) -> None:
    async with house.rest(a_tenant()) as stranger, at_work(house, rest) as daemon:
        group = await rest.post("/groups", {"name": "g", "pinned_members": [daemon.node_id]})
        run_id = await rest.start(script="exec sleep 30")
        calls: list[tuple[str, str, Any]] = [
            ("GET", f"/hosts/{daemon.node_id}", None),
            ("DELETE", f"/hosts/{daemon.node_id}", None),
            ("GET", f"/groups/{group['id']}", None),
            ("GET", "/groups/g", None),
            ("POST", "/fleet/invoke", {"target": {"Node": daemon.node_id}, "tool": "cmd.run"}),
            ("POST", "/fleet/invoke", {"target": {"Group": group["id"]}, "tool": "cmd.run"}),
            ("POST", "/fleet/preview", {"target": {"Node": daemon.node_id}}),
            ("POST", f"/fleet/{run_id}/cancel", None),
            ("GET", f"/fleet/runs/{run_id}", None),
        ]
        for method, path, body in calls:
            answer = await stranger.call(method, path, body)
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
        assert (await stranger.get("/hosts"))["items"] == []
        await rest.post(f"/fleet/{run_id}/cancel")


async def test_15_a_node_is_not_taken_over_by_another_tenants_token(house: Site, rest: Rest) -> None:
    async with house.rest(a_tenant()) as thief, at_work(house, rest) as daemon:
        for key in (new_key(), daemon.key):
            stolen = ShippedDaemon.enroll(house.edge, await thief.invite(), node_id=daemon.node_id, key=key)
            assert await refused(stolen) in (PRECONDITION, UNAUTHENTICATED, 7)
        assert (await thief.get("/hosts"))["items"] == []
        assert (await rest.do())["summary"]["ok"] == 1


# 16 and 17: configuration, health, roles and rates.


async def test_16_a_pushed_configuration_does_not_end_the_stream_of_a_daemon_in_the_field(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        who = await rig.enrol()
        daemon = ShippedDaemon(
            rig.address, node_id=who.node_id, key=who.key, token=who.token, heartbeat_seconds=0.2
        )
        await rig.layers.put(LayerPlace(tenant=who.tenant), {"a": {"b": [1, "x"]}}, actor="user/boss")
        async with daemon.running():
            pushed = shipped_wire.PushConfig(delta={"a": {"b": [1.0, "x"]}})
            await edge_streams_rig.until(lambda: pushed in daemon.commands)
            beats = daemon.sent.count("heartbeat")
            await edge_streams_rig.until(lambda: daemon.sent.count("heartbeat") > beats)
        assert (daemon.broken, len(daemon.streams)) == ([], 1)


async def test_17_health_is_served_and_the_sixth_attestation_of_a_minute_is_not(tmp_path: Path) -> None:
    async with (
        restarting(tmp_path / "data", "--set", "edge.attests_per_minute=5") as here,
        grpc.aio.insecure_channel(here.edge) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        for _ in range(5):
            await Machine(stub).attest()
        assert await refused(Machine(stub).attest()) == EXHAUSTED


async def test_17_a_worker_takes_no_edge_daemons(tmp_path: Path) -> None:
    async with (
        restarting(tmp_path / "data", "--set", "edge.role=worker") as here,
        grpc.aio.insecure_channel(here.edge) as channel,
    ):
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        one = Machine(stub, token="a.b.c")
        assert await refused(one.attest()) == PRECONDITION
        assert await refused(one.rotate(one.wish(new_key()))) == PRECONDITION
        call: Any = channel.stream_stream(edge_streams_rig.CONNECT)()
        assert (await call.code()) is grpc.StatusCode.FAILED_PRECONDITION
