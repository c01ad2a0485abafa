"""A provider that is set from the server, and what its node's owner keeps to itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from domains.gpus.agent.test_provider import FAST, RecordingLog, until
from support.gpus.device_api_double import DeviceApiDouble
from support.gpus.nvml_stub import SimulatedRig

from fleetplane.domains.gpus.agent.provider import GpuProvider, ProviderPolicy
from fleetplane.domains.gpus.agent.session import DeviceLink
from fleetplane.domains.gpus.agent.settings import EffectiveSettings, SettingsKeeper
from fleetplane.domains.gpus.xids import APPLICATION_XIDS
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.kernel.clock import SystemClock

OWN = EffectiveSettings(heartbeat_seconds=10.0, ignored_xids=APPLICATION_XIDS, enumerate_every_seconds=None)
LEASE_SECONDS = 30.0


class Kept:
    """A keeper, and what it put in force."""

    def __init__(
        self, folder: Path, *given: str, own: EffectiveSettings = OWN, provider_id: str = "nvml"
    ) -> None:
        self.log = RecordingLog()
        self.in_force: list[EffectiveSettings] = []
        self.keeper = SettingsKeeper(
            own,
            given=frozenset(given),
            folder=folder,
            provider_id=provider_id,
            apply=self.in_force.append,
            clock=SystemClock(),
            log=self.log,
        )
        self.keeper.load()

    async def take(self, digest: str, **fields: Any) -> pb.SyncSettingsRequest:
        sent = pb.ProviderSettings(digest=digest, **fields)
        await self.keeper.take(sent, lease_seconds=LEASE_SECONDS)
        return self.keeper.said()


async def test_what_is_taken_is_in_force_at_once_and_after_a_start_without_a_server(tmp_path: Path) -> None:
    first = Kept(tmp_path / "state")
    assert first.keeper.said() == pb.SyncSettingsRequest(provider_id="nvml")
    said = await first.take("one", heartbeat_seconds=5, ignored_xids=[62], enumerate_every_seconds=60)
    assert (said.applied, said.wanted, said.error) == ("one", "one", "")
    expected = EffectiveSettings(
        heartbeat_seconds=5.0, ignored_xids=APPLICATION_XIDS | {62}, enumerate_every_seconds=60.0
    )
    assert first.in_force == [expected]
    assert first.keeper.path.stat().st_mode & 0o777 == 0o600

    second = Kept(tmp_path / "state")
    assert second.in_force == [expected]
    assert second.keeper.said() == said
    assert not Kept(tmp_path / "state", provider_id="../nvml").in_force, "each provider has its own"
    assert (await second.take("none")).applied == "none"
    assert second.keeper.current == OWN, "what is not set is as it was started"

    for broken in (b"", b"{", b"\xff" * 100, b'{"digest": 1}', b"[" * 100_000):
        first.keeper.path.write_bytes(broken)
        assert not Kept(tmp_path / "state").in_force


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--heartbeat-seconds", "heartbeat_seconds", 5.0),
        ("--ignored-xids", "ignored_xids", [62]),
        ("--enumerate-every", "enumerate_every_seconds", 60.0),
    ],
)
async def test_what_the_owner_gave_counts_and_is_reported_as_a_refusal(
    tmp_path: Path, flag: str, field: str, value: Any
) -> None:
    owned = Kept(tmp_path, field)
    others = {"heartbeat_seconds": 4.0} if field != "heartbeat_seconds" else {"ignored_xids": [8]}
    said = await owned.take("one", **{field: value}, **others)
    assert (said.applied, said.wanted, said.failures) == ("", "one", 1)
    assert flag in said.error
    assert not owned.in_force, "a version is taken whole or not at all"
    assert (await owned.take("two", **others)).applied == "two"
    assert (await owned.take("one", **{field: value})).failures == 2

    await Kept(tmp_path).take("three", **{field: value})
    later = Kept(tmp_path, field)  # the owner gave it after the server's was taken
    assert not later.in_force
    assert flag in later.keeper.said().error


async def test_a_version_that_breaks_the_rules_is_refused_whoever_sent_it(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for fields, word in (
        ({"heartbeat_seconds": 10.1}, "heartbeatSeconds"),
        ({"heartbeat_seconds": float("inf")}, "heartbeatSeconds"),
        ({"enumerate_every_seconds": 0.001}, "enumerateEverySeconds"),
        ({"ignored_xids": [48]}, "ignoredXids[0]"),
    ):
        assert word in (await kept.take("bad", **fields)).error
    assert not kept.in_force
    (tmp_path / "file").write_text("")
    unkept = Kept(tmp_path / "file")
    assert "--state-dir" in (await unkept.take("one", heartbeat_seconds=5)).error
    assert not unkept.in_force, "what would not outlast a restart is not acknowledged"


@asynccontextmanager
async def provider(device_api: DeviceApiDouble, policy: ProviderPolicy) -> AsyncIterator[GpuProvider]:
    log = RecordingLog()
    made = GpuProvider(
        library=SimulatedRig().library,
        connect=lambda: DeviceLink(device_api.address, "nvml"),
        policy=policy,
        clock=SystemClock(),
        log=log,
        settings=Kept(Path("/nonexistent")).keeper.follow,  # the double has no such service
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(made.run())
        yield made
        task.cancel()


async def test_a_running_provider_beats_and_enumerates_as_it_is_set(device_api: DeviceApiDouble) -> None:
    device_api.start()
    async with provider(device_api, ProviderPolicy(heartbeat_seconds=0.05, backoff=FAST)) as running:
        await until(lambda: len(device_api.calls_of("Heartbeat")) > 2)
        running.set_to(heartbeat_seconds=0.01, ignored_xids=frozenset({79}), enumerate_every_seconds=0.05)
        # A new life begins with a connection of its own, on which GPUs are introduced anew.
        introduced = len(device_api.calls_of("GetGpu"))
        await until(lambda: len(device_api.calls_of("GetGpu")) > introduced)
        assert running.ledger.ignored_xids == {79}
