"""Single instances, certificates and sleeping tenants, as an operator meets them over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.timestamp_pb2 import Timestamp
from support.instances.operator_rig import (
    OTHER,
    TENANT,
    Operator,
    Rig,
    document,
    make_key,
    new_id,
    operator_rig,
)

from fleetplane.domains.instances.kinds import OPERATOR, HealthReport, tenant_scope
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.sim.clock import VirtualClock

Code = grpc.StatusCode
Slept = operator_pb2.SleepTenantResponse
Woken = operator_pb2.WakeTenantResponse


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with operator_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def operator(rig: Rig) -> Operator:
    return await rig.operator()


async def refused(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code()


def in_seconds(seconds: float, clock: Clock | None = None) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds((clock or SystemClock()).now_ns() + round(seconds * 1e9))
    return stamp


# Creating.


async def test_an_instance_is_made_on_demand_with_what_the_caller_chose(rig: Rig, operator: Operator) -> None:
    made = await operator.create(group="web", instance_type="x1", vars={"For": "me"})
    assert made.status == "pending"
    instance = rig.instances.get(TENANT, made.instance_id)
    assert instance.spec.on_demand
    assert (instance.spec.instance_type, instance.spec.vars) == ("x1", {"For": "me"})
    assert (TENANT, "web") in rig.looked


async def test_an_instance_that_was_made_already_is_not_made_twice(rig: Rig, operator: Operator) -> None:
    name = new_id()
    assert (await operator.create(name, group="web")).instance_id == name
    await rig.change(rig.instances.get(TENANT, name), provider_id="pm-1", provider_status="running")
    again = await operator.create(name, group="web")
    assert (again.instance_id, again.status) == (name, "running")
    assert len(rig.instances.all()) == 1


async def test_another_tenants_id_is_not_taken_over(rig: Rig, operator: Operator) -> None:
    theirs = await rig.add("secret", tenant=OTHER)
    assert await refused(operator.create(theirs.name, group="web")) is Code.INVALID_ARGUMENT
    assert rig.instances.find(TENANT, theirs.name) is None


@pytest.mark.parametrize(
    ("name", "config", "code"),
    [
        ("", {}, Code.INVALID_ARGUMENT),
        ("", {"group": "nowhere"}, Code.NOT_FOUND),
        ("", {"group": "secret"}, Code.NOT_FOUND),
        ("", {"group": "nat"}, Code.NOT_FOUND),
        ("not-an-id", {"group": "web"}, Code.INVALID_ARGUMENT),
    ],
)
async def test_an_instance_needs_a_group_of_its_tenant_and_a_proper_id(
    rig: Rig, operator: Operator, name: str, config: dict[str, str], code: grpc.StatusCode
) -> None:
    assert await refused(operator.create(name, **config)) is code
    assert not rig.instances.all()


async def test_an_instance_without_configuration_is_refused(operator: Operator) -> None:
    call = operator.stub.CreateInstance(operator_pb2.CreateInstanceRequest())
    assert await refused(call) is Code.INVALID_ARGUMENT


# Deleting.


async def test_a_deleted_instance_goes_at_once_and_says_why(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    assert await operator.delete(instance.name) == "deleting"
    found = rig.instances.get(TENANT, instance.name)
    assert rules.state(found) is rules.State.DELETING
    assert found.status is not None
    assert found.status.drain is not None
    assert found.status.drain.reason == "requested"
    assert rig.looked == [(TENANT, "web")]


async def test_deleting_again_answers_how_far_it_is(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    await operator.delete(instance.name)
    before = rig.instances.get(TENANT, instance.name)
    assert await operator.delete(instance.name) == "deleting"
    assert rig.instances.get(TENANT, instance.name) == before
    await rig.change(before, deleted_at_ns=1)
    assert await operator.delete(instance.name) == "deleted"


async def test_deleting_a_draining_instance_keeps_the_reason_of_its_drain(
    rig: Rig, operator: Operator
) -> None:
    instance = await rig.add()
    await rig.drain(instance, "spot-terminating")
    await operator.delete(instance.name)
    status = rig.instances.get(TENANT, instance.name).status
    assert status is not None
    assert status.drain is not None
    assert status.drain.reason == "spot-terminating"


async def test_deleting_what_is_not_there_is_fine(operator: Operator) -> None:
    assert await operator.delete(new_id()) == "unknown"
    assert await operator.delete("gibberish") == "unknown"
    assert await refused(operator.delete("")) is Code.INVALID_ARGUMENT


# Other tenants.


async def test_another_tenants_instance_looks_exactly_like_none(rig: Rig, operator: Operator) -> None:
    theirs = await rig.add("secret", tenant=OTHER)
    for name in (theirs.name, new_id()):
        assert await operator.delete(name) == "unknown"
        assert await refused(operator.status(name)) is Code.NOT_FOUND
        assert await refused(operator.acknowledge(name)) is Code.NOT_FOUND
    assert rig.instances.get(OTHER, theirs.name) == theirs
    assert rig.looked == []


# Asking.


async def test_the_status_of_an_instance_is_the_providers_word_now(rig: Rig, operator: Operator) -> None:
    instance = await rig.add(provider="pm-3")
    rig.words[instance.name] = "stopping"
    status = await operator.status(instance.name)
    assert (status.instance_id, status.tenant, status.status) == (instance.name, TENANT, "stopping")
    assert status.provider_instance_id == "pm-3"
    assert status.created_at.ToNanoseconds() == instance.created_at_ns


async def test_last_seen_is_when_the_agent_was_heard(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    assert instance.status is not None
    first = (await operator.status(instance.name)).last_seen.ToNanoseconds()
    assert first == instance.status.registered_at_ns
    rig.reports.take(HealthReport(instance=instance.name))
    heard = rig.reports.last(instance.name)
    assert heard is not None
    assert (await operator.status(instance.name)).last_seen.ToNanoseconds() == heard.at_ns


async def test_an_instance_that_the_provider_does_not_have_yet_is_pending(
    rig: Rig, operator: Operator
) -> None:
    made = await operator.create(group="web")
    rig.words[made.instance_id] = "never asked"
    status = await operator.status(made.instance_id)
    assert (status.status, status.provider_instance_id) == ("pending", "")
    assert not status.HasField("last_seen")


# Draining.


async def test_an_acknowledged_drain_is_recorded_and_looked_at(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    await rig.drain(instance)
    rig.looked.clear()
    await operator.acknowledge(instance.name)
    status = rig.instances.get(TENANT, instance.name).status
    assert status is not None
    assert status.drain is not None
    assert status.drain.acked_at_ns is not None
    assert rig.looked == [(TENANT, "web")]


async def test_an_acknowledgement_is_trusted_even_if_nobody_asked_for_a_drain(
    rig: Rig, operator: Operator
) -> None:
    instance = await rig.add()
    await operator.acknowledge(instance.name)
    assert rules.state(rig.instances.get(TENANT, instance.name)) is rules.State.DRAINING


# Certificates.


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
async def test_an_operator_renews_its_certificate_under_its_own_identity(
    rig: Rig, operator: Operator, kind: str
) -> None:
    key = make_key(kind).public_key()
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    answer = await operator.stub.RenewCertificate(operator_pb2.RenewCertificateRequest(public_key_pem=pem))
    certificate = x509.load_pem_x509_certificate(answer.client_certificate_pem)
    identity = peer_identity(answer.client_certificate_pem)
    assert (identity.common_name, identity.organizations) == ("lab", (TENANT,))
    assert identity.extension_text("1.3.6.1.4.1.999999.1") == "operator"
    assert certificate.public_key() == key
    assert answer.expires_at.ToDatetime() == certificate.not_valid_after_utc.replace(tzinfo=None)
    hours = (certificate.not_valid_after_utc.timestamp() - SystemClock().now_ns() / 1e9) / 3600
    assert 23 < hours <= 24, "a day: whoever renews needs no more"
    records = rig.store.list(OPERATOR, tenant_scope(TENANT))
    assert [record.spec.certificate_serial for record in records] == [str(identity.serial)]


async def test_the_life_of_an_operators_certificate_is_configurable(tmp_path: Path) -> None:
    wanted = document(certificates={"operator": {"kind": "client", "ttl": 48}})
    async with operator_rig(tmp_path, wanted) as rig:
        key = make_key().public_key()
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        request = operator_pb2.RenewCertificateRequest(public_key_pem=pem)
        answer = await (await rig.operator()).stub.RenewCertificate(request)
        hours = (answer.expires_at.ToNanoseconds() - SystemClock().now_ns()) / 3600e9
        assert 47.9 < hours <= 48


@pytest.mark.parametrize("text", [b"", b"nonsense", b"x" * 5000])
async def test_a_certificate_needs_a_key(operator: Operator, text: bytes) -> None:
    request = operator_pb2.RenewCertificateRequest(public_key_pem=text)
    assert await refused(operator.stub.RenewCertificate(request)) is Code.INVALID_ARGUMENT


# Sleep.


async def test_a_tenant_sleeps_and_wakes(rig: Rig, operator: Operator) -> None:
    assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_AWAKE
    until = in_seconds(3600)
    slept = await operator.sleep(wake_at=until)
    assert (slept.result, slept.status) == (Slept.RESULT_SLEPT, operator_pb2.TENANT_SLEEP_STATUS_ASLEEP)
    assert slept.wake_at == until
    assert {(TENANT, "web"), (TENANT, "api")} <= set(rig.looked)
    assert (OTHER, "secret") not in rig.looked
    status = await operator.tenant()
    assert (status.status, status.wake_at) == (operator_pb2.TENANT_SLEEP_STATUS_ASLEEP, until)
    rig.looked.clear()
    woken = await operator.wake()
    assert (woken.result, woken.status) == (Woken.RESULT_WOKE, operator_pb2.TENANT_SLEEP_STATUS_AWAKE)
    assert {(TENANT, "web"), (TENANT, "api")} <= set(rig.looked)
    assert (await operator.wake()).result == Woken.RESULT_ALREADY_AWAKE


async def test_a_sleeping_tenant_keeps_its_time_to_wake_unless_given_another(operator: Operator) -> None:
    first, second = in_seconds(100), in_seconds(200)
    await operator.sleep(wake_at=first)
    again = await operator.sleep()
    assert (again.result, again.wake_at) == (Slept.RESULT_ALREADY_ASLEEP, first)
    assert (await operator.sleep(wake_at=second)).wake_at == second
    assert (await operator.tenant()).wake_at == second


@pytest.mark.parametrize("if_not_busy", [False, True])
async def test_an_instance_made_on_demand_keeps_its_tenant_awake(
    rig: Rig, operator: Operator, if_not_busy: bool
) -> None:
    made = await operator.create(group="web")
    busy = await operator.sleep(if_not_busy=if_not_busy)
    assert (busy.result, busy.status) == (Slept.RESULT_BUSY, operator_pb2.TENANT_SLEEP_STATUS_AWAKE)
    await rig.change(rig.instances.get(TENANT, made.instance_id), deleted_at_ns=1)
    assert (await operator.sleep(if_not_busy=if_not_busy)).result == Slept.RESULT_SLEPT


async def test_creating_an_instance_wakes_its_tenant(rig: Rig, operator: Operator) -> None:
    await operator.sleep()
    rig.looked.clear()
    await operator.create(group="web")
    assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_AWAKE
    assert (TENANT, "api") in rig.looked


async def test_an_instance_that_is_refused_wakes_nobody(operator: Operator) -> None:
    await operator.sleep()
    await refused(operator.create(group="nowhere"))
    assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_ASLEEP


async def test_a_tenant_is_awake_once_its_time_has_come(tmp_path: Path) -> None:
    clock = VirtualClock(start_ns=SystemClock().now_ns())
    async with operator_rig(tmp_path, clock=clock) as rig:
        operator = await rig.operator()
        await operator.sleep(wake_at=in_seconds(100, clock))
        await clock.advance(99)
        assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_ASLEEP
        await clock.advance(2)
        assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_AWAKE
        assert (await operator.wake()).result == Woken.RESULT_ALREADY_AWAKE


async def test_nobody_sleeps_until_yesterday(operator: Operator) -> None:
    assert await refused(operator.sleep(wake_at=in_seconds(-10))) is Code.INVALID_ARGUMENT
    assert (await operator.tenant()).status == operator_pb2.TENANT_SLEEP_STATUS_AWAKE


@pytest.mark.parametrize("verb", ["sleep", "wake", "tenant"])
async def test_a_tenant_is_put_to_sleep_by_its_own_operators_only(operator: Operator, verb: str) -> None:
    assert await refused(getattr(operator, verb)("")) is Code.INVALID_ARGUMENT
    assert await refused(getattr(operator, verb)(OTHER)) is Code.PERMISSION_DENIED
    assert await refused(getattr(operator, verb)("nobody")) is Code.PERMISSION_DENIED


async def test_no_listener_can_be_woken_by_itself(operator: Operator) -> None:
    assert await refused(operator.wake(listener="https")) is Code.FAILED_PRECONDITION
