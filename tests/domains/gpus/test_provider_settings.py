"""Settings of providers: what may be set, who is told what, and what a rollout believes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api
from support.fleet.plans_rig import plans_rig
from support.fleet.started_domains import started_domains

from fleetplane.domains.gpus.provider_settings import rules
from fleetplane.domains.gpus.provider_settings.delivery import (
    AT,
    FORGET_SECONDS,
    NAME,
    PROVIDER_SETTINGS,
    RETURN_SECONDS,
    SETTINGS_APPLIED,
    SUBJECT,
    SettingsAppliedStatus,
)
from fleetplane.domains.gpus.provider_settings.rules import ProviderSettingsSpec
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.server import BLUEPRINT
from fleetplane.fleet.rollouts.holds import digest
from fleetplane.fleet.rollouts.records import ROLLOUT_POLICY, Period, PolicySpec
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2_grpc
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

LEASE_SECONDS = 30.0
NOTHING = digest(rules.encoded(None))


def version(**fields: Any) -> str:
    return digest(rules.encoded(ProviderSettingsSpec(**fields)))


# What may be set.


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("heartbeatSeconds", {"heartbeat_seconds": 0.05}),
        ("heartbeatSeconds", {"heartbeat_seconds": 10.1}),  # the lease would not outlast three of them
        ("heartbeatSeconds", {"heartbeat_seconds": float("nan")}),
        ("heartbeatSeconds", {"heartbeat_seconds": -1.0}),
        ("enumerateEverySeconds", {"enumerate_every_seconds": 9.0}),
        ("enumerateEverySeconds", {"enumerate_every_seconds": float("inf")}),
        ("ignoredXids", {"ignored_xids": tuple(range(200, 265))}),
        ("ignoredXids[0]", {"ignored_xids": (0,)}),
        ("ignoredXids[1]", {"ignored_xids": (62, 2**32)}),
        ("ignoredXids[0]", {"ignored_xids": (79,)}),  # fallen off the bus
    ],
)
def test_what_cannot_be_set_is_refused_by_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        rules.checked(ProviderSettingsSpec(**fields), lease_seconds=LEASE_SECONDS)
    assert caught.value.field == field


def test_a_version_is_its_contents_in_one_spelling_and_travels_as_it_is() -> None:
    fields: dict[str, Any] = {"heartbeat_seconds": 10.0, "enumerate_every_seconds": 60.0}
    one = rules.checked(ProviderSettingsSpec(ignored_xids=(62, 8, 62), **fields), lease_seconds=LEASE_SECONDS)
    assert one.ignored_xids == (8, 62)
    for spec in (one, ProviderSettingsSpec()):
        content = rules.encoded(spec)
        assert rules.received(rules.message(digest(content), content)) == spec


# Who is told what.


async def ask(api: DeviceApi, provider: str = "nvml", **said: Any) -> pb.SyncSettingsResponse:
    stub = provider_settings_pb2_grpc.ProviderSettingsServiceStub(api.channel)
    answer: pb.SyncSettingsResponse = await stub.SyncSettings(
        pb.SyncSettingsRequest(provider_id=provider, **said)
    )
    return answer


async def write(api: DeviceApi, spec: ProviderSettingsSpec | None) -> None:
    def change(draft: Any) -> None:
        if spec is None:
            draft.delete(PROVIDER_SETTINGS, AT, NAME)
        else:
            draft.put(PROVIDER_SETTINGS, AT, NAME, spec=spec)

    touches = [PROVIDER_SETTINGS.key(AT, NAME)]
    await api.store.transact(change, actor="ada", action="write", touches=touches)


def applied(api: DeviceApi, provider: str = "nvml") -> SettingsAppliedStatus | None:
    found = api.store.get(SETTINGS_APPLIED, AT, provider)
    return found.status if found is not None else None


async def lease(api: DeviceApi, provider: str = "nvml") -> None:
    await api.register(f"gpu-{provider}")
    await api.set_condition(f"gpu-{provider}", f"{provider}Ready", "True", provider=provider)
    assert await api.heartbeat(provider, [f"gpu-{provider}"])


async def test_a_provider_is_sent_what_it_does_not_have_and_takes_part_once_it_has_a_lease(
    tmp_path: Path,
) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(lease_seconds=LEASE_SECONDS)) as api:
        await write(api, ProviderSettingsSpec(heartbeat_seconds=5.0))
        first = version(heartbeat_seconds=5.0)
        answer = await ask(api)
        assert (answer.settings.digest, answer.lease_seconds) == (first, LEASE_SECONDS)
        assert applied(api) is None, "without a lease nothing could be confirmed"
        subject = api.domain.settings_subject
        assert not subject.targets(AT)

        await lease(api)
        assert not (await ask(api, applied=first, wanted=first)).HasField("settings")
        assert (fact := subject.targets(AT)["nvml"]).version == first
        assert (fact.online, fact.healthy, fact.labels) == (True, True, {"provider": "nvml"})
        refused: dict[str, Any] = {
            "applied": first,
            "wanted": "x" * 300,
            "error": "no\n" + "e" * 5000,
            "failures": 1,
        }
        assert (await ask(api, **refused)).settings.digest == first
        said = applied(api)
        assert said is not None
        assert (len(said.wanted), len(said.error), said.error[:3]) == (64, 500, "no ")
        failed: dict[str, Any] = {"wanted": first, "error": "no", "failures": 1}
        assert not (await ask(api, **failed)).HasField("settings"), "it was sent that already"
        await subject.again(AT, ["nvml"])
        assert (await ask(api, **failed)).settings.digest == first, "it is told to try once more"
        assert not (await ask(api, **failed)).HasField("settings"), "once"
        await write(api, None)
        assert (await ask(api, applied=first, wanted=first)).settings.digest == NOTHING

        for strange in ("", "a/b", "../x", "n" * 129, "a b"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(api, strange)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(NotFound):
            subject.scope("tenant/acme")
        assert (subject.scope("providers"), subject.scopes("tenant/acme")) == (AT, [])


async def test_asking_renews_no_lease_and_who_loses_it_after_moving_is_online_and_unhealthy(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    async with device_api(tmp_path, policy=GpuPolicy(lease_seconds=LEASE_SECONDS), clock=clock) as api:
        for name in ("nvml", "other"):
            await lease(api, name)
            await ask(api, name, applied=NOTHING, wanted=NOTHING)
        policy = PolicySpec(policy=Policy(waves=("1", "rest")))
        await api.store.transact(
            lambda draft: draft.put(ROLLOUT_POLICY, AT, SUBJECT, spec=policy),
            actor="ada",
            action="policy",
            touches=[ROLLOUT_POLICY.key(AT, SUBJECT)],
        )
        await write(api, ProviderSettingsSpec(heartbeat_seconds=9.0))
        second, subject = version(heartbeat_seconds=9.0), api.domain.settings_subject
        held = {"applied": NOTHING, "wanted": NOTHING}
        assert not (await ask(api, **held)).HasField("settings"), "it waits for a rollout"
        await subject.steer(AT, {"nvml": second}, rollout="r")
        assert (await ask(api, **held)).settings.digest == second
        assert not (await ask(api, "other", **held)).HasField("settings")
        await ask(api, applied=second, wanted=second)
        before = subject.targets(AT)
        assert {name: one.version for name, one in before.items()} == {"nvml": second, "other": NOTHING}

        await clock.advance(LEASE_SECONDS + 1)
        await ask(api, applied=second, wanted=second)
        after = subject.targets(AT)
        assert (after["nvml"].online, after["nvml"].healthy) == (True, False), "it has failed"
        assert after["nvml"].version == "", "nothing confirms it now"
        assert (after["other"].online, after["other"].version) == (False, NOTHING), "it is waited for"
        now = Period(from_ns=0, to_ns=clock.now_ns())
        assert await subject.measure(AT, "healthy", ["nvml", "other"], now) == 0.0
        long_ago = Period(from_ns=0, to_ns=clock.now_ns() - 120 * NS)
        assert await subject.measure(AT, "healthy", ["nvml"], long_ago) is None

        await lease(api)
        await api.set_condition("gpu-nvml", "nvmlReady", "False", provider="nvml")
        assert await subject.measure(AT, "gpus_healthy", ["nvml", "other"], now) == 0.5
        assert not subject.targets(AT)["nvml"].healthy
        await subject.steer(AT, {"nvml": NOTHING}, rollout="r")
        assert (await ask(api, applied=second, wanted=second)).settings.digest == NOTHING


async def test_after_a_restart_nobody_has_failed_before_there_was_time_to_come_back(tmp_path: Path) -> None:
    clock = VirtualClock()
    policy = GpuPolicy(lease_seconds=LEASE_SECONDS, max_providers=2)
    second = version(heartbeat_seconds=9.0)
    async with device_api(tmp_path, policy=policy, clock=clock) as api:
        await lease(api)
        await ask(api, applied=NOTHING, wanted=NOTHING)
        await api.domain.settings_subject.steer(AT, {}, rollout="r", default=NOTHING)
        await write(api, ProviderSettingsSpec(heartbeat_seconds=9.0))
        await api.domain.settings_subject.steer(AT, {"nvml": second}, rollout="r", default=NOTHING)
        await ask(api, applied=second, wanted=second)
    async with device_api(tmp_path, policy=policy, clock=clock) as api:
        subject = api.domain.settings_subject
        assert not subject.targets(AT)["nvml"].online
        await clock.advance(RETURN_SECONDS + 1)
        assert (one := subject.targets(AT)["nvml"]).online
        assert not one.healthy
        await clock.advance(FORGET_SECONDS)
        await lease(api, "new")
        await ask(api, "new", applied=second, wanted=second)
        assert list(subject.targets(AT)) == ["new"], "who was not heard for a day is no target"


def test_the_call_is_let_in_like_the_other_calls_of_providers() -> None:
    rows = {row.path.rpartition("/")[2]: row for row in BLUEPRINT.methods if "nvsentinel" not in row.path}
    ours, theirs = rows["SyncSettings"], rows["Heartbeat"]
    assert (ours.listener, ours.authentication, ours.permission) == (
        theirs.listener,
        theirs.authentication,
        theirs.permission,
    )


async def test_settings_are_written_by_operators_at_the_installation_under_one_name(tmp_path: Path) -> None:
    def body(name: str = NAME, scope: str = "/", **spec: object) -> dict[str, Any]:
        return {"kind": "provider-settings", "metadata": {"name": name, "scope": scope}, "spec": spec}

    made = {"gpus": started_domains(tmp_path)["gpus"]}
    async with plans_rig(tmp_path / "a", (BLUEPRINT,), roles=("gpus.operator",), started=made) as rig:
        await rig.applied(body(heartbeatSeconds=5, ignoredXids=[62, 8]))
        shown = (await rig.call("GET", f"/provider-settings/{NAME}")).json()
        assert shown["spec"] == {
            "heartbeatSeconds": 5.0,
            "ignoredXids": [8, 62],
            "enumerateEverySeconds": None,
        }
        assert shown["status"]["version"] == version(heartbeat_seconds=5.0, ignored_xids=(8, 62))
        for wrong in (
            body("others", heartbeatSeconds=5),
            body(scope="/tenants/acme", heartbeatSeconds=5),
            body(heartbeatSeconds=11),
            body(driverRoot="/tmp"),
        ):
            answer = await rig.call("POST", "/plans", {"objects": [wrong]})
            assert answer.status_code in (400, 403, 422), answer.text
        viewer = await rig.rig.token("eye", "gpus.viewer")
        headers = {"authorization": f"Bearer {viewer}"}
        assert (await rig.call("GET", f"/provider-settings/{NAME}", headers=headers)).status_code == 200
        refused = await rig.call("DELETE", f"/provider-settings/{NAME}", headers=headers)
        assert refused.status_code == 403
        assert (await rig.call("DELETE", f"/provider-settings/{NAME}")).status_code in (200, 204)
