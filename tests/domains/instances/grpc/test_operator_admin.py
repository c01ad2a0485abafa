"""What the server's owner asks over the server's own socket."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from google.protobuf.timestamp_pb2 import Timestamp
from support.instances.operator_rig import OTHER, TENANT, Rig, document, make_key, operator_rig

from fleetplane.domains.instances.kinds import GROUP, NONCE, SECRET, HealthReport
from fleetplane.domains.instances.records.operators import record_nonce
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.sim.clock import VirtualClock

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with operator_rig(tmp_path) as rig:
        yield rig


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def public_pem(kind: str = "p256") -> bytes:
    return (
        make_key(kind)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def stamp(ns: int) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(ns)
    return made


async def test_only_the_servers_own_user_can_open_the_socket(rig: Rig) -> None:
    assert stat.S_IMODE(rig.admin_socket.stat().st_mode) == 0o600


async def test_the_first_operator_can_be_made_before_there_is_a_configuration(tmp_path: Path) -> None:
    async with operator_rig(tmp_path, configured=False) as rig:
        admin = await rig.admin()
        request = admin_pb2.CreateOperatorIdentityRequest(tenant=TENANT, public_key_pem=public_pem())
        made = await admin.CreateOperatorIdentity(request)
        assert made.operator_id == peer_identity(made.certificate_pem).common_name
        # A nonce names its cluster, which only a configuration does.
        nonce = admin_pb2.CreateOperatorNonceRequest(tenant=TENANT)
        assert await refused(admin.CreateOperatorNonce(nonce)) is Code.FAILED_PRECONDITION
        await rig.configure(document())
        operator = await rig.operator()
        assert (await operator.refresh()).updated


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
async def test_an_identity_says_who_for_how_long_and_where_to(rig: Rig, kind: str) -> None:
    admin = await rig.admin()
    request = admin_pb2.CreateOperatorIdentityRequest(
        tenant=TENANT, public_key_pem=public_pem(kind), operator_id="ci", life_seconds=60
    )
    before_ns = SystemClock().now_ns()
    made = await admin.CreateOperatorIdentity(request)
    identity = peer_identity(made.certificate_pem)
    assert (identity.common_name, identity.organizations) == ("ci", (TENANT,))
    assert identity.extension_text("1.3.6.1.4.1.999999.1") == "operator"
    assert made.expires_at.seconds == int(identity.not_after.timestamp())
    # A certificate knows no parts of a second.
    assert before_ns + 59e9 <= made.expires_at.ToNanoseconds() <= SystemClock().now_ns() + 60e9
    assert made.authority_pem == rig.authority.certificate_pem
    assert made.operator_address == rig.address


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": ""},
        {"tenant": "Not Me"},
        {"public_key_pem": b"nonsense"},
        {"operator_id": "a/b"},
        {"operator_id": "x" * 65},
        {"life_seconds": -1.0},
        {"life_seconds": float("nan")},
        {"life_seconds": float("inf")},
    ],
)
async def test_an_identity_that_cannot_be_is_refused(rig: Rig, fields: dict[str, Any]) -> None:
    request = admin_pb2.CreateOperatorIdentityRequest(
        **{"tenant": TENANT, "public_key_pem": public_pem(), **fields}
    )
    assert await refused((await rig.admin()).CreateOperatorIdentity(request)) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 400 * 86400.0])
async def test_a_nonce_that_never_expires_is_refused(rig: Rig, seconds: float) -> None:
    request = admin_pb2.CreateOperatorNonceRequest(tenant=TENANT, expiry_seconds=seconds)
    assert await refused((await rig.admin()).CreateOperatorNonce(request)) is Code.INVALID_ARGUMENT


async def test_instances_come_with_when_they_were_heard_and_why_they_go(rig: Rig) -> None:
    instance = await rig.add(provider="pm-8")
    rig.reports.take(HealthReport(instance=instance.name))
    drain = await rig.drain(instance, "config-drift")
    (entry,) = (await (await rig.admin()).ListInstances(admin_pb2.ListInstancesRequest())).instances
    heard = rig.reports.last(instance.name)
    assert heard is not None
    assert entry.last_seen.ToNanoseconds() == heard.at_ns
    assert (entry.state, entry.reason, entry.provider_id) == ("draining", "config-drift", "pm-8")
    assert entry.delete_at.ToNanoseconds() == drain.delete_at_ns


async def test_a_drain_that_has_begun_is_left_as_it_is(rig: Rig) -> None:
    instance = await rig.add()
    before = await rig.drain(instance, "spot-terminating", in_seconds=30)
    request = admin_pb2.DrainInstanceRequest(tenant=TENANT, instance_id=instance.name, timeout_seconds=900)
    done = await (await rig.admin()).DrainInstance(request)
    assert (done.instance.reason, done.instance.delete_at.ToNanoseconds()) == (
        "spot-terminating",
        before.delete_at_ns,
    )


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 8 * 86400.0])
async def test_a_drain_has_a_time_that_can_pass(rig: Rig, seconds: float) -> None:
    instance = await rig.add()
    request = admin_pb2.DrainInstanceRequest(
        tenant=TENANT, instance_id=instance.name, timeout_seconds=seconds
    )
    assert await refused((await rig.admin()).DrainInstance(request)) is Code.INVALID_ARGUMENT
    assert rig.instances.get(TENANT, instance.name) == instance


async def test_an_instance_is_drained_under_its_own_tenant_only(rig: Rig) -> None:
    instance = await rig.add()
    request = admin_pb2.DrainInstanceRequest(tenant=OTHER, instance_id=instance.name)
    assert await refused((await rig.admin()).DrainInstance(request)) is Code.NOT_FOUND


async def test_an_instance_made_on_demand_is_drained_without_replacement(rig: Rig) -> None:
    instance = await rig.add(on_demand=True)
    request = admin_pb2.DrainInstanceRequest(tenant=TENANT, instance_id=instance.name)
    await (await rig.admin()).DrainInstance(request)
    status = rig.instances.get(TENANT, instance.name).status
    assert status is not None
    assert status.drain is not None
    assert not status.drain.replace


async def test_freezes_that_have_ended_are_not_listed(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with operator_rig(tmp_path, clock=clock) as rig:
        admin = await rig.admin()
        ends = stamp(clock.now_ns() + 10**9)
        await admin.Freeze(admin_pb2.FreezeRequest(scope="", reason="short", expires_at=ends))
        await admin.Freeze(admin_pb2.FreezeRequest(scope=f"tenant/{TENANT}", reason="long"))
        await clock.advance(2)
        listed = (await admin.ListFreezes(admin_pb2.ListFreezesRequest())).freezes
        assert [(entry.reason, entry.HasField("expires_at")) for entry in listed] == [("long", False)]


@pytest.mark.parametrize(
    "scope", ["tenant", "tenant/", "tenants/a", "tenant/a/web", "tenant/a/group/", "/", "x"]
)
async def test_a_scope_that_no_controller_asks_about_is_refused(rig: Rig, scope: str) -> None:
    admin = await rig.admin()
    request = admin_pb2.FreezeRequest(scope=scope, reason="x")
    assert await refused(admin.Freeze(request)) is Code.INVALID_ARGUMENT
    assert await refused(admin.Lift(admin_pb2.LiftRequest(scope=scope))) is Code.INVALID_ARGUMENT
    assert not rig.store.list(FREEZE)


async def test_a_freeze_needs_a_reason_and_a_future(rig: Rig) -> None:
    admin = await rig.admin()
    assert await refused(admin.Freeze(admin_pb2.FreezeRequest())) is Code.INVALID_ARGUMENT
    past = admin_pb2.FreezeRequest(reason="x", expires_at=stamp(1))
    assert await refused(admin.Freeze(past)) is Code.INVALID_ARGUMENT


async def test_what_is_done_here_is_in_the_audit_log(rig: Rig) -> None:
    admin = await rig.admin()
    await admin.Freeze(admin_pb2.FreezeRequest(reason="x"))
    await admin.CreateOperatorIdentity(
        admin_pb2.CreateOperatorIdentityRequest(tenant=TENANT, public_key_pem=public_pem())
    )
    await admin.CreateOperatorNonce(admin_pb2.CreateOperatorNonceRequest(tenant=TENANT))
    await admin.PutSecret(admin_pb2.PutSecretRequest(name="db/password", content=b"hunter2"))
    async with asyncio.timeout(60):
        entries = [audit.read(row) async for row in rig.store.audit()]
    actions = {entry.action for entry in entries if entry.actor == "local"}
    assert actions == {
        "freeze.set",
        "instances.create_operator",
        "instances.create_nonce",
        "instances.put_secret",
    }


async def test_neither_a_nonce_nor_a_secret_is_in_the_database(rig: Rig) -> None:
    admin = await rig.admin()
    made = await admin.CreateOperatorNonce(admin_pb2.CreateOperatorNonceRequest(tenant=TENANT))
    await admin.PutSecret(admin_pb2.PutSecretRequest(name="db/password", content=b"hunter2-and-more"))
    [nonce] = rig.store.list(NONCE)
    [secret] = rig.store.list(SECRET)

    assert (nonce.spec.issued_by, secret.spec.put_by, secret.name) == ("local", "local", "db/password")
    written = b"".join(path.read_bytes() for path in rig.folder.glob("state.db*"))
    assert nonce.name.encode() in written
    for hidden in (made.nonce_jwt.rpartition(".")[2].encode(), b"hunter2-and-more"):
        assert hidden not in written
        assert not any(
            hidden in path.read_bytes() for path in rig.folder.rglob("objects/**/*") if path.is_file()
        )


async def test_nonces_that_have_run_out_are_forgotten_with_the_next_one(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with operator_rig(tmp_path, clock=clock) as rig:
        for name in ("one", "two"):
            await record_nonce(rig.store, TENANT, name, life_seconds=60, actor="test")
        await clock.advance(61)
        await record_nonce(rig.store, TENANT, "later", life_seconds=60, actor="test")
        assert [found.name for found in rig.store.list(NONCE)] == ["later"]


# Groups


def change(**fields: Any) -> admin_pb2.ChangeGroupRequest:
    return admin_pb2.ChangeGroupRequest(tenant=TENANT, key="web", **fields)


async def test_variables_that_operators_set_can_be_removed_again(rig: Rig) -> None:
    admin, operator = await rig.admin(), await rig.operator()
    await operator.upsert("web", size=3, vars={"Colour": "red", "Extra": "1"})
    done = await admin.ChangeGroup(change(remove_vars=["Colour", "Extra"]))

    assert (done.size, dict(done.vars)) == (3, {})
    [web] = [group for group in await operator.groups() if group.key == "web"]
    assert dict(web.vars) == {"Colour": "blue"}, "as configured again"
    assert (TENANT, "web") in rig.looked


async def test_arguments_for_the_provider_are_set_and_removed_at_run_time(rig: Rig) -> None:
    admin = await rig.admin()
    before = rig.groups.view(TENANT, "web")
    done = await admin.ChangeGroup(change(args={"ImageId": "ami-1", "Name": "{{ .Instance.ID }}"}))
    assert (done.size, dict(done.args)) == (2, {"ImageId": "ami-1", "Name": "{{ .Instance.ID }}"})
    changed = rig.groups.view(TENANT, "web")
    assert before is not None
    assert changed is not None
    assert dict(changed.group.args) == {"ImageId": "ami-1", "Name": "{{ .Instance.ID }}"}
    assert changed.infra_hash != before.infra_hash, "instances are made anew with it"
    assert rig.groups.chosen(changed).group.args["ImageId"] == "ami-1", "on demand too"

    await admin.ChangeGroup(change(remove_args=["ImageId", "Name"]))
    assert rig.groups.view(TENANT, "web") == before


async def test_a_change_leaves_what_it_does_not_name(rig: Rig) -> None:
    admin, operator = await rig.admin(), await rig.operator()
    await operator.upsert("web", size=5, instance_type="m5", vars={"A": "1"})
    done = await admin.ChangeGroup(change(vars={"B": "2"}))
    assert (done.size, done.instance_type, dict(done.vars)) == (5, "m5", {"A": "1", "B": "2"})
    done = await admin.ChangeGroup(change(size=0, instance_type=""))
    assert (done.size, done.instance_type, dict(done.vars)) == (0, "", {"A": "1", "B": "2"})


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"remove_vars": ["Colour"]}, Code.NOT_FOUND),  # it is configured, not set
        ({"vars": {"A": "1"}, "remove_vars": ["A"]}, Code.INVALID_ARGUMENT),
        ({"args": {"A": "{{ .Nonsense"}}, Code.INVALID_ARGUMENT),
        ({"args": {"": "x"}}, Code.INVALID_ARGUMENT),
        ({"size": -1}, Code.INVALID_ARGUMENT),
        ({"key": "nowhere"}, Code.NOT_FOUND),
        ({"key": "nat"}, Code.FAILED_PRECONDITION),
        ({"key": "No Key"}, Code.INVALID_ARGUMENT),
        ({"tenant": "umbrella"}, Code.NOT_FOUND),
    ],
)
async def test_a_change_that_cannot_be_made_changes_nothing(
    rig: Rig, fields: dict[str, Any], code: Code
) -> None:
    admin = await rig.admin()
    request = admin_pb2.ChangeGroupRequest(**{"tenant": TENANT, "key": "web", **fields})
    assert await refused(admin.ChangeGroup(request)) is code
    assert not rig.store.list(GROUP)
