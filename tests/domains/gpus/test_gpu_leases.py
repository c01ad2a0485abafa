"""Providers that fall silent, come back, and outlive the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api, take
from msgspec.structs import replace

from fleetplane.domains.gpus.domain import OPERATOR_PROVIDER
from fleetplane.domains.gpus.kinds import GPU, SCOPE, GpuStatus
from fleetplane.domains.gpus.providers import RETRY_SECONDS, Providers
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Draft
from fleetplane.sim.clock import VirtualClock

LEASE = GpuPolicy(lease_seconds=30)
KEY = GPU.key(SCOPE, "gpu-1")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def api(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[DeviceApi]:
    async with device_api(tmp_path, policy=LEASE, clock=clock) as running:
        yield running


async def conditions(api: DeviceApi, name: str = "gpu-1") -> list[tuple[str, str, str]]:
    return [(c.type, c.status, c.reason) for c in (await api.get(name)).status.conditions]


async def until_reads(api: DeviceApi, expected: list[tuple[str, str, str]], name: str = "gpu-1") -> None:
    async with asyncio.timeout(60):
        while await conditions(api, name) != expected:
            await asyncio.sleep(0.01)


async def two_providers(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "NVMLReady", "True", provider="nvml", reason="Initialized")
    await api.set_condition("gpu-1", "DCGMHealth", "True", provider="dcgm")
    assert await api.heartbeat("nvml", ["gpu-1"])


SILENT = [("NVMLReady", "Unknown", "ProviderSilent"), ("DCGMHealth", "True", "")]
SPEAKING = [("NVMLReady", "True", "Initialized"), ("DCGMHealth", "True", "")]


async def test_a_silent_provider_turns_the_conditions_it_wrote_to_unknown(
    api: DeviceApi, clock: VirtualClock
) -> None:
    await two_providers(api)
    await clock.advance(29.9)
    assert await conditions(api) == SPEAKING

    await clock.advance(0.2)
    await until_reads(api, SILENT)


async def test_a_heartbeat_brings_back_what_the_provider_had_said(
    api: DeviceApi, clock: VirtualClock
) -> None:
    await two_providers(api)
    await clock.advance(31)
    await until_reads(api, SILENT)

    assert await api.heartbeat("nvml", ["gpu-1"])

    assert await conditions(api) == SPEAKING


async def test_heartbeats_keep_the_lease(api: DeviceApi, clock: VirtualClock) -> None:
    await two_providers(api)
    version = (await api.get("gpu-1")).resource_version
    for _ in range(12):
        await clock.advance(10)
        assert await api.heartbeat("nvml", ["gpu-1"])

    assert (await api.get("gpu-1")).resource_version == version


async def test_any_call_that_names_the_provider_renews_its_lease(api: DeviceApi, clock: VirtualClock) -> None:
    await two_providers(api)
    await clock.advance(20)
    await api.set_condition("gpu-1", "NVMLReady", "True", provider="nvml", reason="Initialized")
    await clock.advance(20)

    assert await conditions(api) == SPEAKING


async def test_a_provider_that_never_sent_a_heartbeat_is_never_silent(
    api: DeviceApi, clock: VirtualClock
) -> None:
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "Ready", "True", provider="original")
    await clock.advance(86_400)

    assert await conditions(api) == [("Ready", "True", "")]


async def test_a_returning_provider_is_restored_only_on_the_gpus_it_still_names(
    api: DeviceApi, clock: VirtualClock
) -> None:
    for name in ("gpu-1", "gpu-2"):
        await api.register(name)
        await api.set_condition(name, "NVMLReady", "True", provider="nvml")
    await api.heartbeat("nvml", ["gpu-1", "gpu-2"])
    await clock.advance(31)
    for name in ("gpu-1", "gpu-2"):
        await until_reads(api, [("NVMLReady", "Unknown", "ProviderSilent")], name)

    await api.heartbeat("nvml", ["gpu-2"])

    assert await conditions(api, "gpu-1") == [("NVMLReady", "Unknown", "ProviderSilent")]
    assert await conditions(api, "gpu-2") == [("NVMLReady", "True", "")]


async def test_a_provider_that_returns_with_bad_news_never_reads_healthy_in_between(
    api: DeviceApi, clock: VirtualClock
) -> None:
    await two_providers(api)
    await clock.advance(31)
    await until_reads(api, SILENT)
    stream = api.watch()
    await take(stream, 1)

    await api.set_condition("gpu-1", "NVMLReady", "False", provider="nvml", reason="XidError")

    [event] = await take(stream, 1)
    assert [c.status for c in event.object.status.conditions] == ["False", "True"]


async def test_silence_is_one_change_for_all_gpus_of_the_provider(
    api: DeviceApi, clock: VirtualClock
) -> None:
    for n in range(5):
        await api.register(f"gpu-{n}")
        await api.set_condition(f"gpu-{n}", "NVMLReady", "True", provider="nvml")
    await api.heartbeat("nvml")
    version = int((await api.list()).metadata.resource_version)
    await clock.advance(31)
    await until_reads(api, [("NVMLReady", "Unknown", "ProviderSilent")], "gpu-4")

    versions = [gpu.resource_version for gpu in (await api.list()).items]
    assert sorted(versions) == list(range(version + 1, version + 6)), "one transaction, each with its own"
    last = [row async for row in api.store.audit()][-1]
    assert len(audit.read(last).changes) == 5


async def test_a_provider_heard_while_its_silence_is_being_written_is_not_left_silent(
    api: DeviceApi,
) -> None:
    await two_providers(api)
    gpus = Gpus(api.store, LEASE)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(gpus.silence("nvml", message="not heard"))
        await asyncio.sleep(0)  # the silence is accepted and on its way to the disk
        assert api.store.pending(GPU)
        await gpus.provider_heard("nvml", ["gpu-1"], actor="test")
    assert await conditions(api) == SPEAKING


class SlowDisk:
    """Writes each silence when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = 0, asyncio.Event()

    def has_spoken(self, _provider: str) -> bool:
        return True

    async def silence(self, _provider: str, *, message: str) -> None:
        assert message
        self.begun += 1
        await self.go.wait()

    async def provider_heard(self, _provider: str, _names: frozenset[str], *, actor: str) -> None:
        assert actor


async def test_a_silence_that_begins_while_an_earlier_one_is_being_written_is_written_too(
    clock: VirtualClock,
) -> None:
    disk = SlowDisk()
    providers = Providers(cast("Gpus", disk), LEASE, clock, StallDetector(clock))
    watching = asyncio.create_task(providers.watch_over())
    try:
        for _ in range(2):
            await providers.heartbeat("nvml", frozenset(), actor="test")
            await clock.advance(31)
        assert [lease.expiries for lease, _ in providers.leases()] == [2]
        assert disk.begun == 1
        disk.go.set()
        async with asyncio.timeout(60):
            while disk.begun < 2:
                await clock.advance(RETRY_SECONDS)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_leases_can_be_turned_off(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(lease_seconds=0)) as api:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.heartbeat("nvml")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_one_provider_too_many_is_refused_and_a_silent_one_makes_room(
    tmp_path: Path, clock: VirtualClock
) -> None:
    policy = GpuPolicy(lease_seconds=30, max_providers=2)
    async with device_api(tmp_path, policy=policy, clock=clock) as api:
        for name in "abc":
            await api.register(f"gpu-{name}", provider_id=name)
        await api.heartbeat("a")
        await clock.advance(20)
        await api.heartbeat("b")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.heartbeat("c")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await clock.advance(15)
        assert await api.heartbeat("c")


async def test_state_survives_a_restart_marked_stale_until_its_provider_is_heard(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=LEASE) as api:
        await two_providers(api)
        await api.register("gpu-2", spec=gpu_pb2.GpuSpec(uuid="GPU-2"))
        before = (await api.get("gpu-1")).resource_version

    async with device_api(tmp_path, policy=LEASE) as api:
        assert [gpu.name for gpu in (await api.list()).items] == ["gpu-1", "gpu-2"]
        assert (await api.get("gpu-2")).spec.uuid == "GPU-2"
        assert (await api.get("gpu-1")).resource_version > before
        assert await conditions(api) == [
            ("NVMLReady", "Unknown", "ProviderSilent"),
            ("DCGMHealth", "Unknown", "ProviderSilent"),
        ]

        await api.heartbeat("nvml", ["gpu-1"])
        assert await conditions(api) == [
            ("NVMLReady", "True", "Initialized"),
            ("DCGMHealth", "Unknown", "ProviderSilent"),
        ]

        await api.set_condition("gpu-1", "DCGMHealth", "True", provider="dcgm")
        assert await conditions(api) == SPEAKING


def _put_aside(draft: Draft) -> Condition:
    gpu = draft.get(GPU, SCOPE, "gpu-1")
    assert gpu is not None
    (said,) = gpu.conditions
    silent = replace(said, status="Unknown", reason="ProviderSilent")
    status = GpuStatus(silenced=(said,))
    draft.put(GPU, SCOPE, "gpu-1", spec=gpu.spec, status=status, conditions=(silent,), labels=gpu.labels)
    return silent


async def test_a_condition_that_an_operator_set_outlives_restarts(tmp_path: Path) -> None:
    by_hand = [("Ready", "False", "SetByOperator")]
    async with device_api(tmp_path, policy=LEASE) as api:
        await api.register("gpu-1")
        await api.set_condition("gpu-1", "Ready", "False", provider=OPERATOR_PROVIDER, reason="SetByOperator")
        said = (await api.store.transact(_put_aside, actor="test", action="test", touches=[KEY])).value
        assert said.reason == "ProviderSilent"  # as older releases left it
    async with device_api(tmp_path, policy=LEASE) as api:
        assert await conditions(api) == by_hand
    async with device_api(tmp_path, policy=LEASE) as api:
        assert await conditions(api) == by_hand


async def test_an_anonymous_write_restores_what_was_written_anonymously_on_that_gpu(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-1")
        for kind in ("A", "B"):
            await api.set_condition("gpu-1", kind, "True")

    async with device_api(tmp_path) as api:
        assert [status for _, status, _ in await conditions(api)] == ["Unknown", "Unknown"]
        await api.set_condition("gpu-1", "A", "False")
        assert [(kind, status) for kind, status, _ in await conditions(api)] == [
            ("A", "False"),
            ("B", "True"),
        ]


async def test_restarting_twice_forgets_nothing_that_was_put_aside(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=LEASE) as api:
        await two_providers(api)
    async with device_api(tmp_path, policy=LEASE):
        pass
    async with device_api(tmp_path, policy=LEASE) as api:
        await api.heartbeat("nvml")
        await api.heartbeat("dcgm")
        assert await conditions(api) == SPEAKING


async def test_a_watch_resumes_across_a_restart(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-1")
        version = (await api.list()).metadata.resource_version
        await api.register("gpu-2")

    async with device_api(tmp_path) as api:
        [event] = await take(api.watch(after=version), 1)
        assert (event.type, event.object.name) == ("ADDED", "gpu-2")
