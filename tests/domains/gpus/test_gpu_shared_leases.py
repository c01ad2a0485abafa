"""Providers that several servers hear in part: one set of leases, and one judge of silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, VirtualServers, until, virtual_servers

from fleetplane.domains.gpus import leases
from fleetplane.domains.gpus.kinds import GPU, SCOPE
from fleetplane.domains.gpus.leases import PROVIDER_LEASE
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.shared_providers import CHANNEL, LEEWAY_SECONDS, SharedProviders
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.resources import Condition

LEASE_SECONDS = 30.0
TERM_SECONDS = LEASE_SECONDS + LEEWAY_SECONDS
POLICY = GpuPolicy(lease_seconds=LEASE_SECONDS)
KINDS = (GPU, PROVIDER_LEASE)


class Rig:
    """What the domain has of providers, on each of several servers."""

    def __init__(self, policy: GpuPolicy = POLICY) -> None:
        self._policy = policy
        self.parts: dict[str, tuple[Gpus, SharedProviders]] = {}
        self.servers: VirtualServers

    def _make(self, server: VirtualServer) -> SharedProviders:
        gpus = Gpus(server.store, self._policy)
        heard = LastSeen(server.store, server.clock, channel=CHANNEL)
        made = SharedProviders(server.store, gpus, self._policy, server.clock, heard)
        self.parts[server.name] = (gpus, made)
        return made

    async def here(self, server: VirtualServer) -> None:
        await self._make(server).run_here()

    async def active(self, server: VirtualServer) -> None:
        known = self.parts.get(server.name)  # if it stood by before
        made = known[1] if known is not None else self._make(server)
        made.take_over()
        await made.run_here()

    async def start(self, name: str) -> VirtualServer:
        server = await self.servers.start(name)
        await until(lambda: name in self.parts)
        return server

    async def heartbeat(self, name: str, provider: str = "nvml", *gpus: str) -> None:
        await self.parts[name][1].heartbeat(provider, frozenset(gpus), actor="test")

    async def report(self, name: str, gpu: str, provider: str = "nvml") -> None:
        gpus, providers = self.parts[name]
        providers.heard(provider)
        await gpus.register(gpu, uuid=None, report=None, provider=provider, actor="test")
        said = Condition(type="Ready", status="True", writer=provider)
        await gpus.set_condition(gpu, said, actor="test")

    def reads(self, server: VirtualServer, gpu: str = "gpu-0") -> str:
        found = server.store.get(GPU, SCOPE, gpu)
        assert found is not None
        return found.conditions[0].status

    def alive(self, name: str) -> dict[str, bool]:
        return {lease.provider: alive for lease, alive in self.parts[name][1].leases()}


def play(scene: Callable[[Rig], Awaitable[None]], policy: GpuPolicy = POLICY) -> None:
    async def run() -> None:
        rig = Rig(policy)
        async with AsyncExitStack() as stack:
            rig.servers = await stack.enter_async_context(
                virtual_servers(KINDS, here=rig.here, active=rig.active)
            )
            await scene(rig)

    virtual_loop.run(run())


def test_heartbeats_that_alternate_between_servers_keep_a_lease() -> None:
    async def scene(rig: Rig) -> None:
        a, b, c = [await rig.start(name) for name in "abc"]
        await rig.report("b", "gpu-0")
        await rig.heartbeat("b")
        before = b.store.kind_revision(GPU)
        for turn in range(60):
            await asyncio.sleep(10)
            await rig.heartbeat("bc"[turn % 2])  # the judge itself never hears it
        assert {rig.reads(one) for one in (a, b, c)} == {"True"}
        assert b.store.kind_revision(GPU) == before
        assert rig.alive("a") == rig.alive("b") == rig.alive("c") == {"nvml": True}

    play(scene)


def test_nothing_stays_of_names_that_somebody_makes_up() -> None:
    few = GpuPolicy(lease_seconds=LEASE_SECONDS, max_providers=4)

    async def scene(rig: Rig) -> None:
        a, _b, _c = [await rig.start(name) for name in "abc"]
        await rig.report("b", "gpu-0")
        for turn in range(8):
            for one in range(2):
                await rig.heartbeat("b", f"made-up-{turn}-{one}")
            await until(lambda: not any(rig.alive("b").values()))
        engine = a.store.shared_engine
        assert engine is not None
        left: set[str] = set()
        for _ in range(60):
            left = {name for name in await engine.heard(CHANNEL) if name.startswith("made-up")}
            if left == set(rig.alive("b")):
                break
            await asyncio.sleep(1)
        assert left == set(rig.alive("b"))

    play(scene, few)


def test_any_call_renews_a_lease_that_another_server_granted() -> None:
    async def scene(rig: Rig) -> None:
        a, _b, _c = [await rig.start(name) for name in "abc"]
        await rig.report("b", "gpu-0")
        await rig.heartbeat("b")
        await until(lambda: rig.alive("c"))
        for _ in range(12):
            await asyncio.sleep(10)
            await rig.report("c", "gpu-0")
        assert rig.reads(a) == "True"
        assert rig.alive("a") == {"nvml": True}

    play(scene)


def test_silence_is_told_once_for_all_servers_and_undone_on_any_of_them() -> None:
    async def scene(rig: Rig) -> None:
        servers = [await rig.start(name) for name in "abc"]
        await rig.report("b", "gpu-0")
        await rig.report("b", "gpu-1")
        await rig.heartbeat("b")
        await asyncio.sleep(TERM_SECONDS - 1)  # of the judge, too
        assert rig.reads(servers[0]) == "True"
        await until(lambda: {rig.reads(one) for one in servers} == {"Unknown"})
        assert rig.alive("b") == {"nvml": False}
        expired = servers[1].store.get(PROVIDER_LEASE, SCOPE, "nvml")
        assert expired is not None
        assert leases.status_of(expired).expiries == 1
        await rig.heartbeat("c", "nvml", "gpu-0")  # a server that never heard of it before
        await until(lambda: {rig.reads(one) for one in servers} == {"True"})
        assert rig.reads(servers[2], "gpu-1") == "Unknown", "only on those that it still names"
        assert rig.alive("c") == {"nvml": True}
        await rig.report("b", "gpu-1")
        await until(lambda: rig.reads(servers[0], "gpu-1") == "True")

    play(scene)


def test_who_never_sent_a_heartbeat_is_never_silent() -> None:
    async def scene(rig: Rig) -> None:
        a, _b = await rig.start("a"), await rig.start("b")
        await rig.report("b", "gpu-0", "original")
        await asyncio.sleep(10 * TERM_SECONDS)
        assert rig.reads(a) == "True"
        assert rig.alive("a") == {}

    play(scene)


def test_nobody_is_silent_in_the_first_term_after_a_takeover() -> None:
    async def scene(rig: Rig) -> None:
        a, b, c = [await rig.start(name) for name in "abc"]
        await rig.report("a", "gpu-0")
        await rig.heartbeat("a")
        await asyncio.sleep(LEASE_SECONDS)  # nearly silent
        a.kill()
        await until(lambda: b.is_active or c.is_active)
        active = b if b.is_active else c
        assert active.store.succeeds
        taken = asyncio.get_running_loop().time()
        await until(lambda: rig.reads(active) == "Unknown")
        assert asyncio.get_running_loop().time() - taken >= TERM_SECONDS

    play(scene)


def test_a_silence_that_was_declared_while_another_server_hears_the_provider_is_undone_at_once() -> None:
    async def scene(rig: Rig) -> None:
        a, b = await rig.start("a"), await rig.start("b")
        await rig.report("b", "gpu-0")
        await rig.heartbeat("b")
        await until(lambda: rig.alive("a"))
        lease = a.store.get(PROVIDER_LEASE, SCOPE, "nvml")
        assert lease is not None
        await rig.parts["a"][0].silence("nvml", message="not heard", lease=lease.revision)
        await until(lambda: rig.alive("a") == {"nvml": True} and rig.reads(a) == "True")
        # What was judged has been written since: nothing happens.
        assert await rig.parts["a"][0].silence("nvml", message="not heard", lease=lease.revision) == 0
        assert rig.reads(a) == rig.reads(b) == "True"

    play(scene)


def test_leases_are_limited_among_all_servers_and_names_that_say_nothing_give_way() -> None:
    policy = GpuPolicy(lease_seconds=LEASE_SECONDS, max_providers=4)

    async def beat(rig: Rig, name: str, provider: str) -> bool:
        try:
            await rig.heartbeat(name, provider)
        except ResourceExhausted:
            return False
        return True

    async def scene(rig: Rig) -> None:
        a, _b, _c = [await rig.start(name) for name in "abc"]
        done = await asyncio.gather(*(beat(rig, "abc"[n % 3], f"mute-{n}") for n in range(12)))
        assert sum(done) == 2
        for number, name in enumerate("abca"):
            await rig.report(name, f"gpu-{number}", f"says-{number}")
            await rig.heartbeat(name, f"says-{number}")
        await rig.report("b", "gpu-9", "late")
        with pytest.raises(ResourceExhausted):
            await rig.heartbeat("b", "late")
        await until(lambda: set(rig.alive("a")) == {f"says-{n}" for n in range(4)})
        assert a.store.count(PROVIDER_LEASE, SCOPE) == 4

    play(scene, policy)
