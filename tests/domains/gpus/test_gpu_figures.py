"""Figures of GPUs: what providers tell beside the device API, and what the server sees by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api

from fleetplane.domains.gpus import releases
from fleetplane.domains.gpus.kinds import GPU, SCOPE
from fleetplane.domains.gpus.resources import PROVIDER, ProviderSpecView
from fleetplane.fleet import figures_service
from fleetplane.fleet.resources.common import made_up
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2_grpc


async def report(api: DeviceApi, **objects: Any) -> pb.ReportFiguresResponse:
    said = [pb.ObjectFigures(object=name, values=values) for name, values in objects.items()]
    answer: pb.ReportFiguresResponse = await figures_pb2_grpc.AgentFiguresStub(api.channel).Report(
        pb.ReportFiguresRequest(name="nvml-provider", objects=said)
    )
    return answer


def latest(api: DeviceApi) -> dict[str, Any]:
    return {name: one.values for name, one in api.domain.figures.latest(api.store.list(GPU)).items()}


async def test_what_a_provider_measures_is_kept_with_how_the_gpu_is(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("a")
        await api.register("b")
        await api.set_condition("a", "Ready", "False", provider="p")
        answer = await report(
            api,
            a={"gpuPercent": 50.0, "temperatureCelsius": 71.5, "powerWatts": -1.0, "fanPercent": 10.0},
            b={"memoryPercent": math.nan},
            nobody={"gpuPercent": 1.0},
        )
        assert answer.next_seconds == figures_service.NEXT_SECONDS
        assert latest(api) == {
            "a": {"gpuPercent": 50.0, "temperatureCelsius": 71.5, releases.WRONG: 1.0},
            "b": {releases.WRONG: 0.0},
        }
        assert api.domain.figures.refused == 3


async def test_the_server_notes_how_gpus_are_that_nobody_measures(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        for name, status in (("a", "True"), ("b", "False"), ("c", "Unknown"), ("d", "True")):
            await api.register(name)
            await api.set_condition(name, "Ready", status, provider="p")
        await report(api, d={"gpuPercent": 5.0})
        domain = api.domain
        releases.look(domain.stored_gpus(), domain.figures, domain.provider_figures)
        assert latest(api) == {
            "a": {releases.WRONG: 0.0},
            "b": {releases.WRONG: 1.0},
            "c": {releases.WRONG: 1.0},
            "d": {"gpuPercent": 5.0, releases.WRONG: 0.0},
        }, "what the provider told is not covered up"
        provider = made_up(PROVIDER, "p", spec=ProviderSpecView(), scope=SCOPE)
        [counted] = (await releases.provider_figures(domain, [provider])).values()
        assert counted.values == {"healthyGpus": 2.0, "unhealthyGpus": 1.0, "unknownGpus": 1.0}


@pytest.mark.parametrize(
    ("objects", "field"),
    [
        ([pb.ObjectFigures(object=f"g{number}") for number in range(1025)], "objects"),
        ([pb.ObjectFigures(object="a", values={f"v{n}": 1.0 for n in range(65)})], "objects[0].values"),
    ],
)
async def test_a_report_without_measure_is_refused(
    tmp_path: Path, objects: list[pb.ObjectFigures], field: str
) -> None:
    async with device_api(tmp_path) as api:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await figures_pb2_grpc.AgentFiguresStub(api.channel).Report(
                pb.ReportFiguresRequest(objects=objects)
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (refused.value.details() or "")
        assert latest(api) == {}
