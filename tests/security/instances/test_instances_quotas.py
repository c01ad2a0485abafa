"""One tenant does not use up what the provider has for all."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from support.instances.configuration_samples import complaints, configuration
from support.instances.controller_rig import rig as controller_rig
from support.instances.instances_lab import document as lab_document
from support.instances.operator_rig import OTHER, TENANT, document, operator_rig

from fleetplane.domains.instances.kinds import GROUP, GroupOverride
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.quotas import InstanceUsage, TenantQuota

Code = grpc.StatusCode


async def refused(call: object) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


async def test_groups_of_a_tenant_together_want_no_more_than_it_may_have(tmp_path: Path) -> None:
    async with operator_rig(tmp_path, document(), tenant_instances=quotas.DEFAULT) as rig:
        greedy, other = await rig.operator(TENANT), await rig.operator(OTHER)
        code, text = await refused(greedy.upsert("mine", template="worker", size=100_000))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "may have 100 instances" in text
        assert "can have 97, not 100000" in text, "the document's own groups count"
        await greedy.upsert("mine", template="worker", size=97)
        assert (await refused(greedy.upsert("more", template="worker", size=1)))[0] is Code.RESOURCE_EXHAUSTED
        await greedy.upsert("mine", template="worker", size=90)
        await greedy.upsert("more", template="worker", size=7)
        await other.upsert("mine", template="worker", size=50)


async def test_a_tenant_at_its_bound_makes_no_instance_and_the_neighbour_does(tmp_path: Path) -> None:
    wanted = lab_document(2, shard={"tenant_quotas": {"acme": 3}})
    wanted["templates"]["worker"]["tenants"] = ["*"]
    wanted["groups"]["umbrella"] = {"workers": {"template": "worker", "size": 0}}
    async with controller_rig(tmp_path, wanted) as rig:
        await rig.advance(8)
        assert len(rig.provider.instances) == 2
        view = rig.groups.view("acme", "workers")
        assert view is not None
        await rig.machinery.launcher.create(view, on_demand=True)
        with pytest.raises(TenantQuota, match="has 3 instances, and may have 3"):
            await rig.machinery.launcher.create(view, on_demand=True)

        # A group that wants more than there may be, from before there was a bound.
        await rig.store.transact(
            lambda draft: draft.put(
                GROUP, "tenant/acme", "old", spec=GroupOverride(template="worker", size=50)
            ),
            actor="test",
            action="test",
            touches=[GROUP.key("tenant/acme", "old")],
        )
        await rig.store.transact(
            lambda draft: draft.put(GROUP, "tenant/umbrella", "workers", spec=GroupOverride(size=4)),
            actor="test",
            action="test",
            touches=[GROUP.key("tenant/umbrella", "workers")],
        )
        await rig.advance(8)
        mine = [one for one in rig.provider.instances.values() if one.tags["tenant"] == "acme"]
        theirs = [one for one in rig.provider.instances.values() if one.tags["tenant"] == "umbrella"]
        assert (len(mine), len(theirs)) == (3, 4)
        told = [text for tenant, _, _, text in rig.errors if tenant == "acme"]
        assert any("has 3 of the 3 instances" in text for text in told), "told that it comes close"
        assert any("may have 3" in text for text in told), "and when it is hit"
        assert not [text for tenant, _, _, text in rig.errors if tenant == "umbrella"]
        explained = rig.machinery.controller.reconciler.explain("acme/old")
        assert explained is not None
        assert {"TENANT_QUOTA", "QUOTA_NEAR"} <= {reason.code for reason in explained.reasons}


@pytest.mark.parametrize(
    ("used", "limit", "refuses"),
    [
        (InstanceUsage(standing=2, total=2), 3, False),
        (InstanceUsage(standing=3, total=3), 3, True),
        (InstanceUsage(standing=0, total=6), 3, True),
        (InstanceUsage(standing=2, total=5), 3, False),
        (InstanceUsage(standing=9, total=9), None, False),
        (InstanceUsage(), 0, True),
    ],
)
def test_those_that_leave_do_not_count_but_are_bounded_too(
    used: InstanceUsage, limit: int | None, refuses: bool
) -> None:
    if not refuses:
        quotas.check_creation("acme", used, limit)
        return
    with pytest.raises(TenantQuota):
        quotas.check_creation("acme", used, limit)


def test_a_group_may_always_become_smaller() -> None:
    sizes = {"web": 50, "db": 80}
    quotas.check_sizes("acme", sizes, "web", 49, 100)
    with pytest.raises(TenantQuota):
        quotas.check_sizes("acme", sizes, "web", 51, 100)


def test_the_document_may_say_more_or_less_than_the_setting() -> None:
    groups = {"acme": {"web": {"template": "worker", "size": 150}}}
    config = configuration(groups=groups, shard__tenant_quotas={"umbrella": 5})
    assert quotas.bound(config, "acme", 100) == 150, "what the document wants is meant"
    assert quotas.bound(config, "umbrella", 100) == 5
    assert quotas.bound(config, "third", 100) == 100
    assert quotas.bound(config, "third", 0) is None
    found = complaints(groups=groups, shard__tenant_quotas={"acme": 149, "No Name": 1})
    assert set(found) == {"shard.tenant_quotas.acme", 'shard.tenant_quotas["No Name"]'}
