"""Provisioning over a real sshd, with stand-ins for what would change this machine."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from support.boards.ssh_lab import TOKEN, SshLab, ssh_lab
from support.kernel.leaving import being_written

from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import KINDS, BoardRole, BoardState, ClusterSpec, ClusterState
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
)
from fleetplane.domains.boards.provisioning.engine import ProvisioningEngine, ProvisioningParts, told
from fleetplane.domains.boards.provisioning.operations import (
    OPERATION,
    Operation,
    Operations,
    Ownership,
    is_over,
)
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets, SshCredentials
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings

ACTOR = "operator/test"
PROVISION = ProvisioningOrder(action=ProvisioningAction.PROVISION)


class Rig:
    def __init__(self, store: Store, lab: SshLab) -> None:
        clock = SystemClock()
        master = MasterKey(bytes(32), clock)
        self.store, self.lab = store, lab
        self.boards, self.clusters = Boards(store), Clusters(store)
        self.operations = Operations(store)
        self.credentials, self.secrets = SshCredentials(store, master), ClusterSecrets(store, master)
        self.engine = ProvisioningEngine(
            ProvisioningParts(
                boards=self.boards,
                clusters=self.clusters,
                operations=self.operations,
                clock=clock,
                credentials=self.credentials,
                secrets=self.secrets,
                places=lab.places,
                policy=lab.policy,
            )
        )

    async def board(self, name: str, role: BoardRole = BoardRole.MASTER) -> int:
        made = await self.boards.create(BoardFacts(name=name, ip_address="127.0.0.1", role=role), actor=ACTOR)
        return int(made.name)

    async def cluster(self) -> int:
        return int((await self.clusters.create(ClusterSpec(name="home"), actor=ACTOR)).name)

    def order(self, board: int, **more: object) -> ProvisioningOrder:
        return replace(PROVISION, board_id=board, k3s_config=self.lab.options, **more)  # type: ignore[arg-type]

    async def ended(self, operation_id: str) -> ProvisioningAnswer:
        async with asyncio.timeout(60):
            while not is_over(self.operations.get(operation_id)):
                await asyncio.sleep(0.01)
        return told(self.operations.get(operation_id), "")

    async def provision(self, order: ProvisioningOrder) -> ProvisioningAnswer:
        return await self.ended((await self.engine.request(order, actor=ACTOR)).operation_id)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[SshLab]:
    with ssh_lab(tmp_path / "board") as lab:
        yield lab


def opened(folder: Path) -> AbstractAsyncContextManager[Store]:
    settings = StoreSettings(path=folder / "s.db")
    return Store.open(settings, kinds=(*KERNEL_KINDS, *KINDS, OPERATION), clock=SystemClock())


@asynccontextmanager
async def working(rig: Rig) -> AsyncIterator[None]:
    task = asyncio.create_task(rig.engine.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def rig_in(folder: Path, lab: SshLab) -> AsyncIterator[Rig]:
    async with opened(folder) as store:
        rig = Rig(store, lab)
        async with working(rig):
            yield rig


@pytest.fixture
async def rig(tmp_path: Path, lab: SshLab) -> AsyncIterator[Rig]:
    async with rig_in(tmp_path, lab) as rig:
        await rig.credentials.put("default", lab.credential(), actor=ACTOR)
        yield rig


async def test_a_server_is_installed_and_its_secrets_are_kept(rig: Rig, lab: SshLab) -> None:
    board, cluster = await rig.board("one"), await rig.cluster()
    ended = await rig.provision(rig.order(board, cluster_id=cluster))
    assert (ended.state, ended.reason) == (ProvisioningState.READY, "")
    assert {step.state for step in ended.steps} == {ProvisioningState.READY}
    assert lab.read("arguments").split()[0] == "server"
    assert "systemctl enable --now k3s" in lab.calls()
    assert "reboot" not in lab.calls(), "nothing was wrong with its boot loader"

    made = rig.boards.require(board)
    assert (status_of(made).state, made.spec.kube_version) == (BoardState.READY, "v1.31.4+k3s1")
    home = rig.clusters.require(cluster)
    assert home.status is not None
    assert (home.status.state, home.spec.master_endpoint) == (ClusterState.ACTIVE, "https://127.0.0.1:6443")
    assert await rig.secrets.token(cluster) == TOKEN
    assert "kind: Config" in await rig.secrets.kubeconfig(cluster)


async def test_no_secret_stands_in_the_log_in_the_record_or_in_the_files(
    rig: Rig, lab: SshLab, tmp_path: Path
) -> None:
    cluster = await rig.cluster()
    order = rig.order(await rig.board("one"), cluster_id=cluster, worker_ids=())
    first = await rig.provision(order)
    worker = await rig.board("two", BoardRole.WORKER)
    second = await rig.provision(rig.order(worker, cluster_id=cluster, role=BoardRole.WORKER))
    assert second.state is ProvisioningState.READY
    logged = [line async for line in rig.engine.follow(first.operation_id)]
    logged += [line async for line in rig.engine.follow(second.operation_id)]
    assert any("install.sh" in line for line in logged), "the log does tell what was run"
    assert TOKEN not in "\n".join(logged)
    assert TOKEN not in str(first) + str(second)
    assert TOKEN not in lab.read("arguments") + lab.read("environment")
    assert lab.read("etc/fleetplane-join-token") == TOKEN
    assert (lab.folder / "etc/fleetplane-join-token").stat().st_mode & 0o077 == 0
    for file in tmp_path.glob("s.db*"):
        assert TOKEN.encode() not in file.read_bytes()


async def test_a_worker_joins_the_server_that_came_before_it(rig: Rig, lab: SshLab) -> None:
    master, worker = await rig.board("one"), await rig.board("two", BoardRole.WORKER)
    cluster = await rig.cluster()
    ended = await rig.provision(rig.order(master, cluster_id=cluster, worker_ids=(worker,)))
    assert ended.state is ProvisioningState.READY
    assert lab.read("arguments").split()[0] == "agent"
    assert "K3S_URL=https://127.0.0.1:6443" in lab.read("environment")
    assert rig.boards.require(worker).spec.cluster_id == cluster


async def test_a_missing_memory_controller_is_turned_on_and_the_board_restarted(
    rig: Rig, lab: SshLab
) -> None:
    lab.write("controllers", "cpuset cpu io pids\n")
    ended = await rig.provision(rig.order(await rig.board("one")))
    assert ended.state is ProvisioningState.READY
    assert lab.read("cmdline.txt") == (
        "console=tty1 root=PARTUUID=1 rootwait cgroup_memory=1 cgroup_enable=memory\n"
    )
    assert lab.read("cmdline.txt.fleetplane-backup") == "console=tty1 root=PARTUUID=1 rootwait\n"
    assert "reboot" in lab.calls()


async def test_a_board_whose_controller_stays_off_is_not_installed(rig: Rig, lab: SshLab) -> None:
    lab.write("controllers", "cpuset cpu\n")
    lab.write("controllers.after", "cpuset cpu\n")
    board = await rig.board("one")
    ended = await rig.provision(rig.order(board))
    assert (ended.state, "still off" in ended.reason) == (ProvisioningState.FAILED, True)
    assert not (lab.folder / "arguments").exists()
    assert status_of(rig.boards.require(board)).state is BoardState.FAILED


async def test_a_failed_operation_goes_on_at_the_step_that_failed(rig: Rig, lab: SshLab) -> None:
    lab.write("broken", "")
    order = rig.order(await rig.board("one"), request_id="r-1")
    failed = await rig.provision(order)
    assert failed.state is ProvisioningState.FAILED
    assert "exit code 7: the download failed" in failed.reason
    assert [step.name.split("/")[1] for step in failed.steps if step.state is ProvisioningState.FAILED] == [
        "install"
    ]
    before = lab.calls()

    (lab.folder / "broken").unlink()
    again = await rig.engine.request(order, actor=ACTOR)
    assert again.operation_id == failed.operation_id
    ended = await rig.ended(again.operation_id)
    assert ended.state is ProvisioningState.READY
    assert before == [], "nothing was started before it failed"
    done = {step.name: step.started_at_ns for step in ended.steps}
    again_done = {step.name: step.started_at_ns for step in failed.steps if step.name.endswith("/packages")}
    assert again_done.items() <= done.items(), "what was done is not done again"
    third = await rig.engine.request(order, actor=ACTOR)
    assert (third.operation_id, third.state) == (failed.operation_id, ProvisioningState.READY)


async def test_a_rehearsal_names_every_command_and_touches_nothing(rig: Rig, lab: SshLab) -> None:
    board = await rig.board("one")
    answer = await rig.engine.request(rig.order(board, dry_run=True), actor=ACTOR)
    steps = {step.name: step.message for step in answer.steps}
    assert f"{board}/install" in steps
    assert steps[f"{board}/install"].endswith(
        f"--write-kubeconfig={lab.folder}/etc/k3s.yaml --write-kubeconfig-mode=600"
    )
    assert rig.operations.list() == []
    assert lab.calls() == []


async def test_only_looking_changes_nothing(rig: Rig, lab: SshLab) -> None:
    board = await rig.board("one")
    before = status_of(rig.boards.require(board)).state
    ended = await rig.provision(rig.order(board, action=ProvisioningAction.CHECK))
    assert ended.state is ProvisioningState.READY
    assert [step.name for step in ended.steps] == [f"{board}/preflight"]
    assert status_of(rig.boards.require(board)).state is before
    assert lab.calls() == []


async def test_taking_it_back_leaves_a_board_without_a_cluster(rig: Rig, lab: SshLab) -> None:
    board, cluster = await rig.board("one"), await rig.cluster()
    await rig.provision(rig.order(board, cluster_id=cluster))
    (lab.folder / "bin/k3s-uninstall.sh").write_text('#!/bin/sh\nrm -f "$LAB/bin/k3s"\n')
    (lab.folder / "bin/k3s-uninstall.sh").chmod(0o755)
    ended = await rig.provision(rig.order(board, action=ProvisioningAction.DEPROVISION))
    assert ended.state is ProvisioningState.ROLLED_BACK
    assert not (lab.folder / "data").exists()
    assert rig.boards.require(board).spec.cluster_id is None


async def test_a_host_whose_key_is_not_known_is_sent_nothing(rig: Rig, lab: SshLab) -> None:
    stranger = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    wrong = lab.credential(known_hosts=f"[127.0.0.1]:{lab.port} {stranger}")
    await rig.credentials.put("wrong", wrong, actor=ACTOR)
    ended = await rig.provision(rig.order(await rig.board("one"), credential_ref="wrong"))
    assert ended.state is ProvisioningState.FAILED
    assert "nothing was sent" in ended.reason
    assert lab.calls() == []


async def test_a_key_that_the_board_does_not_know_is_told(rig: Rig, lab: SshLab) -> None:
    other = lab.credential(key=asyncssh.generate_private_key("ssh-ed25519"))
    await rig.credentials.put("other", other, actor=ACTOR)
    ended = await rig.provision(rig.order(await rig.board("one"), credential_ref="other"))
    assert (ended.state, ended.reason) == (
        ProvisioningState.FAILED,
        f"{getpass.getuser()} may not log in at 127.0.0.1",
    )


async def test_nothing_begins_without_a_credential_a_board_or_a_server_to_join(rig: Rig) -> None:
    board = await rig.board("one", BoardRole.WORKER)
    with pytest.raises(NotFound, match="credential"):
        await rig.engine.request(rig.order(board, credential_ref="nope", role=BoardRole.MASTER), actor=ACTOR)
    with pytest.raises(NotFound):
        await rig.engine.request(rig.order(99), actor=ACTOR)
    with pytest.raises(FailedPrecondition, match="server to join"):
        await rig.engine.request(rig.order(board), actor=ACTOR)
    with pytest.raises(InvalidArgument):
        await rig.engine.request(PROVISION, actor=ACTOR)
    assert rig.operations.list() == []


async def test_two_operations_never_have_one_board_and_one_can_be_taken_back(rig: Rig, lab: SshLab) -> None:
    lab.write("slow", "")
    board = await rig.board("one")
    first = await rig.engine.request(rig.order(board), actor=ACTOR)
    lines = rig.engine.follow(first.operation_id)
    async with asyncio.timeout(60):
        async for line in lines:
            if line.endswith("begun"):
                break
    with pytest.raises(Conflict, match=first.operation_id):
        await rig.engine.request(rig.order(board), actor=ACTOR)
    answer = await rig.engine.request(
        ProvisioningOrder(action=ProvisioningAction.CANCEL, board_id=board), actor=ACTOR
    )
    assert (answer.operation_id, answer.state) == (first.operation_id, ProvisioningState.CANCELLED)
    assert rig.operations.at_board(board) is None, "it is free for others"


async def test_an_operation_can_be_taken_back_before_it_does_anything(rig: Rig) -> None:
    board = await rig.board("one")
    first = await rig.engine.request(rig.order(board), actor=ACTOR)
    await asyncio.sleep(0)  # there is a task for it, which has not had its first turn
    taking_back = ProvisioningOrder(action=ProvisioningAction.CANCEL, board_id=board)
    answer = await rig.engine.request(taking_back, actor=ACTOR)
    assert (answer.operation_id, answer.state) == (first.operation_id, ProvisioningState.CANCELLED)
    assert rig.operations.at_board(board) is None
    second = await rig.provision(rig.order(board))
    assert second.state is ProvisioningState.READY


async def test_an_operation_that_ends_while_it_is_taken_back_has_ended_as_it_did(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, go, writes = rig.operations.end, asyncio.Event(), list[asyncio.Task[Operation]]()

    async def in_order(name: str, state: ProvisioningState, **more: Any) -> Operation:
        """What is written goes on when its caller is cancelled, and comes before what is written later."""

        async def late() -> Operation:
            await go.wait()
            return await end(name, state, **more)

        if state is ProvisioningState.READY:
            writes.append(asyncio.create_task(late()))
            return await asyncio.shield(writes[0])
        await asyncio.wait(writes)
        return await end(name, state, **more)

    monkeypatch.setattr(rig.operations, "end", in_order)
    board = await rig.board("one")
    await rig.engine.request(rig.order(board), actor=ACTOR)
    async with asyncio.timeout(60):
        while not writes:
            await asyncio.sleep(0.01)
    taking_back = ProvisioningOrder(action=ProvisioningAction.CANCEL, board_id=board)
    cancelling = asyncio.create_task(rig.engine.request(taking_back, actor=ACTOR))
    for _ in range(20):
        await asyncio.sleep(0)  # whoever carries it out is cancelled
    go.set()
    async with asyncio.timeout(60):
        answer = await cancelling
    assert (answer.state, answer.message) == (ProvisioningState.READY, "it was over already")
    assert status_of(rig.boards.require(board)).state is BoardState.READY
    assert repr(rig.engine) == "<Engine running=0>"


async def test_an_operation_that_is_being_taken_back_is_not_begun(tmp_path: Path, lab: SshLab) -> None:
    async with opened(tmp_path) as store:
        rig = Rig(store, lab)
        await rig.credentials.put("default", lab.credential(), actor=ACTOR)
        board = await rig.board("one")
        first = await rig.engine.request(rig.order(board), actor=ACTOR)
        taking_back = ProvisioningOrder(action=ProvisioningAction.CANCEL, board_id=board)
        cancelling = asyncio.create_task(rig.engine.request(taking_back, actor=ACTOR))
        await asyncio.sleep(0)  # it is being written down
        async with working(rig):
            assert (await cancelling).state is ProvisioningState.CANCELLED
            assert repr(rig.engine) == "<Engine running=0>"
            async with asyncio.timeout(60):
                assert [line async for line in rig.engine.follow(first.operation_id)] == []


async def test_an_operation_goes_on_although_whoever_asked_for_it_left(rig: Rig) -> None:
    board = await rig.board("one")
    asking = asyncio.create_task(rig.engine.request(rig.order(board), actor=ACTOR))
    await being_written(rig.store)
    assert asking.cancel()  # while it is being written
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(60):
        while (operation := rig.operations.at_board(board)) is None:
            await asyncio.sleep(0.01)
    assert (await rig.ended(operation.name)).state is ProvisioningState.READY


async def test_a_server_that_is_started_again_goes_on_with_what_it_was_at(
    tmp_path: Path, lab: SshLab
) -> None:
    lab.write("slow", "")
    async with rig_in(tmp_path, lab) as rig:
        await rig.credentials.put("default", lab.credential(), actor=ACTOR)
        first = await rig.engine.request(rig.order(await rig.board("one")), actor=ACTOR)
        async with asyncio.timeout(60):
            async for line in rig.engine.follow(first.operation_id):
                if line.endswith("begun"):
                    break
    (lab.folder / "slow").unlink()
    async with rig_in(tmp_path, lab) as rig:
        ended = await rig.ended(first.operation_id)
        assert ended.state is ProvisioningState.READY


async def test_one_of_several_servers_does_everything_under_the_boards_lock(
    rig: Rig, lab: SshLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = Ownership(fence=Fence(lineage="l", revision=7))

    async def own(_name: str) -> Ownership:
        return owned

    monkeypatch.setattr(rig.operations, "own", own)
    lab.write("controllers", "cpuset cpu io pids\n")
    cluster = await rig.cluster()
    ended = await rig.provision(rig.order(await rig.board("one"), cluster_id=cluster))
    assert (ended.state, ended.reason) == (ProvisioningState.READY, "")
    assert "reboot" in lab.calls()
    assert lab.read("mark").split() == ["l", "7", ended.operation_id]
    worker = await rig.board("two", BoardRole.WORKER)
    joined = await rig.provision(rig.order(worker, cluster_id=cluster))
    assert joined.state is ProvisioningState.READY
    assert lab.read("etc/fleetplane-join-token") == TOKEN

    # Another server has been at the board since: this one does nothing more, and says nothing of it.
    lab.write("mark", "l 8 other\n")
    late = await rig.engine.request(rig.order(worker, cluster_id=cluster), actor=ACTOR)
    calls = lab.calls()
    async with asyncio.timeout(60):
        while repr(rig.engine) != "<Engine running=0>" or late.operation_id in rig.engine._waiting:
            await asyncio.sleep(0.01)
    assert not is_over(rig.operations.get(late.operation_id))
    assert lab.calls() == calls
