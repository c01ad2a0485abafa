"""Groups and configuration, as an operator with a certificate meets them over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from support.instances.operator_rig import CONFIG_PATH, OTHER, TENANT, Operator, Rig, document, operator_rig

from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.grpc.operator_groups import GROUPS_LIMIT
from fleetplane.domains.instances.kinds import GROUP, tenant_scope
from fleetplane.domains.instances.wire import GROUP_SIZE_LIMIT
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.store import Draft

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with operator_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def operator(rig: Rig) -> Operator:
    return await rig.operator()


async def refused(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


# The configuration.


async def test_the_configuration_in_force_is_described(rig: Rig, operator: Operator) -> None:
    status = await operator.stub.GetConfigStatus(Empty())
    stored = await rig.objects.get(CONFIG_PATH)
    assert stored is not None
    assert status.etag == stored.etag
    assert status.size == len(stored.body)
    assert status.last_modified.ToNanoseconds() == stored.modified_at_ns


async def test_without_a_configuration_everything_says_so(tmp_path: Path) -> None:
    async with operator_rig(tmp_path, configured=False) as rig:
        operator = await rig.operator()
        assert (await refused(operator.stub.GetConfigStatus(Empty())))[0] is Code.FAILED_PRECONDITION
        assert (await refused(operator.groups()))[0] is Code.FAILED_PRECONDITION
        assert (await refused(operator.upsert("new", template="worker")))[0] is Code.FAILED_PRECONDITION
        code, text = await refused(operator.refresh())
        assert code is Code.INTERNAL
        assert text == "the configuration cannot be read", "the owner's log says where and why"


async def test_a_refresh_says_whether_anything_changed(rig: Rig, operator: Operator) -> None:
    same = await operator.refresh()
    assert (same.updated, same.prev_etag) == (False, same.etag)
    changed = document()
    changed["groups"][TENANT]["web"]["size"] = 5
    await rig.configure(changed)
    updated = await operator.refresh()
    assert (updated.updated, updated.prev_etag) == (True, same.etag)
    assert updated.etag != same.etag
    assert {group.key: group.size for group in await operator.groups()} == {"api": 1, "web": 5}


async def test_a_refresh_has_every_old_new_and_inhabited_group_looked_at(
    rig: Rig, operator: Operator
) -> None:
    await rig.add("ghost")
    changed = document()
    changed["groups"][TENANT] = {"web": {"template": "worker"}, "new": {"template": "worker"}}
    del changed["nat"]
    await rig.configure(changed)
    rig.looked.clear()
    await operator.refresh()
    assert set(rig.looked) == {
        (TENANT, "web"),
        (TENANT, "api"),
        (TENANT, "nat"),
        (TENANT, "new"),
        (TENANT, "ghost"),
        (OTHER, "secret"),
    }


async def test_a_bad_configuration_changes_nothing_and_is_explained_with_its_line(
    rig: Rig, operator: Operator
) -> None:
    before = await operator.groups()
    await rig.configure('{\n  "cluster": {"id": "lab"},\n  "shard": 7\n}')
    code, text = await refused(operator.refresh())
    assert code is Code.INVALID_ARGUMENT
    assert "at 1:1, 3:" in text
    assert await operator.groups() == before
    assert (await operator.stub.GetConfigStatus(Empty())).etag


async def test_a_configuration_that_is_no_json_is_explained_with_its_line(
    rig: Rig, operator: Operator
) -> None:
    await rig.configure("{\n\n  oops")
    code, text = await refused(operator.refresh())
    assert code is Code.INVALID_ARGUMENT
    assert "at 3:" in text


async def test_a_configuration_that_is_gone_is_a_failure_of_the_storage(rig: Rig, operator: Operator) -> None:
    await rig.objects.delete(CONFIG_PATH)
    assert (await refused(operator.refresh()))[0] is Code.INTERNAL
    assert len(await operator.groups()) == 2


# Reading groups.


async def test_groups_come_by_name_without_the_nat_group_and_without_other_tenants(
    rig: Rig, operator: Operator
) -> None:
    assert [group.key for group in await operator.groups()] == ["api", "web"]
    assert [group.key for group in await (await rig.operator(OTHER)).groups()] == ["secret"]


async def test_a_group_shows_its_configuration_and_its_managed_instances(
    rig: Rig, operator: Operator
) -> None:
    for provider in ("pm-9", "pm-2", ""):
        await rig.add(provider=provider)
    await rig.add(provider="pm-5", on_demand=True)
    gone = await rig.add(provider="pm-7")
    await rig.change(gone, deleting_at_ns=1)
    api, web = await operator.groups()
    assert (web.tenant, web.template, web.size, web.is_static) == (TENANT, "worker", 2, True)
    assert dict(web.vars) == {"Colour": "blue"}
    assert (web.actual_size, list(web.provider_ids)) == (2, ["pm-2", "pm-9"]), "not what is yet to come"
    assert (api.instance_type, api.actual_size, list(api.provider_ids)) == ("m5", 0, [])


async def test_the_etag_follows_the_configuration_and_not_the_instances(rig: Rig, operator: Operator) -> None:
    before = (await operator.groups())[1].etag
    await rig.add()
    assert (await operator.groups())[1].etag == before
    assert (await operator.upsert("web", size=3)).etag != before


# Changing groups.


async def test_a_configured_group_changes_size_type_and_vars_at_run_time(
    rig: Rig, operator: Operator
) -> None:
    status = await operator.upsert("web", size=7, instance_type="m6", vars={"Mood": "good"})
    assert (status.size, status.instance_type, status.is_static) == (7, "m6", True)
    assert dict(status.vars) == {"Colour": "blue", "Mood": "good"}
    assert (TENANT, "web") in rig.looked
    assert (await operator.groups())[1] == status


async def test_an_upsert_without_a_size_scales_to_nothing(operator: Operator) -> None:
    assert (await operator.upsert("web", vars={"Mood": "good"})).size == 0


async def test_vars_merge_and_empty_fields_stay_as_they_were(operator: Operator) -> None:
    await operator.upsert("new", template="worker", size=1, instance_type="m6", vars={"A": "1", "B": "1"})
    status = await operator.upsert("new", size=2, vars={"B": "2"})
    assert (status.template, status.size, status.instance_type) == ("worker", 2, "m6")
    assert dict(status.vars) == {"A": "1", "B": "2"}


async def test_a_new_group_takes_its_pool_from_its_template_and_ignores_args(
    rig: Rig, operator: Operator
) -> None:
    status = await operator.upsert("new", template="worker", size=1, args={"whatever": "it says"})
    assert (status.subnet_pool, status.is_static) == ("open", False)
    view = rig.groups.view(TENANT, "new")
    assert view is not None
    assert view.group.args == {}


@pytest.mark.parametrize(
    ("key", "config", "code", "words"),
    [
        ("", {"template": "worker"}, Code.INVALID_ARGUMENT, "key is required"),
        ("No Good", {"template": "worker"}, Code.INVALID_ARGUMENT, "No Good"),
        ("x" * 33, {"template": "worker"}, Code.INVALID_ARGUMENT, "xxx"),
        ("new", {"size": 1}, Code.INVALID_ARGUMENT, "template"),
        ("new", {"template": "wroker"}, Code.NOT_FOUND, "worker"),
        ("new", {"template": "worker", "subnet_pool": "none"}, Code.INVALID_ARGUMENT, "none"),
        ("new", {"template": "worker", "subnet_pool": "closed"}, Code.FAILED_PRECONDITION, "closed"),
        ("new", {"template": "walled"}, Code.FAILED_PRECONDITION, "closed"),
        ("new", {"template": "worker", "size": -1}, Code.INVALID_ARGUMENT, "size"),
        ("web", {"size": GROUP_SIZE_LIMIT + 1}, Code.INVALID_ARGUMENT, "size"),
        ("web", {"template": "walled"}, Code.FAILED_PRECONDITION, "template"),
        ("web", {"subnet_pool": "open"}, Code.FAILED_PRECONDITION, "subnet pool"),
        ("web", {"vars": {str(i): "" for i in range(257)}}, Code.INVALID_ARGUMENT, "vars"),
        ("nat", {"size": 0}, Code.FAILED_PRECONDITION, "server itself"),
    ],
)
async def test_what_the_rules_forbid_is_refused_and_changes_nothing(
    rig: Rig, operator: Operator, key: str, config: dict[str, object], code: grpc.StatusCode, words: str
) -> None:
    before = await operator.groups()
    found, text = await refused(operator.upsert(key, **config))
    assert found is code
    assert words in text
    assert await operator.groups() == before
    assert not rig.store.list(GROUP)


async def test_an_upsert_without_configuration_is_refused(operator: Operator) -> None:
    call = operator.stub.UpsertGroup(operator_pb2.UpsertGroupRequest(key="web"))
    assert (await refused(call))[0] is Code.INVALID_ARGUMENT


async def test_vars_cannot_pile_up_over_several_calls(operator: Operator) -> None:
    await operator.upsert("web", size=1, vars={f"A{i}": "" for i in range(200)})
    code, _ = await refused(operator.upsert("web", size=1, vars={f"B{i}": "" for i in range(200)}))
    assert code is Code.INVALID_ARGUMENT


async def test_a_tenant_has_a_bounded_number_of_groups_made_at_run_time(rig: Rig, operator: Operator) -> None:
    scope = tenant_scope(TENANT)
    names = [f"g{number}" for number in range(GROUPS_LIMIT)]
    from fleetplane.domains.instances.kinds import GroupOverride

    def fill(draft: Draft) -> None:
        for name in names:
            draft.put(GROUP, scope, name, spec=GroupOverride(template="worker"))

    touches = [GROUP.key(scope, name) for name in names]
    await rig.store.transact(fill, actor="test", action="fill", touches=touches)
    assert (await refused(operator.upsert("new", template="worker")))[0] is Code.RESOURCE_EXHAUSTED
    assert (await operator.upsert("g1", size=3)).size == 3


async def test_two_operators_who_change_a_group_at_once_both_have_their_way(
    rig: Rig, operator: Operator
) -> None:
    import asyncio

    await asyncio.gather(*(operator.upsert("web", size=4, vars={f"V{number}": "x"}) for number in range(16)))
    view = rig.groups.view(TENANT, "web")
    assert view is not None
    assert {f"V{number}" for number in range(16)} <= view.group.vars.keys()


# Deleting groups.


async def test_deleting_a_group_made_at_run_time_removes_it_and_may_be_repeated(
    rig: Rig, operator: Operator
) -> None:
    await operator.upsert("new", template="worker", size=1)
    rig.looked.clear()
    await operator.delete_group("new")
    assert [group.key for group in await operator.groups()] == ["api", "web"]
    await operator.delete_group("new")
    assert rig.looked == [(TENANT, "new")] * 2


async def test_deleting_a_configured_group_takes_back_what_was_changed(operator: Operator) -> None:
    before = await operator.groups()
    await operator.upsert("web", size=9, vars={"Mood": "bad"})
    await operator.delete_group("web")
    assert await operator.groups() == before


async def test_a_group_whose_template_went_can_still_be_deleted(rig: Rig, operator: Operator) -> None:
    await operator.upsert("new", template="walled", subnet_pool="open", size=1)
    changed = document()
    del changed["templates"]["walled"]
    await rig.configure(changed)
    await operator.refresh()
    assert (await refused(operator.upsert("new", size=2)))[0] is Code.FAILED_PRECONDITION
    await operator.delete_group("new")
    assert rig.groups.unresolved(TENANT, "new") == ""


async def test_one_tenants_changes_do_not_reach_anothers_group_of_the_same_name(
    rig: Rig, operator: Operator
) -> None:
    stranger = await rig.operator(OTHER)
    await stranger.upsert("web", template="worker", size=40)
    assert [group.size for group in await operator.groups()] == [1, 2]
    await stranger.delete_group("api")
    assert len(await operator.groups()) == 2


# Who may come in.


async def test_an_agents_certificate_is_refused(rig: Rig) -> None:
    agent = await rig.operator(role=ClientRole.AGENT)
    code, text = await refused(agent.groups())
    assert code is Code.PERMISSION_DENIED
    assert "required role operator, have role agent" in text


async def test_without_a_certificate_nobody_gets_in(rig: Rig) -> None:
    trust = grpc.ssl_channel_credentials(rig.authority.certificate_pem)
    async with grpc.aio.secure_channel(rig.address, trust) as channel:
        assert (await refused(Operator(channel).groups()))[0] is Code.UNAVAILABLE
