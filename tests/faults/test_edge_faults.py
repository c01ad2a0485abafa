"""Servers and daemons that are killed, and networks that do not do what they should, in mid-run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.edge import shipped_wire as wire
from support.edge.edge_daemon_rig import running
from support.edge.edge_site import Rest, Site, a_tenant, outcomes, restarting, until
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.cli_runner import COMMAND
from support.shared.free_ports import free_port
from support.shared.rough_network import Roughness, rough_network

DAEMONS = 200
ENROLLING = 25
"""At a time."""


class LightDaemon(ShippedDaemon):
    """One of many: says that it has run something, without running anything."""

    seconds = 0.1

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.ran: Counter[str] = Counter()

    async def _run(self, call: wire.Invoke, outbound: asyncio.Queue[bytes]) -> bytes:
        self.ran[call.command_id] += 1
        await asyncio.sleep(random.uniform(0, self.seconds))
        return wire.result(ok=True, stdout=b"done\n")


async def crowd(here: Site, rest: Rest, number: int) -> list[LightDaemon]:
    room = asyncio.Semaphore(ENROLLING)

    async def one() -> LightDaemon:
        async with room:
            made = await LightDaemon.enroll(
                here.edge, await rest.invite(), heartbeat_seconds=5, wait_scale=0.01
            )
            assert isinstance(made, LightDaemon)
            return made

    return list(await asyncio.gather(*(one() for _ in range(number))))


async def all_connected(rest: Rest, number: int) -> None:
    async def there() -> bool:
        found = await rest.post("/fleet/preview", {"target": "all"})
        return len(found["resolved"]) == number

    await until(there)


async def test_a_run_over_200_daemons_accounts_for_each_after_the_server_was_killed(tmp_path: Path) -> None:
    tenant, data = a_tenant(), tmp_path / "data"
    # Daemons dial it all the while: nobody else may get the port between the two servers.
    fixed = ("--set", f"listeners.edge.addresses=127.0.0.1:{free_port()}")
    async with contextlib.AsyncExitStack() as stack:
        async with restarting(data, *fixed) as here:
            token = here.token(tenant=tenant)
            async with here.rest(tenant, token=token) as rest:
                daemons = await crowd(here, rest, DAEMONS)
                for daemon in daemons:
                    await stack.enter_async_context(daemon.running())
                await all_connected(rest, DAEMONS)
                run_id = await rest.start(
                    mode="parallel", max_concurrency=30, failure_policy="continue", deadline_secs=120
                )
                await until(lambda: sum(daemon.sent.count("result") for daemon in daemons) >= DAEMONS // 3)
                here.server.process.kill()
        async with restarting(data, *fixed) as here, here.rest(tenant, token=token) as rest:
            run = await rest.ended(run_id, seconds=150)
    assert run["targets_resolved"] == DAEMONS == sum(run["summary"].values())
    assert len({one["node_id"] for one in run["per_node"]}) == DAEMONS
    ran = {daemon.node_id: daemon.ran[run_id] for daemon in daemons}
    assert max(ran.values()) == 1, "nothing ran twice"
    found = {one["node_id"]: one["outcome"] for one in run["per_node"]}
    assert all(ran[node_id] == 1 for node_id, outcome in found.items() if outcome == "ok")
    # Only what was under way when the server died is in doubt, and is said to be so.
    assert run["summary"]["ok"] >= DAEMONS - 30
    assert run["summary"]["ok"] + run["summary"]["err"] == DAEMONS


async def test_a_daemon_killed_in_mid_command_fails_it_and_comes_back_to_work(tmp_path: Path) -> None:
    async with restarting(tmp_path / "data") as here, here.rest(a_tenant()) as rest:
        state = await here.ours(rest, tmp_path / "ours")
        (node,) = (await rest.get("/hosts"))["items"]
        daemon = [*COMMAND, "agent", "edge", "run", "--state-dir", str(state.root)]
        quiet = asyncio.subprocess.DEVNULL
        first = await asyncio.create_subprocess_exec(*daemon, stderr=quiet)
        await rest.connected(node["node_id"])
        run_id = await rest.start(script=f"echo $$ > {tmp_path}/pid; exec sleep 60", deadline_secs=90)
        pid = tmp_path / "pid"
        await until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        first.kill()
        await first.wait()
        (one,) = (await rest.ended(run_id, seconds=60))["per_node"]
        assert (one["outcome"], one["code"]) == ("err", "edge_disconnected")
        second = await asyncio.create_subprocess_exec(*daemon, stderr=quiet)
        try:
            await all_connected(rest, 1)
            assert (await rest.do())["summary"]["ok"] == 1
            assert outcomes(await rest.run(run_id)) == ["err"]  # what it says of it later changes nothing
        finally:
            second.terminate()
            await second.wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


async def test_a_rough_network_makes_runs_fail_and_never_run_twice_or_forever(tmp_path: Path) -> None:
    # Daemons in the field do whatever they are told twice, ours do not: only what ours get is repeated.
    async with rough_network() as network, rough_network() as own:
        endpoint = ("--set", f"edge.public_endpoint={own.address}")
        async with restarting(tmp_path / "data", *endpoint) as here, here.rest(a_tenant()) as rest:
            network.upstream = own.upstream = here.edge
            daemons = await crowd(here, rest, 8)
            state = await here.ours(rest, tmp_path / "ours")
            async with contextlib.AsyncExitStack() as stack:
                for daemon in daemons:
                    daemon.address = network.address
                    await stack.enter_async_context(daemon.running())
                await stack.enter_async_context(running(state))
                await all_connected(rest, 9)
                rough = Roughness(drop=0.06, stall=0.1, repeat=0.06)
                network.roughness, own.roughness = rough, replace(rough, repeat_down=0.3)
                runs = await _rough_runs(rest, tmp_path)
                network.roughness = own.roughness = Roughness()
                seen = network.done + own.done
                assert min(seen[fate] for fate in ("dropped", "stalled", "repeated")) > 0

                async def all_well() -> bool:  # what was spoilt before may break a stream a moment later
                    await all_connected(rest, 9)
                    return bool((await rest.do(mode="parallel"))["summary"]["ok"] == 9)

                await until(all_well)
            for number, run in enumerate(runs):
                assert sum(run["summary"].values()) == run["targets_resolved"]
                assert max(daemon.ran[run["fleet_command_id"]] for daemon in daemons) <= 1
                lines = tmp_path / f"run-{number}"
                # At its deadline it may have been stopped between opening the file and writing to it.
                assert not lines.exists() or lines.read_text() in ("", "x\n")
            assert sum(run["summary"]["ok"] for run in runs) > 0


async def _rough_runs(rest: Rest, folder: Path) -> list[dict[str, Any]]:
    started = []
    for number in range(12):
        answer = await rest.call(
            "POST",
            "/fleet/invoke",
            {
                "target": "all",
                "tool": "cmd.run",
                "mode": "parallel",
                "failure_policy": "continue",
                "deadline_secs": 3,
                "args": {"command": "/bin/sh", "args": ["-c", f"echo x >> {folder}/run-{number}"]},
            },
            headers={"accept": "application/json"},
        )
        assert answer.status_code in (200, 503), answer.text  # at times nobody can be reached
        if answer.status_code == 200:
            started.append(answer.json()["fleet_command_id"])
        await asyncio.sleep(0.1)
    return [await rest.ended(run_id) for run_id in started]
