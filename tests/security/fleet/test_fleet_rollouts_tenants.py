"""Whoever holds a role at one tenant finds, reads and orders no rollout of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from support.fleet.plans_rig import another, layer, plans_rig
from support.fleet.resources_rig import ResourcesRig, resources_rig
from support.fleet.simulated_subject import SimulatedAgent, SimulatedSubject
from support.fleet.started_domains import started_domains

from fleetplane.domains.blueprint import Blueprint
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER
from fleetplane.domains.fleetwide import FleetwideDomain
from fleetplane.fleet.rollouts.records import ROLLOUT, ROLLOUT_POLICY, PolicySpec, RolloutSpec, RolloutStatus
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.fleet.rollouts.settings import RolloutSettings
from fleetplane.kernel.identity.bindings import Bindings

ACME, OTHER = "0192-acme", "0193-other"


async def rolling(rig: ResourcesRig, tenant: str, name: str) -> None:
    spec = RolloutSpec(
        subject="edge.config", to="7", policy=Policy(), actor="alice", started_at_ns=10**18, total=1
    )
    status = RolloutStatus(phase=RolloutPhase.PAUSED, wave=1, counts={"pending": 1})
    await rig.put(ROLLOUT, f"tenant/{tenant}", name, spec=spec, status=status)
    policy = PolicySpec(policy=Policy(), actor="alice")
    await rig.put(ROLLOUT_POLICY, f"tenant/{tenant}", "edge.config", spec=policy)


async def test_roles_at_one_tenant_reach_no_rollout_of_another(tmp_path: Path) -> None:
    async with resources_rig(tmp_path) as rig:
        await rolling(rig, "acme", ACME)
        await rolling(rig, "other", OTHER)
        bindings = Bindings(rig.store)
        token = await rig.token("ann")  # which by itself holds nothing, like an account
        await bindings.give("token/ann", "operator", "/tenants/acme", actor="tester")
        await bindings.give("token/ann", "viewer", "/tenants/seen", actor="tester")
        await rolling(rig, "seen", "0194-seen")
        fleet = FleetwideDomain(rig.kernel, [], version="test").rest
        await fleet.take_over()
        app: Any = next(one.app for one in fleet.routes if one.path == "/v1/fleet")
        transport = httpx.ASGITransport(app=app)
        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://rig", headers=headers) as client:

            async def status(method: str, path: str) -> int:
                return (await client.request(method, f"/v1/fleet{path}")).status_code

            assert await status("GET", f"/rollouts/{ACME}") == 200
            assert await status("GET", "/rollouts/0192") == 200, "the beginning of an id is enough"
            for beginning in (OTHER, "0193"):
                assert await status("GET", f"/rollouts/{beginning}") == 404
                for verb in ("pause", "resume", "abort", "undo", "approve", "skip", "retry"):
                    assert await status("POST", f"/rollouts/{beginning}/{verb}") == 404
            assert await status("POST", "/rollouts/0194-seen/abort") == 403, "it may only look there"
            listed = (await client.get("/v1/fleet/rollouts")).json()["rollouts"]
            assert {one["id"] for one in listed} == {ACME, "0194-seen"}
            assert await status("GET", "/rollouts?scope=tenant/other") == 403
            policies = (await client.get("/v1/fleet/rollout-policies")).json()["policies"]
            assert {one["scope"] for one in policies} == {"tenant/acme", "tenant/seen"}
            assert await status("POST", f"/rollouts/{ACME}/abort") == 200
            kept = rig.store.get(ROLLOUT, "tenant/other", OTHER)
            assert kept is not None
            assert kept.status is not None
            assert kept.status.phase is RolloutPhase.PAUSED


class WatchedPrometheus:
    """Answers every query with 1, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"status":"success","data":{"resultType":"scalar","result":[1,"1"]}}'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def fleet_client(
    rig: ResourcesRig, subject: SimulatedSubject, gates: RolloutSettings, token: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A caller of a server that has one subject."""
    blueprint = Blueprint(name="sim", kinds=(), methods=(), grants={}, rollouts=lambda _domain: [subject])
    pair: Any = (blueprint, SimpleNamespace(collectors=()))
    fleet = FleetwideDomain(rig.kernel, [pair], version="test", gates=gates).rest
    await fleet.take_over()
    app: Any = next(one.app for one in fleet.routes if one.path == "/v1/fleet")
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://rig", headers=headers) as client:
        yield client


async def test_a_tenant_cannot_query_the_shared_prometheus_with_the_servers_token(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("shared-secret")
    prometheus = WatchedPrometheus()
    listening = await asyncio.start_server(prometheus.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    gate = {"name": "spy", "query": 'prometheus sum(secrets{tenant="other"})', "max": 1000}
    body = {"subject": "sim.version", "scope": "tenant/a", "policy": {"gates": [gate]}}
    async with resources_rig(tmp_path) as rig, listening:
        subject = SimulatedSubject(rig.kernel.clock, {"one": SimulatedAgent(online=False)})
        token = await rig.token("ann", "fleet.operator", tenant="a")
        settings = RolloutSettings(
            prometheus_url=url,
            prometheus_token_file=str(secret),
            prometheus_scopes=("tenant/other",),
            gate_timeout_seconds=60.0,
        )
        async with fleet_client(rig, subject, settings, token) as client:
            for method, path, given in (
                ("POST", "/v1/fleet/rollout-plans", body),
                ("POST", "/v1/fleet/rollouts", body),
                ("PUT", "/v1/fleet/rollout-policies", body),
            ):
                answer = await client.request(method, path, json=given)
                assert answer.status_code == 422, answer.text
                assert "may query no Prometheus" in answer.text
            assert prometheus.asked == []
            assert not rig.store.list(ROLLOUT)
            assert not rig.store.list(ROLLOUT_POLICY)
        allowed = msgspec.structs.replace(settings, prometheus_scopes=("tenant/a",))
        async with fleet_client(rig, subject, allowed, token) as client:
            planned = await client.post("/v1/fleet/rollout-plans", json=body)
            assert planned.status_code == 200, planned.text
            assert planned.json()["gates"][0]["value"] == 1
            (request,) = prometheus.asked
            assert b"authorization: bearer shared-secret" in request.lower()


class Nicknamed(SimulatedSubject):
    """A subject whose scope has a second spelling, which reads as the scope of another tenant."""

    def scope(self, text: str) -> str:
        return super().scope("tenant/a" if text == "tenant/mallory" else text)


class Holding(SimulatedSubject):
    """A subject of which the layer of tenant a is part."""

    def holder(self, kind: str, scope: str, _name: str) -> str | None:
        return "tenant/a" if (kind, scope) == ("edge-config", "/tenants/a") else None


async def test_nobody_learns_what_holds_objects_of_another_tenant(tmp_path: Path) -> None:
    async with resources_rig(tmp_path) as rig:
        subject = Holding(rig.kernel.clock, {"one": SimulatedAgent()})
        body = {"objects": [{"kind": "edge-config", "scope": "/tenants/a", "name": "tenant"}]}
        found = {}
        for tenant in ("a", "mallory"):
            token = await rig.token(tenant, "fleet.operator", tenant=tenant)
            async with fleet_client(rig, subject, RolloutSettings(), token) as client:
                answer = await client.post("/v1/fleet/rollout-holders", json=body)
                found[tenant] = answer.json()
        assert found == {
            "a": {"holders": [{"subject": "sim.version", "scope": "tenant/a"}], "hidden": 0},
            "mallory": {"holders": [], "hidden": 1},
        }


def once(at: str, scope: str, *, name: str = "", subject: str = "edge.config") -> dict[str, Any]:
    """A policy for one change, as `fleetplane apply --rollout` writes it beside the change."""
    return {
        "kind": "rollout-policy",
        "metadata": {"name": name or f"{at.replace('/', '.') or 'everywhere'}:{subject}", "scope": scope},
        "spec": {"subject": subject, "at": at, "policy": {"waves": ["1", "rest"]}, "once": True},
    }


async def test_what_is_applied_with_a_policy_reaches_no_other_tenant(tmp_path: Path) -> None:
    edge_alone = {"edge": started_domains(tmp_path)["edge"]}
    async with plans_rig(tmp_path / "site", started=edge_alone, roles=("edge.admin", "operator")) as rig:
        mallory = await another(rig, "mallory", "edge.admin", "operator", tenant="mallory")
        own, theirs = "/tenants/mallory", "/tenants/acme"
        await rig.applied(layer({"level": 1}, theirs))
        before = rig.store.revision
        for policy, change in (
            (once("tenant/acme", own), layer({"level": 2}, own)),  # holds elsewhere than it lies
            (once("tenant/acme", theirs), layer({"level": 2}, own)),  # lies where they may not write
            (once("tenant/mallory", own, name="tenant.acme:edge.config"), layer({"level": 2}, own)),
            (once("", own), layer({"level": 2}, own)),
            (once("", "/"), layer({"level": 2}, own)),
            (once("tenant", own), layer({"level": 2}, own)),
            (once("tenant/mallory/../acme", own), layer({"level": 2}, own)),
            (once("tenant/mallory", own), layer({"level": 2}, theirs)),  # their policy, another's change
        ):
            answer = await mallory.call("POST", "/plans", {"objects": [policy, change]})
            if answer.status_code == 201:
                answer = await mallory.apply(answer.json())
            assert answer.status_code in (400, 403, 404), (policy, change, answer.text)
            assert not rig.store.list(ROLLOUT_POLICY)
        assert [one.scope for one in rig.store.list(CONFIG_LAYER)] == ["tenant/acme"]
        assert all(one.revision <= before for one in rig.store.list(CONFIG_LAYER)), "nothing is half-done"
        await mallory.applied(once("tenant/mallory", own), layer({"level": 2}, own))
        assert [one.scope for one in rig.store.list(ROLLOUT_POLICY)] == ["tenant/mallory"]


async def test_a_policy_is_set_by_rights_at_the_scope_that_is_meant_and_not_as_it_is_spelled(
    tmp_path: Path,
) -> None:
    async with resources_rig(tmp_path) as rig:
        subject = Nicknamed(rig.kernel.clock, {"one": SimulatedAgent()})
        mallory = await rig.token("mallory", "fleet.operator", tenant="mallory")
        body = {"subject": "sim.version", "scope": "tenant/mallory", "policy": {}}
        async with fleet_client(rig, subject, RolloutSettings(), mallory) as client:
            answer = await client.put("/v1/fleet/rollout-policies", json=body)
            assert answer.status_code == 403, answer.text
            for path in ("/v1/fleet/rollouts", "/v1/fleet/rollout-plans"):
                assert (await client.post(path, json=body)).status_code == 403
            for scope in ("tenant/a", "tenant/nobody", "nobody"):  # whether it is there is not told
                elsewhere = {**body, "scope": scope}
                for method, path in (
                    ("POST", "/v1/fleet/rollouts"),
                    ("POST", "/v1/fleet/rollout-plans"),
                    ("PUT", "/v1/fleet/rollout-policies"),
                ):
                    answer = await client.request(method, path, json=elsewhere)
                    assert answer.status_code == 403, (method, path, scope, answer.text)
            assert not rig.store.list(ROLLOUT_POLICY)
