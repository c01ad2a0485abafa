"""Who may write about GPUs, and over whose words."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api
from support.shared.server_process import running_server

from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.server import WRITERS_PAGE
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

READY = gpu_pb2.Condition(type="Ready", status="True")
WRITES = {
    "RegisterGpu": provider_pb2.RegisterGpuRequest(name="gpu-2"),
    "UnregisterGpu": provider_pb2.UnregisterGpuRequest(name="gpu-1"),
    "UpdateGpuStatus": provider_pb2.UpdateGpuStatusRequest(name="gpu-1"),
    "UpdateGpuCondition": provider_pb2.UpdateGpuConditionRequest(name="gpu-1", condition=READY),
    "Heartbeat": provider_pb2.HeartbeatRequest(provider_id="thief"),
}


def test_the_tcp_address_is_for_reading_unless_the_owner_says_otherwise(tmp_path: Path) -> None:
    with running_server(tmp_path / "closed", "--only", "gpus") as server:
        tcp = server.address("device-api", "http://").removeprefix("http://")
        with grpc.insecure_channel(server.socket) as local, grpc.insecure_channel(tcp) as stranger:
            owner = provider_pb2_grpc.ProviderServiceStub(local)
            assert owner.RegisterGpu(provider_pb2.RegisterGpuRequest(name="gpu-1")).created
            stub = provider_pb2_grpc.ProviderServiceStub(stranger)
            for method, request in WRITES.items():
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(stub, method)(request)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
                told = f"{caught.value.trailing_metadata()} {caught.value.details()}"
                assert "tcp_writes" in told
                assert WRITERS_PAGE in told
            found = gpu_pb2_grpc.GpuServiceStub(stranger).ListGpus(gpu_pb2.ListGpusRequest())
            assert [gpu.name for gpu in found.gpu_list.items] == ["gpu-1"]
    with running_server(
        tmp_path / "open", "--only", "gpus", "--set", "listeners.device-api.tcp_writes=true"
    ) as server:
        tcp = server.address("device-api", "http://").removeprefix("http://")
        with grpc.insecure_channel(tcp) as channel:
            stub = provider_pb2_grpc.ProviderServiceStub(channel)
            assert stub.RegisterGpu(WRITES["RegisterGpu"]).created


def test_the_page_that_a_refused_writer_is_sent_to_exists() -> None:
    page, anchor = WRITERS_PAGE.split("#")
    text = (Path(__file__).parents[2] / page).read_text()
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


async def _denied(call: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(caught.value.details())


async def _remove(api: DeviceApi, name: str, provider: str = "") -> bool:
    request = provider_pb2.UnregisterGpuRequest(name=name, provider_id=provider)
    return bool((await api.provider.UnregisterGpu(request)).deleted)


async def test_a_provider_does_not_remove_another_providers_gpu(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-1", provider_id="nvml")
        await api.register("gpu-2")
        await api.set_condition("gpu-1", "DCGMHealth", "True", provider="dcgm")
        told = await _denied(_remove(api, "gpu-1", "dcgm"))
        assert "'nvml'" in told
        assert await _remove(api, "gpu-1", "nvml")
        assert await _remove(api, "gpu-2", "dcgm"), "nobody's GPU is anybody's"
        await api.register("gpu-1", provider_id="nvml")
        assert await _remove(api, "gpu-1"), "calls that name nobody work as ever"


async def test_a_provider_does_not_overwrite_what_another_said(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-1", provider_id="nvml")
        await api.set_condition("gpu-1", "Ready", "False", provider="nvml", reason="XidError")
        told = await _denied(api.set_condition("gpu-1", "Ready", "True", provider="dcgm"))
        assert "'Ready'" in told
        assert "'nvml'" in told
        status = gpu_pb2.GpuStatus(conditions=[READY])
        request = provider_pb2.UpdateGpuStatusRequest(name="gpu-1", status=status, provider_id="dcgm")
        await _denied(api.provider.UpdateGpuStatus(request))
        await api.set_condition("gpu-1", "DCGMHealth", "True", provider="dcgm")
        [ready, _] = (await api.get("gpu-1")).status.conditions
        assert (ready.status, ready.reason) == ("False", "XidError")

        await api.set_condition("gpu-1", "Ready", "True", provider="nvml")
        await api.set_condition("gpu-1", "Ready", "Unknown")  # as in the original
        await api.set_condition("gpu-1", "Ready", "True", provider="dcgm")


async def test_the_owner_may_let_providers_share(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(shared_writes=True)) as api:
        await api.register("gpu-1", provider_id="nvml")
        await api.set_condition("gpu-1", "Ready", "False", provider="nvml")
        await api.set_condition("gpu-1", "Ready", "True", provider="dcgm")
        assert await _remove(api, "gpu-1", "dcgm")


async def test_made_up_names_do_not_use_up_the_leases(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(max_providers=8)) as api:
        refused = 0
        for number in range(50):
            try:
                await api.heartbeat(f"made-up-{number}")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                refused += 1
        assert refused == 50 - 4
        for number in range(8):
            await api.register(f"gpu-{number}", provider_id=f"real-{number}")
            assert await api.heartbeat(f"real-{number}", [f"gpu-{number}"])
        await api.register("gpu-9", provider_id="real-9")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.heartbeat("real-9")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "those that report keep theirs"
