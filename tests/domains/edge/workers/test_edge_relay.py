"""Two servers: operators at a controller, daemons at a relay."""

from __future__ import annotations

import asyncio
import gzip
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from support.edge.edge_identity_rig import claims_of
from support.edge.edge_site import Site, a_tenant, site, until
from support.edge.shipped_daemon import ShippedDaemon

from fleetplane.domains.edge.grpc.relay import Relay
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.errors import SettingsError, Unavailable


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("relay") / "data", "--set", "edge.role=relay-coordinator") as here:
        yield here


@pytest.fixture(scope="module")
def controller(relay: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("controller")
    token = folder / "relay.token"
    token.write_text(relay.token() + "\n")
    with site(
        folder / "data",
        "--set",
        f"edge.relay_coordinator_endpoint={relay.server.web}",
        "--set",
        f"edge.relay_coordinator_token_file={token}",
    ) as here:
        yield here


async def test_minting_and_dispatch_go_on_to_the_relay_that_has_the_daemons(
    controller: Site, relay: Site
) -> None:
    tenant = a_tenant()
    async with controller.rest(tenant) as rest, relay.rest(tenant) as there:
        token = await rest.invite("behind the relay")
        assert claims_of(token)["cep"] == relay.server.address("edge", "http")
        daemon = await ShippedDaemon.enroll(relay.edge, token, heartbeat_seconds=0.5, wait_scale=0.05)
        async with daemon.running():
            await rest.connected(daemon.node_id)
            assert (await there.host(daemon.node_id))["name"] == "behind the relay"
            run = await rest.do("all", script="echo from afar")
            (one,) = run["per_node"]
            assert (one["outcome"], one["stdout_tail"]) == ("ok", "from afar\n")
            body = {"target": "all", "tool": "cmd.run", "args": {"command": "true"}}
            async with rest.events("/fleet/invoke", method="POST", json=body) as events:
                kinds = [event.kind async for event in events]
            assert (kinds[0], kinds[-1]) == ("fleet_started", "fleet_result")
            # What a tenant's operator asked for is done for that tenant, in the operator's name.
            assert " for " in (await there.run(run["fleet_command_id"]))["started_by"]
            assert (await rest.call("DELETE", f"/hosts/{daemon.node_id}")).status_code == 204
            await until(lambda: daemon.refusals)

        async def same() -> bool:
            return bool(await there.get("/hosts") == await rest.get("/hosts"))

        await until(same)


async def test_who_may_what_is_decided_where_the_operators_are(controller: Site, relay: Site) -> None:
    tenant, other = a_tenant(), a_tenant()
    async with relay.rest(other) as theirs:
        daemon = await relay.shipped(theirs)
    async with controller.rest(tenant) as rest, controller.rest(tenant, "aegis.edge.hosts.read") as reader:
        assert (await rest.call("GET", f"/hosts/{daemon.node_id}")).status_code == 404
        assert (await rest.call("GET", "/hosts", headers={"x-aegis-tenant": other})).status_code == 403
        assert (await reader.call("POST", "/enrollment-tokens", {})).status_code == 403
        missing = await rest.call("POST", "/fleet/invoke", {"target": "@nobody", "tool": "cmd.run"})
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        sneaky = await rest.call("GET", f"/hosts/..%2f..%2fmetrics{uuid.uuid4().hex}")
        assert sneaky.status_code == 404
    async with controller.rest(tenant, token=relay.token(tenant=tenant)) as foreign:
        assert (await foreign.call("GET", "/hosts")).status_code == 401  # a token of the relay is none here


async def test_two_operators_who_use_the_same_key_are_two_to_the_relay(controller: Site) -> None:
    """It knows both by the one token of the controller."""
    key = {"idempotency-key": uuid.uuid4().hex}
    async with controller.rest(a_tenant()) as one, controller.rest(a_tenant()) as other:
        made = [
            await rest.call("POST", "/enrollment-tokens", {"name": "k"}, headers=key)
            for rest in (one, other, one)
        ]
    assert [answer.status_code for answer in made] == [201, 201, 201]
    assert made[0].json() == made[2].json() != made[1].json()


async def test_tokens_are_minted_over_grpc_too(controller: Site, relay: Site) -> None:
    tenant = a_tenant()
    metadata = (("authorization", f"Bearer {controller.token(tenant=tenant)}"),)
    async with grpc.aio.insecure_channel(controller.edge) as channel:
        stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
        made = await stub.IssueEnrollmentToken(
            pb.IssueEnrollmentTokenRequest(issued_to="n"), metadata=metadata
        )
    assert made.command_hint == f"aegis edge enroll {made.token}"
    assert (await ShippedDaemon.enroll(relay.edge, made.token)).node_id


def relay_to(endpoint: str, token: Path) -> Relay:
    return Relay.load(
        EdgeSettings(relay_coordinator_endpoint=endpoint, relay_coordinator_token_file=str(token))
    )


def test_a_relay_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with pytest.raises(SettingsError, match="URL"):
        relay_to("relay:443", token)
    with pytest.raises(SettingsError, match="cannot be read"):
        relay_to("http://relay", tmp_path / "none")


class Impostor(BaseHTTPRequestHandler):
    """Who sits at the relay's address and answers with what the path says."""

    def do_GET(self) -> None:
        body = gzip.compress(b"{}") if self.path == "/packed" else b"<html>"
        self.send_response(200)
        if self.path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Nothing."""


async def test_what_is_no_answer_of_a_relay_is_told_as_such(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with HTTPServer(("127.0.0.1", 0), Impostor) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        relay = relay_to(f"http://127.0.0.1:{server.server_port}", token)
        try:
            with pytest.raises(Unavailable, match="content encoding 'gzip', which was not asked for"):
                await relay.pass_on("GET", "/packed", caller="somebody", tenant=None)
            with pytest.raises(Unavailable, match="cannot be read: JSON is malformed"):
                await relay.pass_on("GET", "/page", caller="somebody", tenant=None)
        finally:
            await relay.close()
            await asyncio.to_thread(server.shutdown)
            serving.join(60)
