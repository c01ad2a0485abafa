"""The provider from driver to device API, over both libraries and a real gRPC connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.gpus.device_api_double import DeviceApiDouble
from support.gpus.nvml_stub import A100, FakeDriver, NvmlRig, Rig, SimulatedRig, uuid

from fleetplane.domains.gpus.agent.health import GpuUuid, HealthVerdict
from fleetplane.domains.gpus.agent.library import DriverEventKind, DriverUnavailable, Library
from fleetplane.domains.gpus.agent.provider import GpuProvider, ProviderPolicy
from fleetplane.domains.gpus.agent.session import DeviceLink
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.kernel.clock import Backoff, SystemClock

FAST = Backoff(first_seconds=0.02, ceiling_seconds=0.2)


class RecordingLog:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    warning = info

    def of(self, name: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.events if event == name]


class Running:
    def __init__(self, library: Library, device_api: DeviceApiDouble, policy: ProviderPolicy) -> None:
        self.log = RecordingLog()
        self.provider = GpuProvider(
            library=library,
            connect=lambda: DeviceLink(device_api.address, "nvml-provider"),
            policy=policy,
            clock=SystemClock(),
            log=self.log,
        )


@asynccontextmanager
async def running(
    library: Library,
    device_api: DeviceApiDouble,
    *,
    heartbeat_seconds: float = 0.05,
    ignored_xids: frozenset[int] = frozenset({13}),
    health_check: bool = True,
    lower_case_names: bool = False,
) -> AsyncIterator[Running]:
    policy = ProviderPolicy(
        heartbeat_seconds=heartbeat_seconds,
        ignored_xids=ignored_xids,
        health_check=health_check,
        lower_case_names=lower_case_names,
        backoff=FAST,
    )
    made = Running(library, device_api, policy)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(made.provider.run())
        yield made
        task.cancel()


async def until(met: Callable[[], object], *, within_seconds: float = 60.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not met():  # the other side is a thread, it sets no event of this loop
            await asyncio.sleep(0.01)


def shows(device_api: DeviceApiDouble, name: str, status: str, reason: str) -> Callable[[], bool]:
    def met() -> bool:
        condition = device_api.condition(name)
        return condition is not None and (condition.status, condition.reason) == (status, reason)

    return met


async def test_every_gpu_is_registered_ready_under_its_uuid(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        for name in rig.uuids:
            await until(shows(device_api, name, "True", "Initialized"))
            assert device_api.gpus[name].spec.uuid == name
    assert all(call.provider_id == "nvml-provider" for call in device_api.calls_of("RegisterGpu"))
    assert device_api.calls_of("UpdateGpuCondition") == []  # registered with its first verdict


async def test_the_message_names_product_and_size(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(NvmlRig(fake_driver).library, device_api):
        await until(lambda: device_api.condition(uuid(0)))
    condition = device_api.condition(uuid(0))
    assert condition is not None
    assert condition.message == f"GPU enumerated via NVML: {A100} (40.0 GB)"


async def test_names_can_be_lower_case(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api, lower_case_names=True):
        await until(lambda: len(device_api.gpus) == 2)
    assert set(device_api.gpus) == {name.lower() for name in rig.uuids}


async def test_a_critical_xid_makes_its_gpu_unready_and_no_other(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 2)
        rig.xid(1, 79)
        await until(shows(device_api, rig.uuids[1], "False", "XidError"))
    condition = device_api.condition(rig.uuids[1])
    assert condition is not None
    assert condition.message == "Critical XID error 79 (GPU has fallen off the bus) detected"
    actions = [device_api.gpus[name].status.recommended_action for name in rig.uuids]
    assert actions == ["", "RESTART_BM"]
    assert shows(device_api, rig.uuids[0], "True", "Initialized")()


async def test_ignored_xids_and_ecc_events_are_only_logged(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(device_api.gpus) == 2)
        rig.xid(0, 13)
        rig.ecc(0)
        rig.xid(1, 999)  # the last one shows that the first two were dealt with
        await until(shows(device_api, rig.uuids[1], "False", "XidError"))
        assert it.log.of("gpu_xid")[0]["severity"] == "ignored"
        assert it.log.of("gpu_event")[0]["kind"] == "DOUBLE_BIT_ECC"
    assert shows(device_api, rig.uuids[0], "True", "Initialized")()


async def test_without_health_check_events_are_not_waited_for(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(NvmlRig(fake_driver).library, device_api, health_check=False):
        await until(lambda: len(device_api.gpus) == 2)
    assert "create" not in fake_driver.calls
    assert fake_driver.calls == ["init", "shutdown"]


async def test_a_lost_gpu_is_marked_and_foreign_ones_are_left_alone(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    device_api.put("foreign", gpu_pb2.Condition(type="NVMLReady", status="True", reason="Theirs"))
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 3)
        rig.lose(1)
        await until(shows(device_api, rig.uuids[1], "False", "GPULost"))
    assert shows(device_api, rig.uuids[0], "True", "Initialized")()
    assert shows(device_api, "foreign", "True", "Theirs")()


async def test_conditions_of_other_providers_survive_ours(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    device_api.put(rig.uuids[0], gpu_pb2.Condition(type="DCGMHealth", status="True", reason="Fine"))
    async with running(rig.library, device_api):
        await until(shows(device_api, rig.uuids[0], "True", "Initialized"))
        rig.xid(0, 48)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
    kept = device_api.condition(rig.uuids[0], "DCGMHealth")
    assert kept is not None
    assert kept.reason == "Fine"


async def test_heartbeats_name_the_gpus_and_keep_coming(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.calls_of("Heartbeat")) >= 3)
    beat = device_api.calls_of("Heartbeat")[-1]
    assert beat.provider_id == "nvml-provider"
    assert sorted(beat.gpu_names) == sorted(rig.uuids)


async def test_a_lease_is_held_from_the_first_report_on_however_many_are_to_come(
    rig: Rig, device_api: DeviceApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider without a lease is never missed, and what it said would be believed for ever."""
    device_api.start()
    may_go_on, register = asyncio.Event(), DeviceLink.register

    async def held_up(link: DeviceLink, name: str, *more: Any, **fields: Any) -> bool:
        if name != rig.uuids[0]:
            await may_go_on.wait()
        return await register(link, name, *more, **fields)

    monkeypatch.setattr(DeviceLink, "register", held_up)
    async with running(rig.library, device_api):
        await until(lambda: device_api.calls_of("Heartbeat"))
        assert list(device_api.calls_of("Heartbeat")[0].gpu_names) == [rig.uuids[0]]
        may_go_on.set()
        await until(lambda: sorted(device_api.calls_of("Heartbeat")[-1].gpu_names) == sorted(rig.uuids))


async def test_bad_news_from_a_time_without_connection_comes_before_the_first_heartbeat(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: device_api.calls_of("Heartbeat"))
        await asyncio.to_thread(device_api.stop)
        rig.xid(0, 79)
        await until(lambda: it.log.of("gpu_xid"))
        device_api.calls.clear()
        device_api.start()
        await until(lambda: device_api.calls_of("Heartbeat"))
    # A heartbeat lets the server believe again what we had said: that the GPU is ready.
    order = [method for method, _ in device_api.calls]
    first = device_api.calls_of("UpdateGpuCondition")[0]
    assert (first.name, first.condition.status) == (rig.uuids[0], "False")
    assert order.index("UpdateGpuCondition") < order.index("Heartbeat")


async def test_a_gpu_that_was_not_reported_is_not_vouched_for(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.put(rig.uuids[0])
    device_api.refusals["RegisterGpu"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(it.log.of("gpu_refused")) >= 3)
        assert device_api.calls_of("Heartbeat") == []


async def test_a_server_without_leases_is_served_all_the_same(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.has_leases = False
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(device_api.calls_of("Heartbeat")) >= 3)
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        assert len(it.log.of("heartbeat_refused")) == 1
        assert it.log.of("device_api_lost") == []


async def test_the_provider_may_be_started_before_the_server(rig: Rig, device_api: DeviceApiDouble) -> None:
    async with running(rig.library, device_api) as it:
        await until(lambda: len(it.log.of("device_api_lost")) >= 2)
        rig.xid(0, 79)
        await until(lambda: it.log.of("gpu_xid"))
        device_api.start()
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        await until(shows(device_api, rig.uuids[1], "True", "Initialized"))


async def test_a_server_that_forgot_everything_is_told_the_present_truth(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(rig.library, device_api, heartbeat_seconds=60):
        await until(lambda: len(device_api.gpus) == 2)
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        await asyncio.to_thread(device_api.stop)
        device_api.forget()
        device_api.start()
        # No beat is due for a minute: the lost connection alone must bring the provider back.
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        await until(shows(device_api, rig.uuids[1], "True", "Initialized"))


async def test_a_reconnect_does_not_let_a_gpu_recover(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 2)
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        looked = len(device_api.calls_of("GetGpu"))
        await asyncio.to_thread(device_api.stop)
        device_api.start()
        await until(lambda: len(device_api.calls_of("GetGpu")) >= looked + 2)
        assert shows(device_api, rig.uuids[0], "False", "XidError")()


async def test_what_the_server_holds_already_is_not_reported_again(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(it.log.of("device_api_joined")) == 1)
        version = device_api.version
        for joined in (2, 3, 4):
            it.provider.enumerate_again()
            await until(lambda: len(it.log.of("device_api_joined")) >= joined)  # noqa: B023
        beats = len(device_api.calls_of("Heartbeat"))
        await until(lambda: len(device_api.calls_of("Heartbeat")) > beats)
        assert device_api.version == version
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))


async def test_a_gpu_that_someone_removed_is_registered_again_when_it_has_news(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 2)
        device_api.remove(rig.uuids[0])
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))


async def test_a_refusal_of_one_call_is_retried_until_it_succeeds(
    rig: Rig, device_api: DeviceApiDouble
) -> None:
    device_api.refusals["RegisterGpu"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(it.log.of("gpu_refused")) >= 3)
        assert it.log.of("device_api_lost") == []
        del device_api.refusals["RegisterGpu"]
        await until(lambda: len(device_api.gpus) == 2)


async def test_a_restarted_provider_lets_a_sound_gpu_recover(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    condemned = gpu_pb2.Condition(type="NVMLReady", status="False", reason="XidError", message="79")
    for name in rig.uuids:
        device_api.put(name, condemned)
    rig.retire_page(1)
    async with running(rig.library, device_api):
        await until(shows(device_api, rig.uuids[0], "True", "Recovered"))
        await until(lambda: len(device_api.calls_of("UpdateGpuCondition")) >= 2)
    assert shows(device_api, rig.uuids[1], "False", "XidError")()


async def test_enumerating_again_lets_a_sound_gpu_recover(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: len(device_api.gpus) == 2)
        rig.xid(0, 79)
        await until(shows(device_api, rig.uuids[0], "False", "XidError"))
        assert device_api.gpus[rig.uuids[0]].status.recommended_action == "RESTART_BM"
        it.provider.enumerate_again()
        await until(shows(device_api, rig.uuids[0], "True", "Recovered"))
        assert device_api.gpus[rig.uuids[0]].status.recommended_action == ""


async def test_a_vanished_gpu_is_unregistered_if_we_registered_it(device_api: DeviceApiDouble) -> None:
    rig = SimulatedRig()
    device_api.start()
    device_api.put(rig.uuids[1])
    async with running(rig.library, device_api) as it:
        await until(shows(device_api, rig.uuids[0], "True", "Initialized"))
        await until(shows(device_api, rig.uuids[1], "True", "Initialized"))
        for name in rig.uuids:
            rig.simulated.remove(name)
        it.provider.enumerate_again()
        await until(lambda: rig.uuids[0] not in device_api.gpus)
        await until(shows(device_api, rig.uuids[1], "False", "GPULost"))
    assert [call.name for call in device_api.calls_of("UnregisterGpu")] == [rig.uuids[0]]


async def test_a_gpu_that_is_enumerated_again_while_it_is_registered_is_still_ours_to_remove(
    device_api: DeviceApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, created, go = SimulatedRig(), list[str](), asyncio.Event()
    register = DeviceLink.register

    async def held(link: DeviceLink, name: str, gpu: GpuUuid, verdict: HealthVerdict, **fields: Any) -> bool:
        answer = await register(link, name, gpu, verdict, **fields)
        created.append(name)
        await go.wait()  # the server has it, the answer is on its way
        return answer

    monkeypatch.setattr(DeviceLink, "register", held)
    device_api.start()
    async with running(rig.library, device_api) as it:
        await until(lambda: created)
        for name in rig.uuids:
            rig.simulated.remove(name)
        it.provider.enumerate_again()
        for _ in range(20):
            await asyncio.sleep(0)  # whoever registers is cancelled
        go.set()
        await until(lambda: created[0] not in device_api.gpus or device_api.calls_of("UpdateGpuCondition"))
    assert [call.name for call in device_api.calls_of("UnregisterGpu")] == created[:1]


async def test_no_gpus_is_no_error_and_needs_no_event_thread(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    fake_driver.remove_last()
    fake_driver.remove_last()
    device_api.start()
    async with running(NvmlRig(fake_driver).library, device_api) as it:
        await until(lambda: it.log.of("device_api_joined"))
    assert device_api.gpus == {}
    assert "create" not in fake_driver.calls
    assert device_api.calls_of("Heartbeat") == []  # naming none would vouch for all


async def test_stopping_is_prompt_frees_the_driver_and_leaves_the_gpus_registered(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    device_api.start()
    async with running(NvmlRig(fake_driver).library, device_api):
        await until(lambda: len(device_api.gpus) == 2)
    assert fake_driver.calls == ["init", "create", "free", "shutdown"]
    assert len(device_api.gpus) == 2


async def test_a_missing_driver_ends_the_provider_with_words(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    fake_driver.fail_init(9)
    rig = NvmlRig(fake_driver)
    with pytest.raises(DriverUnavailable, match="not loaded"):
        await Running(rig.library, device_api, ProviderPolicy()).provider.run()


async def test_a_storm_of_events_ends_in_the_last_truth(rig: Rig, device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 2)
        for number in range(150, 350):
            rig.xid(0, number)

        def last_is_told() -> bool:
            condition = device_api.condition(rig.uuids[0])
            return condition is not None and "349" in condition.message

        await until(last_is_told)


async def test_mig_devices_are_gpus_of_their_own_that_name_their_parent(
    fake_driver: FakeDriver, device_api: DeviceApiDouble
) -> None:
    rig = NvmlRig(fake_driver)
    whole, other = rig.uuids
    fake_driver.divide((0, 1, "MIG-1"), (0, 2, "MIG-2"))
    device_api.start()
    async with running(rig.library, device_api):
        await until(lambda: len(device_api.gpus) == 4)
        parents = {name: gpu.spec.parent for name, gpu in device_api.gpus.items()}
        assert parents == {whole: "", other: "", "MIG-1": whole, "MIG-2": whole}
        condition = device_api.condition("MIG-1")
        assert condition is not None
        assert condition.message.endswith(f"MIG 3g.20gb (20.0 GB), part of {whole}")

        fake_driver.event(0, DriverEventKind.XID, 94, instance=2)
        await until(shows(device_api, "MIG-2", "False", "XidError"))
        assert shows(device_api, "MIG-1", "True", "Initialized")()
        assert shows(device_api, whole, "True", "Initialized")()
        fake_driver.event(0, DriverEventKind.XID, 95)
        await until(shows(device_api, "MIG-1", "False", "XidError"))
        await until(shows(device_api, whole, "False", "XidError"))
        assert shows(device_api, other, "True", "Initialized")()

        fake_driver.divide((0, 1, "MIG-1"))
        fake_driver.event(0, DriverEventKind.MIG_CONFIG)
        await until(lambda: "MIG-2" not in device_api.gpus)
