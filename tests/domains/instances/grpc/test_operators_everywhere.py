"""Operators at any of three servers on one database see, decide and are told the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.instances.instances_at_servers import Here, Servers, quiet_document, until, with_servers
from support.instances.operator_rig import OTHER, TENANT, new_id

from fleetplane.domains.instances.grpc.operator_watches import Endings
from fleetplane.domains.instances.kinds import (
    COMPLAINT,
    INSTANCE,
    DrainState,
    Instance,
    InstanceSpec,
    InstanceStatus,
)
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.fleet.errands import ERRAND
from fleetplane.fleet.resources.common import made_up
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, InvalidArgument, NotFound


async def told(stream: AsyncIterator[Any], count: int) -> list[Any]:
    async with asyncio.timeout(600):
        return [await anext(stream) for _ in range(count)]


async def at_once(*works: Any) -> list[Any]:
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        assert not isinstance(one, BaseException) or isinstance(one, FleetplaneError), repr(one)
    return list(found)


def reasons(found: list[Any]) -> list[str]:
    return sorted(one.reason for one in found if isinstance(one, FleetplaneError))


# Groups.


def test_a_group_is_made_changed_and_deleted_at_any_server_and_kept_by_the_active_one(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        made = await servers.two.upsert("batch", template="worker", size=2)
        assert (made.key, made.size) == ("batch", 2)
        await until(lambda: len(servers.three.instances()) == 2)
        answers = [(await one.call("ListGroups")).SerializeToString() for one in servers.all]
        assert len(set(answers)) == 1
        change = admin_pb2.ChangeGroupRequest(tenant=TENANT, key="batch", size=1)
        await servers.three.admin("ChangeGroup", change)
        request = operator_pb2.DeleteGroupRequest(key="batch")
        await servers.two.call("DeleteGroup", request)
        for one in servers.all:
            listed = await one.call("ListGroups")
            assert "batch" not in {group.key for group in listed.groups}

    with_servers(tmp_path, work)


def test_of_changes_at_two_servers_at_once_only_one_takes_the_last_room(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        found = await at_once(
            servers.two.upsert("one", template="worker", size=3),
            servers.three.upsert("two", template="worker", size=3),
        )
        assert reasons(found) == ["TENANT_QUOTA"]

    with_servers(tmp_path, work)


# The document.


def test_a_document_that_one_server_puts_in_force_is_in_force_everywhere_at_the_next_call(
    tmp_path: Path,
) -> None:
    async def work(servers: Servers) -> None:
        wanted = quiet_document()
        wanted["groups"][TENANT]["new"] = {"template": "worker", "size": 1}
        await servers.configure(wanted)
        assert all(one.domain._groups.view(TENANT, "new") is None for one in servers.all)
        done = await servers.two.call("RefreshConfig")
        assert done.updated
        for one in (servers.three, servers.active, servers.two):
            status = await one.call("GetConfigStatus")
            assert (status.etag, status.size) == (done.etag, (await servers.two.call("GetConfigStatus")).size)
            assert one.domain._groups.view(TENANT, "new") is not None
        again = await servers.three.call("RefreshConfig")
        assert (again.updated, again.prev_etag, again.etag) == (False, done.etag, done.etag)
        await until(lambda: len(servers.two.instances()) == 1)  # the active one was told

    with_servers(tmp_path, work)


def test_what_lies_in_the_storage_and_was_not_put_in_force_is_in_force_nowhere(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        before = await servers.active.call("GetConfigStatus")
        wanted = quiet_document()
        wanted["groups"][TENANT]["new"] = {"template": "worker", "size": 1}
        await servers.configure(wanted)
        await servers.two.upsert("web", size=1)  # whatever makes servers look
        for one in servers.all:
            assert (await one.call("GetConfigStatus")).SerializeToString() == before.SerializeToString()

    with_servers(tmp_path, work)


def test_a_document_that_leaves_instances_behind_is_refused_at_a_server_without_provider(
    tmp_path: Path,
) -> None:
    async def work(servers: Servers) -> None:
        for one in servers.all:  # none of them brings its provider: it is the document's
            one.domain._infrastructure._brought = None
        servers.active.domain._infrastructure._infra = servers.active.domain._groups.required().shard.infra
        await servers.two.create(group="web")
        wanted = quiet_document()
        wanted["shard"]["infra"] = {"provider": "mock", "region": "elsewhere", "zone": "here-a"}
        await servers.configure(wanted)
        for one in servers.all:
            with pytest.raises(InvalidArgument, match="refused"):
                await one.call("RefreshConfig")

    with_servers(tmp_path, work)


def test_documents_that_two_servers_put_in_force_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        for size in range(5):
            wanted = quiet_document()
            wanted["groups"][TENANT]["web"]["size"] = size % 2
            wanted["groups"][TENANT]["more"] = {"template": "worker", "size": 0, "vars": {"N": str(size)}}
            await servers.configure(wanted)
            found = await at_once(*(one.call("RefreshConfig") for one in servers.all))
            assert reasons(found) == []
            assert sum(one.updated for one in found) == 1
            assert len({one.etag for one in found}) == 1

    with_servers(tmp_path, work)


# Instances.


def test_an_instance_on_demand_is_made_at_any_server_and_its_answer_is_the_same(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        words = []
        for one in servers.all:
            made = await one.create(group="web", vars={"Colour": "red"})
            words.append(made.status)
            assert made.instance_id in servers.provider.instances
            answers = set()
            for other in servers.all:
                request = operator_pb2.GetInstanceStatusRequest(instance_id=made.instance_id)
                answers.add((await other.call("GetInstanceStatus", request)).SerializeToString())
            assert len(answers) == 1
        assert len(set(words)) == 1
        assert {one.spec.subnet for one in servers.two.instances()} == {"net-1"}
        await until(lambda: servers.two.store.count(ERRAND) == 0)

    with_servers(tmp_path, work)


def test_one_id_asked_for_at_three_servers_at_once_is_one_machine(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        name = new_id()
        found = await at_once(*(one.create(name, group="web") for one in servers.all))
        assert reasons(found) == []
        assert {one.instance_id for one in found} == {name}
        assert [one.name for one in servers.three.instances()] == [name]
        again = await servers.three.create(name, group="web")  # whoever lost its answer asks again
        assert again.instance_id == name
        assert list(servers.provider.instances) == [name]

    with_servers(tmp_path, work)


def test_an_id_of_another_tenant_is_refused_without_a_word_about_it(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        theirs = await servers.two.create(tenant=OTHER, group="secret")
        for one in servers.all:
            with pytest.raises(InvalidArgument, match="cannot be used"):
                await one.create(theirs.instance_id, group="web")
            name = operator_pb2.GetInstanceStatusRequest(instance_id=theirs.instance_id)
            with pytest.raises(NotFound):
                await one.call("GetInstanceStatus", name)
            delete = operator_pb2.DeleteInstanceRequest(instance_id=theirs.instance_id)
            assert (await one.call("DeleteInstance", delete)).status == "unknown"
            with pytest.raises(NotFound):
                await one.call(
                    "AcknowledgeDrained", operator_pb2.DrainAckRequest(instance_id=theirs.instance_id)
                )

    with_servers(tmp_path, work)


def test_no_more_than_the_quota_are_made_at_three_servers_at_once(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        found = await at_once(*(one.create(group="web") for one in servers.all for _ in range(3)))
        assert reasons(found) == ["TENANT_QUOTA"] * 5
        assert len(servers.two.instances()) == 4

    with_servers(tmp_path, work)


def test_an_instance_that_could_not_be_made_is_told_as_at_the_active_server(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        refused = []
        servers.provider.script(MockFault(operation="create_instance", count=0, error="capacity"))
        for one in servers.all:
            with pytest.raises(FleetplaneError) as error:
                await one.create(group="web")
            refused.append((error.value.reason, error.value.message))
        assert len(set(refused)) == 1, refused
        # Nobody knows their ids: none of them is to come later.
        await until(
            lambda: all(
                one.status is not None and one.status.deleting_at_ns is not None
                for one in servers.three.instances()
            )
        )

    with_servers(tmp_path, work)


def test_what_is_made_on_demand_wakes_its_tenant_in_the_same_moment(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        await servers.two.call("SleepTenant", operator_pb2.SleepTenantRequest(tenant=TENANT))
        await servers.three.create(group="web")
        status = await servers.two.call("GetTenantStatus", operator_pb2.GetTenantStatusRequest(tenant=TENANT))
        assert status.status == operator_pb2.TENANT_SLEEP_STATUS_AWAKE
        found = await servers.two.call("SleepTenant", operator_pb2.SleepTenantRequest(tenant=TENANT))
        assert found.result == operator_pb2.SleepTenantResponse.RESULT_BUSY

    with_servers(tmp_path, work)


def test_an_instance_is_deleted_and_drained_from_any_server(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        one, two = [(await servers.two.create(group="web")).instance_id for _ in range(2)]
        delete = operator_pb2.DeleteInstanceRequest(instance_id=one)
        assert (await servers.three.call("DeleteInstance", delete)).status == "deleting"
        await until(lambda: one not in servers.provider.instances)
        drain = admin_pb2.DrainInstanceRequest(tenant=TENANT, instance_id=two, timeout_seconds=3600)
        await servers.three.admin("DrainInstance", drain)
        await servers.two.call("AcknowledgeDrained", operator_pb2.DrainAckRequest(instance_id=two))
        await until(lambda: two not in servers.provider.instances)
        with pytest.raises(FailedPrecondition, match="already"):
            await servers.two.admin("DrainInstance", drain)

    with_servers(tmp_path, work)


# Watching, and why.


def test_watches_of_all_servers_tell_what_happens_at_any(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        groups = [one.watch("WatchGroups") for one in servers.all]
        endings = [one.watch("WatchInstances") for one in servers.all]
        first = [await told(one, 2) for one in groups]
        assert all([event.group.key for event in events] == ["api", "web"] for events in first)
        beginning = [asyncio.ensure_future(told(one, 1)) for one in endings]
        await servers.two.upsert("api", size=1)
        for one in groups:
            while True:
                (event,) = await told(one, 1)
                if (event.group.key, event.group.size, event.group.actual_size) == ("api", 1, 1):
                    break
        made = await servers.two.create(group="web")
        delete = operator_pb2.DeleteInstanceRequest(instance_id=made.instance_id)
        await servers.three.call("DeleteInstance", delete)
        found = [(await one)[0] for one in beginning]
        assert {(event.instance_id, event.status) for event in found} == {(made.instance_id, "deleting")}

    with_servers(tmp_path, work)


async def _meet(one: Here, text: str) -> None:
    one.domain.errors.tell(TENANT, "web", "", text)


def test_an_error_that_any_server_meets_is_told_by_all_once(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        streams = [one.watch("WatchErrors") for one in servers.all]
        others = servers.two.watch("WatchErrors", tenant=OTHER)
        waiting = [asyncio.ensure_future(told(one, 2)) for one in streams]
        strange = asyncio.ensure_future(told(others, 1))
        await asyncio.sleep(1)
        for one in servers.all:  # the same trouble, met by everybody
            await _meet(one, "no room")
        await asyncio.sleep(5)
        await _meet(servers.three, "no light")
        for each in waiting:
            assert [(event.group, event.error) for event in await each] == [
                ("web", "no room"),
                ("web", "no light"),
            ]
        listed = [[one.text for one in here.domain.errors.recent(TENANT, 10)] for here in servers.all]
        assert listed == [["no light", "no room"]] * 3
        assert not strange.done()
        strange.cancel()

    with_servers(tmp_path, work)


def test_a_tenant_keeps_so_many_errors_and_the_oldest_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetplane.domains.instances.live.errors.KEPT", 20)

    async def work(servers: Servers) -> None:
        for number in range(60):
            await _meet(servers.all[number % 3], f"error {number}")
            await asyncio.sleep(0.3)
        await asyncio.sleep(2)
        await servers.two.store.confirmed()
        kept = servers.two.domain.errors.recent(TENANT, 100)
        assert [one.text for one in kept] == [f"error {number}" for number in range(59, 39, -1)]
        assert servers.two.store.count(COMPLAINT) == 20

    with_servers(tmp_path, work)


def test_reasons_of_controllers_are_told_by_every_server(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        freeze = admin_pb2.FreezeRequest(scope=f"tenant/{TENANT}/group/web", reason="audit")
        await servers.three.admin("Freeze", freeze)
        await servers.two.upsert("web", size=1)
        about = admin_pb2.ExplainRequest(key=f"{TENANT}/web")

        async def codes(one: Here) -> set[str]:
            found = await one.admin("Explain", about)
            return {reason.code for finding in found.findings for reason in finding.reasons}

        async with asyncio.timeout(600):
            while await codes(servers.active) != {"FROZEN"}:
                await asyncio.sleep(0.1)
        assert await codes(servers.two) == await codes(servers.three) == {"FROZEN"}
        with pytest.raises(NotFound):
            await servers.two.admin("Explain", admin_pb2.ExplainRequest(key="nobody/nothing"))

    with_servers(tmp_path, work)


# Certificates.


def test_each_step_of_the_authority_is_taken_at_another_server_and_at_once_by_one(
    tmp_path: Path,
) -> None:
    async def work(servers: Servers) -> None:
        announce = authority_pb2.AnnounceAuthorityRequest()
        found = await at_once(*(one.admin("AnnounceAuthority", announce) for one in servers.all))
        assert len(reasons(found)) == 2, found
        (announced,) = (one for one in found if not isinstance(one, FleetplaneError))
        assert announced.phase == "announced"
        switched = await servers.three.admin("SwitchAuthority", authority_pb2.SwitchAuthorityRequest())
        assert switched.phase == "switched"
        retired = await servers.two.admin("RetireAuthority", authority_pb2.RetireAuthorityRequest(force=True))
        shown = [
            await one.admin("GetAuthorities", authority_pb2.GetAuthoritiesRequest()) for one in servers.all
        ]
        assert {one.SerializeToString() for one in shown} == {retired.SerializeToString()}

    with_servers(tmp_path, work)


def test_an_operator_who_was_revoked_at_one_server_is_revoked_at_all(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        revoke = admin_pb2.RevokeClientRequest(role="operator", tenant=TENANT, client="lab", reason="lost")
        await servers.two.admin("RevokeClient", revoke)
        for one in servers.all:
            await one.store.confirmed()
            with pytest.raises(FleetplaneError, match="lost"):
                one.domain._revocations.check(principal=f"operator/{TENANT}/lab")
        again = admin_pb2.ReinstateClientRequest(role="operator", tenant=TENANT, client="lab")
        assert (await servers.three.admin("ReinstateClient", again)).reinstated

    with_servers(tmp_path, work)


# What is too large, and what was missed.


def test_a_document_that_does_not_fit_into_the_store_is_refused_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(servers: Servers) -> None:
        before = await servers.two.call("GetConfigStatus")
        monkeypatch.setattr("fleetplane.domains.instances.records.groups.PACKED_LIMIT_BYTES", 300)
        await servers.configure(quiet_document(images={}))
        with pytest.raises(InvalidArgument, match="more than 300"):
            await servers.two.admin("RefreshConfiguration", admin_pb2.RefreshConfigurationRequest())
        assert (await servers.three.call("GetConfigStatus")).etag == before.etag

    with_servers(tmp_path, work)


def test_who_reads_more_slowly_than_history_is_kept_is_told_the_ends_it_missed() -> None:
    def instance(name: str, **fields: Any) -> Instance:
        spec = InstanceSpec(cluster="lab", shard="local", group="web", template="worker", prefix="wkr")
        status = InstanceStatus(provider_id=f"pm-{name}", **fields)
        return made_up(INSTANCE, name, spec=spec, status=status, scope=f"tenant/{TENANT}")

    drain = DrainState(reason="requested", started_at_ns=1, delete_at_ns=2)
    endings = Endings()
    begun = list(endings.begin([instance("a", drain=drain), instance("b", drain=drain), instance("c")]))
    assert [one.instance_id for one in begun] == ["a", "b"]
    assert {one.status for one in begun} == {"pending_deletion"}
    missed = list(endings.again([instance("b", drain=drain, deleting_at_ns=3), instance("c", drain=drain)]))
    assert [(one.instance_id, one.status) for one in missed] == [
        ("b", "deleting"),
        ("c", "pending_deletion"),
        ("a", "deleted"),
    ]
    assert [*endings.again([instance("b", drain=drain, deleting_at_ns=3), instance("c", drain=drain)])] == []
