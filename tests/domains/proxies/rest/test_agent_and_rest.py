"""Both halves in one real server: what REST changes reaches the agent, what the agent does is seen by all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import websockets
from support.instances.agents_rig import DEADLINE_SECONDS, FakeAgent
from support.proxies.events_rig import Listener
from support.shared.server_process import ServerProcess, run_server, running_server

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc

PASSWORD = "correct horse battery staple"
EMAIL = "admin@fleetplane.local"


async def login(web: httpx.AsyncClient) -> str:
    answer = await web.post("/v1/auth/login", json={"email": EMAIL, "password": PASSWORD})
    token: str = answer.json()["access_token"]
    web.headers["Authorization"] = f"Bearer {token}"
    return token


async def made(web: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await web.post(f"/v1{path}", json=body)
    assert answer.status_code == 201, answer.text
    thing: dict[str, Any] = answer.json()
    return thing


def serving(folder: Path, *arguments: str) -> Any:
    return running_server(folder, "--only", "proxies", *arguments, admin_password=PASSWORD)


async def day(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.web, timeout=60) as web:
        token = await login(web)
        organization = await made(web, "/organizations", name="Acme", slug="acme")
        workspace = await made(
            web, f"/organizations/{organization['id']}/workspaces", name="Production", slug="production"
        )
        enrolled = await made(web, f"/workspaces/{workspace['id']}/agents/tokens", name="web-01")
        root = (await web.get("/.well-known/ca.pem")).content
        address = server.address("proxy-agents", "https://").removeprefix("https://")
        socket = f"{server.web.replace('http', 'ws', 1)}/v1/events?token={token}"
        credentials = grpc.ssl_channel_credentials(root)
        async with (
            websockets.connect(socket) as connection,
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            listener = Listener(connection)
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            agent = FakeAgent(stub, enrolled["token"], enrolled["agent_id"])
            await serve(web, listener, agent, workspace["id"])
            numbers = (await web.get("/metrics")).text
            assert 'fleetplane_proxies_agents{state="online"} 1.0' in numbers
            assert 'fleetplane_sessions_open{domain="proxies"} 1.0' in numbers
            assert "fleetplane_proxies_event_sockets 1.0" in numbers
            assert "fleetplane_telemetry_lost_total 0.0" in numbers
            await listener.ask(action="ping")
            server.process.terminate()
            assert (await agent.next("error")).code == "GOING_AWAY"
            assert await agent.ended() is grpc.StatusCode.UNAVAILABLE


async def serve(web: httpx.AsyncClient, listener: Listener, agent: FakeAgent, workspace: str) -> None:
    assert (await agent.open()).success
    assert (await listener.event("agent.connected"))["data"]["agent_id"] == agent.agent_id
    await agent.health(0)
    first = await agent.next("config_update")
    await agent.status(first, "SUCCESS")
    await agent.health(first.version)

    location = {"path": "/", "proxy_pass": "http://localhost:8080/health"}
    body = {"name": "API", "server_name": "api.example.com", "listen_port": 80, "locations": [location]}
    host = await made(web, f"/workspaces/{workspace}/virtual-hosts", **body)
    update = await agent.next("config_update")
    assert [one.id for one in update.virtual_hosts] == [host["id"]]
    await agent.status(update, "PENDING", "VALIDATING", "APPLYING", "SUCCESS")
    applied = await listener.until(
        lambda one: one["type"] == "config.applied" and one["data"]["version"] == update.version
    )
    assert applied["data"]["success"] is True
    await agent.health(update.version)

    reloading = asyncio.create_task(web.post(f"/v1/agents/{agent.agent_id}/reload"))
    command = await agent.next("command")
    await agent.answer(command.command_id, success=True, message="Nginx reloaded successfully")
    answer = (await reloading).json()
    assert (answer["success"], answer["message"]) == (True, "Nginx reloaded successfully")
    await listener.event("command.completed")

    shown = (await web.get(f"/v1/agents/{agent.agent_id}")).json()
    assert (shown["state"], shown["health"]["config_version"]) == ("online", update.version)
    assert shown["health"]["active_connections"] == 42
    await report(web, agent, workspace)


async def report(web: httpx.AsyncClient, agent: FakeAgent, workspace: str) -> None:
    entry = pb.LogEntry(level="access", fields={"id": "line-1", "status": "500", "uri": "/checkout"})
    await agent.send(logs=pb.LogBatch(entries=[entry]))
    assert (await agent.next("ack")).success
    asked = f"/v1/workspaces/{workspace}/access-logs?status_code=5xx"
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (found := (await web.get(asked)).json())["data"]:  # written in batches, within moments
            await asyncio.sleep(0.02)
    assert [(one["agent_id"], one["uri"]) for one in found["data"]] == [(agent.agent_id, "/checkout")]


def test_a_fleets_first_day_over_all_three_protocols(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        asyncio.run(day(server))
        assert server.process.wait(60) == 0
        failed = [line for line in server.logged() if line.get("level") in ("error", "critical")]
        assert failed == []


def test_the_agents_listener_refuses_to_go_without_tls_unless_told_twice(tmp_path: Path) -> None:
    plain = ["--set", "listeners.proxy-agents.tls=false"]
    refused = run_server(tmp_path / "a", plain)
    assert refused.returncode != 0
    assert "listeners.proxy-agents.tls" in refused.stderr + refused.stdout
    with serving(tmp_path / "b", *plain, "--set", "listeners.proxy-agents.allow_plaintext=true") as server:
        assert server.address("proxy-agents", "http://")
        assert json.loads((tmp_path / "b" / "ready.json").read_text())["listeners"]["proxy-agents"]
