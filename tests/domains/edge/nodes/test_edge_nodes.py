"""What operators change about daemons, and what they cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.edge.edge_identity_rig import BOSS, OTHER, TENANT, Rig, identity_rig

from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import thumbprint
from fleetplane.domains.edge.kinds import Desired, check_tenant
from fleetplane.domains.edge.nodes.registry import TAGS_LIMIT, check_tags, shown_name
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.values.ids import check_uuid


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


async def test_tags_are_replaced_added_and_removed_each_once(rig: Rig) -> None:
    nodes, node_id = rig.side.nodes, (await rig.enrolled()).node_id
    assert (await nodes.set_tags(TENANT, node_id, ["b", "a", "b"], actor=BOSS)).spec.tags == ("b", "a")
    changed = await nodes.change_tags(TENANT, node_id, add=["c", "a"], remove=["b"], actor=BOSS)
    assert changed.spec.tags == ("a", "c")


async def test_a_name_is_shown_and_without_one_the_beginning_of_the_id(rig: Rig) -> None:
    nodes, node_id = rig.side.nodes, (await rig.enrolled()).node_id
    assert shown_name(nodes.get(TENANT, node_id)) == f"edge-{node_id[:8]}"
    assert shown_name(await nodes.rename(TENANT, node_id, " web-1 ", actor=BOSS)) == "web-1"
    for bad in ("", "   ", "x" * 129, "a\nb"):
        with pytest.raises(InvalidArgument):
            await nodes.rename(TENANT, node_id, bad, actor=BOSS)


async def test_what_a_daemon_should_do_is_written_down(rig: Rig) -> None:
    nodes, node_id = rig.side.nodes, (await rig.enrolled()).node_id
    node = await nodes.set_desired(TENANT, node_id, Desired.SHUTDOWN, grace_seconds=5, actor=BOSS)
    assert (node.spec.desired, node.spec.shutdown_grace_seconds) == (Desired.SHUTDOWN, 5)
    with pytest.raises(InvalidArgument):
        await nodes.set_desired(TENANT, node_id, Desired.ACTIVE, grace_seconds=-1, actor=BOSS)


async def test_anothers_node_does_not_exist(rig: Rig) -> None:
    nodes, node_id = rig.side.nodes, (await rig.enrolled(TENANT)).node_id
    with pytest.raises(NotFound):
        nodes.get(OTHER, node_id)
    for change in (
        nodes.set_tags(OTHER, node_id, ["x"], actor=BOSS),
        nodes.rename(OTHER, node_id, "x", actor=BOSS),
        nodes.set_desired(OTHER, node_id, Desired.DRAINING, actor=BOSS),
    ):
        with pytest.raises(NotFound):
            await change
    assert not nodes.list(OTHER)
    assert [node.name for node in nodes.list()] == [node_id]


async def test_a_revoked_node_stays_visible_and_changes_no_more(rig: Rig) -> None:
    nodes, node_id = rig.side.nodes, (await rig.enrolled()).node_id
    await nodes.revoke(TENANT, node_id, reason="old", actor=BOSS)
    assert nodes.get(TENANT, node_id).spec.revoked_at_ns is not None
    with pytest.raises(FailedPrecondition):
        await nodes.set_tags(TENANT, node_id, ["x"], actor=BOSS)


async def test_everything_that_happens_to_a_node_is_audited(rig: Rig) -> None:
    machine = await rig.enrolled()
    await rig.side.nodes.set_tags(TENANT, machine.node_id, ["x"], actor=BOSS)
    await machine.rotate(machine.wish(machine.key))
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="done", actor=BOSS)
    rows = [row async for row in rig.store.audit()]
    assert audit.verify(rows, rig.store.audit_head()).intact
    actions = [audit.read(row).action for row in rows]
    wanted = ["edge.issue_enrollment", "edge.enrol", "edge.tag", "edge.refresh_token", "edge.revoke"]
    assert [action for action in actions if action.startswith("edge.")] == wanted


async def test_tokens_may_live_longer_than_the_usual_limit_if_the_policy_says_so(tmp_path: Path) -> None:
    policy = IdentityPolicy(node_token_seconds=365 * 86_400.0)
    async with identity_rig(tmp_path, policy=policy) as rig:
        machine = await rig.enrolled()
        rig.clock.ahead_seconds = 364 * 86_400
        assert rig.side.tokens.verify_node(machine.token).node_id == machine.node_id


async def test_used_and_expired_tokens_of_workers_are_swept(rig: Rig) -> None:
    await rig.worker()
    assert await rig.side.worker_admission.sweep() == 0
    rig.clock.ahead_seconds = 601
    assert await rig.side.worker_admission.sweep() == 1


@pytest.mark.parametrize("tags", [[""], ["a b"], ["a,b"], ["k=v"], ["x" * 65], [str(n) for n in range(65)]])
def test_what_selectors_could_not_name_is_no_tag(tags: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        check_tags(tags)
    assert len(tags) in (1, TAGS_LIMIT + 1)


@pytest.mark.parametrize("tenant", ["", "-a", "a-", "A", "a_b", "x" * 64, "a/b", "a\n"])
def test_a_tenant_is_spelled_like_a_host_names_label(tenant: str) -> None:
    assert check_tenant("u-1") == "u-1"
    assert check_tenant("x" * 63)
    with pytest.raises(InvalidArgument):
        check_tenant(tenant)


@pytest.mark.parametrize(
    "text", ["", "1", "11111111222243338444555555555555", "urn:uuid:" + "1" * 32, "\0" * 36]
)
def test_only_hyphenated_uuids_are_ids(text: str) -> None:
    assert check_uuid("AAAAAAAA-2222-4333-8444-555555555555", field="id").startswith("aaaa")
    with pytest.raises(InvalidArgument):
        check_uuid(text, field="id")


def test_a_thumbprint_is_the_one_that_everybody_computes() -> None:
    # The example of RFC 8037, appendix A.3.
    key = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert thumbprint(key) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
