"""Another server takes the state over, keeps up, and is told when it has to begin again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from support.boards.boards_rig import BOSS, BoardsRig

from fleetplane.domains.boards.inventory.sync import Question, Synchronisation
from fleetplane.domains.boards.kinds import ClusterSpec
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument

REQUESTS_LIMIT = 200


@dataclass(slots=True)
class Follower:
    """What the other server does with the answers: replace everything, or merge."""

    control: Any
    page_size: int = 0
    cluster_id: int | None = None
    clusters: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By number: name and cluster, 0 for none."""
    revision: int = 0
    answers: list[pb.ClusterStateResponse] = field(default_factory=list)

    async def catch_up(self, *, full: bool = False) -> None:
        token, begun = "", False
        for _ in range(REQUESTS_LIMIT):
            answer = await self.control.SyncClusterState(
                pb.ClusterStateRequest(
                    controller_id="second",
                    known_revision=self.revision,
                    page_size=self.page_size,
                    full=full,
                    page_token=token,
                    cluster_id=self.cluster_id,
                )
            )
            self.answers.append(answer)
            if answer.full and not begun:
                self.clusters.clear()
                self.nodes.clear()
                begun = True
            self._merge(answer)
            token = answer.next_page_token
            if not token:
                self.revision, full = answer.revision, False
            if not answer.has_more:
                return
        raise AssertionError("there is no end to it")

    def _merge(self, answer: pb.ClusterStateResponse) -> None:
        for number in answer.deleted_node_ids:
            self.nodes.pop(number, None)
        for number in answer.deleted_cluster_ids:
            self.clusters.pop(number, None)
        for cluster in answer.clusters:
            self.clusters[cluster.id] = cluster.name
            for node in cluster.nodes:
                self.nodes[node.id] = (node.name, cluster.id)
        for node in answer.unassigned_nodes:
            self.nodes[node.id] = (node.name, 0)


def truth(rig: BoardsRig) -> tuple[dict[int, str], dict[int, tuple[str, int]]]:
    return (
        {int(cluster.name): cluster.spec.name for cluster in rig.core.clusters.all()},
        {int(one.name): (one.spec.name, one.spec.cluster_id or 0) for one in rig.core.boards.all()},
    )


async def follower(rig: BoardsRig, **how: Any) -> Follower:
    return Follower((await rig.controller()).control, **how)


async def fleet(rig: BoardsRig, *, clusters: int, boards: int) -> None:
    for index in range(clusters):
        await rig.core.clusters.create(ClusterSpec(name=f"c{index}"), actor=BOSS)
    for index in range(boards):
        cluster = index % (clusters + 1) or None
        await rig.core.boards.create(BoardFacts(name=f"b{index}", cluster_id=cluster), actor=BOSS)


async def fleet_more(rig: BoardsRig, *, boards: int) -> None:
    for index in range(boards):
        await rig.core.boards.create(BoardFacts(name=f"more-{index}"), actor=BOSS)


@pytest.mark.parametrize("page_size", [1, 7, 0])
async def test_a_snapshot_comes_whole_in_pages_of_any_size(rig: BoardsRig, page_size: int) -> None:
    await fleet(rig, clusters=3, boards=20)
    second = await follower(rig, page_size=page_size)

    await second.catch_up()

    assert (second.clusters, second.nodes) == truth(rig)
    assert all(answer.full for answer in second.answers)
    assert len(second.answers) == {1: 23, 7: 4, 0: 1}[page_size]
    assert second.answers[0].total_count == 3
    assert second.answers[0].leader_id


async def test_after_it_come_only_changes_and_deletions(rig: BoardsRig) -> None:
    await fleet(rig, clusters=2, boards=5)
    second = await follower(rig)
    await second.catch_up()
    second.answers.clear()
    await rig.core.boards.delete(2, actor=BOSS)
    await rig.core.boards.update(3, BoardFacts(name="renamed"), actor=BOSS)
    await rig.core.clusters.create(ClusterSpec(name="new"), actor=BOSS)

    await second.catch_up()

    (answer,) = second.answers
    assert not answer.full
    assert list(answer.deleted_node_ids) == [2]
    assert [node.name for cluster in answer.clusters for node in cluster.nodes] == ["renamed"]
    assert (second.clusters, second.nodes) == truth(rig)


async def test_changes_come_in_pages_that_go_on_where_the_last_one_ended(rig: BoardsRig) -> None:
    await fleet(rig, clusters=1, boards=1)
    second = await follower(rig, page_size=3)
    await second.catch_up()
    second.answers.clear()
    await fleet_more(rig, boards=10)
    await rig.core.boards.delete(1, actor=BOSS)

    await second.catch_up()

    assert [answer.has_more for answer in second.answers] == [True, True, True, False]
    assert not any(answer.full for answer in second.answers)
    revisions = [answer.revision for answer in second.answers]
    assert revisions == sorted(set(revisions))
    assert (second.clusters, second.nodes) == truth(rig)


async def test_nothing_new_is_an_empty_answer_at_the_present_revision(rig: BoardsRig) -> None:
    await fleet(rig, clusters=1, boards=1)
    second = await follower(rig)
    await second.catch_up()

    await second.catch_up()

    answer = second.answers[-1]
    assert (list(answer.clusters), answer.full, answer.has_more) == ([], False, False)
    assert answer.revision == rig.store.revision


async def test_a_revision_that_is_no_longer_kept_is_answered_with_a_snapshot_and_says_so(
    rig: BoardsRig,
) -> None:
    await fleet(rig, clusters=1, boards=3)
    second = await follower(rig, page_size=2)
    await second.catch_up()
    await rig.core.boards.delete(1, actor=BOSS)
    await rig.core.boards.delete(2, actor=BOSS)
    await rig.store.compact(rig.store.revision + 1)
    second.answers.clear()

    await second.catch_up()

    assert second.answers[0].full
    assert second.answers[0].reason == "COMPACTED"
    assert (second.clusters, second.nodes) == truth(rig)


async def test_a_revision_from_the_future_is_answered_with_a_snapshot_too(rig: BoardsRig) -> None:
    await fleet(rig, clusters=1, boards=1)
    second = await follower(rig)
    second.revision = rig.store.revision + 1000

    await second.catch_up()

    assert second.answers[0].reason == "COMPACTED"
    assert second.nodes == truth(rig)[1]


async def test_one_cluster_can_be_followed_and_a_node_that_moves_away_is_gone(rig: BoardsRig) -> None:
    await fleet(rig, clusters=2, boards=6)
    second = await follower(rig, cluster_id=1)
    await second.catch_up()
    assert set(second.clusters) == {1}
    assert {cluster for _, cluster in second.nodes.values()} == {1}
    moved = next(iter(second.nodes))

    await rig.core.boards.update(moved, BoardFacts(cluster_id=2), actor=BOSS)
    await rig.core.clusters.update(2, actor=BOSS, description="not ours")
    await second.catch_up()

    assert moved not in second.nodes
    assert set(second.clusters) == {1}


async def test_what_changes_while_a_snapshot_is_read_is_not_lost(rig: BoardsRig) -> None:
    await fleet(rig, clusters=2, boards=12)
    sync = Synchronisation(rig.store, rig.core.boards, rig.core.clusters)
    first = await sync.page(Question(page_size=5))
    await rig.core.boards.delete(1, actor=BOSS)  # on the page that was read
    await rig.core.boards.delete(12, actor=BOSS)  # on one that was not
    await rig.core.boards.create(BoardFacts(name="late"), actor=BOSS)
    seen = {int(board.name) for board in first.boards}
    page = first
    while page.has_more:
        page = await sync.page(Question(page_size=5, token=page.token))
        seen |= {int(board.name) for board in page.boards}

    rest = await sync.page(Question(known_revision=page.revision))

    assert page.revision == first.revision
    seen -= set(rest.deleted_boards)
    seen |= {int(board.name) for board in rest.boards}
    assert seen == {int(board.name) for board in rig.core.boards.all()}


@pytest.mark.parametrize("token", ["x", "1.2", "1.2.3.4", "-1.0.0", "99999999.0.0", "1" * 100])
async def test_a_page_token_that_is_not_ours_is_refused(rig: BoardsRig, token: str) -> None:
    sync = Synchronisation(rig.store, rig.core.boards, rig.core.clusters)

    with pytest.raises(InvalidArgument):
        await sync.page(Question(token=token))


async def test_a_cluster_that_is_not_there_cannot_be_followed(rig: BoardsRig) -> None:
    second = await follower(rig, cluster_id=9)

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await second.catch_up()

    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_follower_ends_where_the_server_is_after_any_history(rig: BoardsRig) -> None:
    chance = random.Random(7)
    second = await follower(rig, page_size=3)
    core = rig.core
    for step in range(120):
        boards, clusters = core.boards.all(), core.clusters.all()
        match chance.randrange(6):
            case 0:
                await core.clusters.create(ClusterSpec(name=f"c{step}"), actor=BOSS)
            case 1 | 2:
                cluster = int(chance.choice(clusters).name) if clusters else None
                await core.boards.create(BoardFacts(name=f"b{step}", cluster_id=cluster), actor=BOSS)
            case 3 if boards:
                await core.boards.delete(int(chance.choice(boards).name), actor=BOSS)
            case 4 if boards and clusters:
                facts = BoardFacts(cluster_id=int(chance.choice(clusters).name))
                await core.boards.update(int(chance.choice(boards).name), facts, actor=BOSS)
            case 5 if clusters:
                empty = [one for one in clusters if not core.boards.in_cluster(int(one.name))]
                if empty:
                    await core.clusters.delete(int(chance.choice(empty).name), actor=BOSS)
        if chance.random() < 0.2:
            await second.catch_up()
        if chance.random() < 0.05:
            await rig.store.compact(rig.store.revision + 1)

    await second.catch_up()

    assert (second.clusters, second.nodes) == truth(rig)
    assert len(truth(rig)[1]) > 5


async def test_an_answer_reads_as_a_list_of_clusters(rig: BoardsRig) -> None:
    await fleet(rig, clusters=2, boards=2)
    second = await follower(rig)
    await second.catch_up()

    listed = pi.ListClustersResponse.FromString(second.answers[0].SerializeToString())

    assert [cluster.name for cluster in listed.clusters] == ["c0", "c1"]
    assert listed.total_count == 2
