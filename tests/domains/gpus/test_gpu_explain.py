"""Why a GPU is not healthy, and why its provider is not heard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from domains.gpus.device_api import DeviceApi, device_api

from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.kernel.errors import NotFound
from fleetplane.sim.clock import VirtualClock


def told(api: DeviceApi, kind: str, name: str) -> Sequence[tuple[str, str]]:
    explainer = api.domain.explainers[kind]
    scope = explainer.locate("", name)
    return [
        (one.code, one.subject)
        for found in explainer.explain(scope, name)
        for one in found.explanation.reasons
    ]


async def test_a_gpu_says_which_condition_is_in_the_way(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-0", provider_id="dcgm")
        assert told(api, "gpu", "gpu-0") == [("NO_CONDITIONS", "")]
        await api.set_condition("gpu-0", "Ready", "True", provider="dcgm")
        assert told(api, "gpu", "gpu-0") == []
        await api.set_condition("gpu-0", "Ecc", "False", provider="dcgm", message="row 5 is bad")
        assert told(api, "gpu", "gpu-0") == [("CONDITION", "condition/Ecc")]


async def test_a_silent_provider_is_told_with_its_gpus(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with device_api(tmp_path, policy=GpuPolicy(lease_seconds=30.0), clock=clock) as api:
        await api.register("gpu-0", provider_id="dcgm")
        await api.set_condition("gpu-0", "Ready", "True", provider="dcgm")
        assert told(api, "provider", "dcgm") == [("NO_LEASE", "")]
        await api.heartbeat("dcgm", ["gpu-0"])
        assert told(api, "provider", "dcgm") == []
        await clock.advance(31)

        assert told(api, "provider", "dcgm") == [("LEASE_EXPIRED", "")]
        assert ("LEASE_EXPIRED", "provider/dcgm") in told(api, "gpu", "gpu-0")


async def test_unknown_names_and_other_scopes_have_nothing(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        await api.register("gpu-0", provider_id="dcgm")
        for kind, within, name in (
            ("gpu", "", "gpu-1"),
            ("gpu", "tenant/other", "gpu-0"),
            ("gpu", "", "x" * 1000),
            ("provider", "", "nobody"),
            ("provider", "boards", "dcgm"),
        ):
            with pytest.raises(NotFound):
                api.domain.explainers[kind].locate(within, name)
