"""One change to two thousand connected NGINX agents, until the last of them has acknowledged it.

The server is the product as a user starts it; the change comes in over REST. The agents are official
gRPC clients over TLS, in one process on the other core: each takes the configuration, says that it
validates, applies and serves it, and waits for the receipt of its last word. So every agent costs
the server four durable writes. The pause for further changes, half a second, is part of the figure.

Then the same change as a rollout, in one wave and in four, without soaks: from the request until every
target is confirmed and the rollout is done. What is more than without one is what the waves cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx

from bench import servers
from bench.figures import Effort, Row, alone
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc

AGENTS = 2_000
CHANNELS = 16
AT_ONCE = 64
MUST_SECONDS = 10.0
WAVES = {"one wave": ["rest"], "four waves": ["1", "10%", "50%", "rest"]}
PASSWORD = "a password for one benchmark"


class Agent:
    """Does at once whatever it is told."""

    def __init__(self, stub: agent_pb2_grpc.AgentServiceStub, token: str) -> None:
        self.stub = stub
        self.token = token
        self.acknowledged = 0
        self.call: Any = None

    async def open(self) -> None:
        self.call = self.stub.Stream()
        await self.call.write(pb.AgentMessage(registration=pb.RegistrationRequest(token=self.token)))
        answer = await self.call.read()
        assert answer.registration_response.success, answer
        await self.say(health=pb.HealthReport(nginx=pb.NginxStatus(is_running=True)))

    async def say(self, **payload: Any) -> None:
        await self.call.write(pb.AgentMessage(**payload))

    async def live(self) -> None:
        while True:
            message = await self.call.read()
            if message.WhichOneof("payload") == "config_update":
                update = message.config_update
                for state in (pb.VALIDATING, pb.APPLYING, pb.SUCCESS):
                    about = {"config_id": update.config_id, "version": update.version}
                    await self.say(config_status=pb.ConfigStatus(status=state, **about))
                await self.say(health=pb.HealthReport(config_version=update.version))
            elif message.ack.message_id.endswith(":SUCCESS"):
                self.acknowledged = int(message.ack.message_id.split(":")[1])


def settings(directory: Path) -> tuple[str, ...]:
    """Of a server without a limit on requests; its administrator has `PASSWORD`."""
    password = servers.secret_file(directory / "password", PASSWORD)
    return (f"proxies.admin_password_file={password}", "proxies.requests_per_minute=1000000000")


async def _post(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await web.post(path, json=body)
    answer.raise_for_status()
    return answer.json()


@contextlib.asynccontextmanager
async def _workspace(address: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with httpx.AsyncClient(base_url=f"{address}/v1", timeout=60) as web:
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        web.headers["Authorization"] = f"Bearer {(await _post(web, '/auth/login', login))['access_token']}"
        organization = await _post(web, "/organizations", {"name": "Acme", "slug": "acme"})
        path = f"/organizations/{organization['id']}/workspaces"
        yield web, (await _post(web, path, {"name": "Production", "slug": "production"}))["id"]


async def _change(web: httpx.AsyncClient, workspace: str, number: int) -> None:
    location = {"path": "/", "proxy_pass": "http://127.0.0.1:9000"}
    body = {"name": f"h{number}", "server_name": f"h{number}.example.com", "locations": [location]}
    await _post(web, f"/workspaces/{workspace}/virtual-hosts", body)


async def _reached(agents: Sequence[Agent], version: int) -> None:
    async with asyncio.timeout(120):
        while min(agent.acknowledged for agent in agents) < version:  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # an agent that rang a bell each time would be measured too


def operator_token(data: Path) -> str:
    """Of one who may roll out."""
    command = [str(Path(sys.executable).with_name("fleetplane")), "tokens", "create", "bench"]
    words = ("--role", "fleet.operator", "--data-dir", str(data))
    return subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout.strip()


async def _rolled_out(fleet: httpx.AsyncClient, number: int) -> None:
    """Until so many rollouts are done, each with every target confirmed."""
    async with asyncio.timeout(600):
        while True:
            found = (await fleet.get("/rollouts")).raise_for_status().json()["rollouts"]
            if len(found) >= number and all(one["phase"] == "done" for one in found):
                assert all(set(one["counts"]) == {"confirmed"} for one in found), found
                return
            assert not any(one["phase"] in ("halted", "aborted") for one in found), found
            await asyncio.sleep(0.05)


async def _in_waves(
    web: httpx.AsyncClient, workspace: str, address: str, token: str, rounds: int
) -> dict[str, float]:
    """The time of a change as a rollout, by its waves."""
    took = {}
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"{address}/v1/fleet", headers=headers, timeout=60) as fleet:
        for number, (name, waves) in enumerate(WAVES.items(), start=1):
            policy = {"waves": waves, "soak_seconds": 0, "confirm_seconds": 600}
            body = {"subject": "proxies.config", "scope": workspace, "policy": policy}
            (await fleet.put("/rollout-policies", json=body)).raise_for_status()
            begun = time.perf_counter()
            await _change(web, workspace, rounds + number)
            await _rolled_out(fleet, number)
            took[name] = time.perf_counter() - begun
    return took


async def _measure(
    said: dict[str, list[str]], count: int, rounds: int, token: str
) -> tuple[list[float], dict[str, float]]:
    took = []
    async with _workspace(said["web"][0]) as (web, workspace), contextlib.AsyncExitStack() as stack:
        root = (await web.get(f"{said['web'][0]}/.well-known/ca.pem")).content
        credentials = grpc.ssl_channel_credentials(root)
        address = said["proxy-agents"][0].removeprefix("https://")
        apart = [("grpc.use_local_subchannel_pool", 1)]
        stubs = [
            agent_pb2_grpc.AgentServiceStub(
                await stack.enter_async_context(grpc.aio.secure_channel(address, credentials, apart))
            )
            for _ in range(CHANNELS)
        ]
        tokens = f"/workspaces/{workspace}/agents/tokens"
        agents = [
            Agent(stubs[number % CHANNELS], (await _post(web, tokens, {"name": f"web-{number}"}))["token"])
            for number in range(count)
        ]
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(agent.open() for agent in agents[start : start + AT_ONCE]))
        async with asyncio.TaskGroup() as tasks:
            living = [tasks.create_task(agent.live()) for agent in agents]
            await _reached(agents, 1)
            for number in range(rounds):
                begun = time.perf_counter()
                await _change(web, workspace, number)
                await _reached(agents, 2 + number)
                took.append(time.perf_counter() - begun)
            in_waves = await _in_waves(web, workspace, said["web"][0], token, rounds)
            for task in living:
                task.cancel()
    return took, in_waves


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    count, rounds = (20, 1) if quick else (AGENTS, 3)
    with servers.load_core() as core, servers.scratch() as directory:
        data = directory / "data"
        with servers.fleetplane(data, core, settings(directory), domains="proxies") as server:
            said = json.loads(data.with_name("data.ready").read_text())["listeners"]
            used = server.cpu_seconds()
            took, in_waves = asyncio.run(_measure(said, count, rounds, operator_token(data)))
            busy, memory = server.cpu_seconds() - used, server.resident_bytes()
    best = min(took)
    return [
        Row(
            figure=f"One change to {count:,} NGINX agents, until the last is done",
            ours=f"{best:.2f} s",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_SECONDS:g} s",
            reached=best < MUST_SECONDS,
            note=f"rounds: {', '.join(f'{one:.2f} s' for one in took)}; {count / best:,.0f} agents/s; "
            f"the server used {busy:.1f} s of its core in all, and {memory / 1e6:.0f} MB",
        ),
        *(
            Row(
                figure=f"The same change as a rollout of {name}, until it is done",
                ours=f"{seconds:.2f} s",
                reference=f"{best:.2f} s without a rollout",
                ratio=best / seconds,
                must_reach="",
                reached=True,
                note=f"{len(WAVES[name])} waves, no soaks",
            )
            for name, seconds in in_waves.items()
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
