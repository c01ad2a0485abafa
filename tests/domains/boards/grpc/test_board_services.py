"""Both services as operators and boards use them, over real mTLS with the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig, until

from fleetplane.domains.boards.grpc.pins import PiControllerService
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.inventory.liveness import Word
from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board, BoardSilence, BoardState, ClusterSpec
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
    ProvisioningStep,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import SettingsError, Unavailable, Unimplemented
from fleetplane.rpc import CallContext

CODE = grpc.StatusCode


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


class Operator:
    """The original service, with an operator's token on each call."""

    def __init__(self, stub: Any, metadata: Any) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, method: str) -> Any:
        return lambda request: getattr(self._stub, method)(request, metadata=self._metadata)


async def operator(rig: BoardsRig, role: str = "boards.admin") -> Operator:
    return Operator(*await rig.operator(role))


# Clusters.


async def test_the_life_of_a_cluster(rig: BoardsRig) -> None:
    admin = await operator(rig)

    made = await admin.CreateCluster(pi.CreateClusterRequest(name="lab", description="d", version="1.31"))
    changed = await admin.UpdateCluster(
        pi.UpdateClusterRequest(id=made.id, description="", status=pi.CLUSTER_STATUS_ACTIVE)
    )
    await rig.core.boards.create(BoardFacts(name="pi-1", cluster_id=made.id), actor=BOSS)
    shown = await admin.GetCluster(pi.GetClusterRequest(id=made.id))
    listed = await admin.ListClusters(pi.ListClustersRequest())

    assert made.status == pi.CLUSTER_STATUS_PENDING
    assert (changed.name, changed.description, changed.version) == ("lab", "", "1.31")
    assert changed.status == pi.CLUSTER_STATUS_ACTIVE
    assert [node.name for node in shown.nodes] == ["pi-1"]
    assert (listed.total_count, list(listed.clusters)) == (1, [shown])
    assert await refused(admin.DeleteCluster(pi.DeleteClusterRequest(id=made.id))) is CODE.FAILED_PRECONDITION
    await admin.UpdateNode(pi.UpdateNodeRequest(id=1, cluster_id=0))
    assert (await admin.DeleteCluster(pi.DeleteClusterRequest(id=made.id))).success


async def test_a_cluster_s_name_is_its_own_until_it_is_deleted(rig: BoardsRig) -> None:
    admin = await operator(rig)
    request = pi.CreateClusterRequest(name="lab")
    first = await admin.CreateCluster(request)
    second = await admin.CreateCluster(pi.CreateClusterRequest(name="other"))

    rename = pi.UpdateClusterRequest(id=second.id, name="lab")
    assert await refused(admin.CreateCluster(request)) is CODE.ALREADY_EXISTS
    assert await refused(admin.UpdateCluster(rename)) is CODE.ALREADY_EXISTS
    await admin.DeleteCluster(pi.DeleteClusterRequest(id=first.id))
    again = await admin.CreateCluster(request)
    assert again.id == 3


async def test_what_is_not_there_is_not_found_and_what_is_wrong_is_named(rig: BoardsRig) -> None:
    admin = await operator(rig)

    assert await refused(admin.GetCluster(pi.GetClusterRequest(id=9))) is CODE.NOT_FOUND
    assert await refused(admin.UpdateCluster(pi.UpdateClusterRequest(id=9))) is CODE.NOT_FOUND
    assert await refused(admin.DeleteCluster(pi.DeleteClusterRequest(id=9))) is CODE.NOT_FOUND
    assert await refused(admin.CreateCluster(pi.CreateClusterRequest())) is CODE.INVALID_ARGUMENT
    assert await refused(admin.GetNode(pi.GetNodeRequest(id=9))) is CODE.NOT_FOUND
    assert await refused(admin.DeleteNode(pi.DeleteNodeRequest(id=9))) is CODE.NOT_FOUND
    assert await refused(admin.UpdateNode(pi.UpdateNodeRequest(name="x"))) is CODE.INVALID_ARGUMENT
    assert await refused(admin.CreateNode(pi.CreateNodeRequest())) is CODE.INVALID_ARGUMENT
    stray = pi.CreateNodeRequest(name="pi-1", cluster_id=9)
    assert await refused(admin.CreateNode(stray)) is CODE.NOT_FOUND
    unknown = pi.UpdateNodeRequest.FromString(b"\x08\x01\x28\x63")  # status 99
    assert await refused(admin.UpdateNode(unknown)) is CODE.INVALID_ARGUMENT


# Nodes.


async def test_the_life_of_a_node_that_an_operator_writes_down(rig: BoardsRig) -> None:
    admin = await operator(rig)
    made = await admin.CreateNode(
        pi.CreateNodeRequest(
            name="pi-1", mac_address="DC:A6:32:00:00:01", role=pi.NODE_ROLE_MASTER, memory=8 << 30
        )
    )

    changed = await admin.UpdateNode(
        pi.UpdateNodeRequest(
            id=made.id, status=pi.NODE_STATUS_MAINTENANCE, model="", memory=0, node_name="n1"
        )
    )

    assert (made.status, made.role) == (pi.NODE_STATUS_DISCOVERED, pi.NODE_ROLE_MASTER)
    assert made.mac_address == "dc:a6:32:00:00:01"
    assert (changed.status, changed.memory, changed.node_name) == (
        pi.NODE_STATUS_MAINTENANCE,
        8 << 30,
        "n1",
    )
    duplicate = pi.CreateNodeRequest(name="pi-2", mac_address="dc-a6-32-00-00-01")
    assert await refused(admin.CreateNode(duplicate)) is CODE.ALREADY_EXISTS
    assert (await admin.DeleteNode(pi.DeleteNodeRequest(id=made.id))).success
    assert (await admin.CreateNode(duplicate)).id == 2


async def test_pages_hold_every_node_once_and_the_caller_first(rig: BoardsRig) -> None:
    for index in range(120):
        await rig.core.boards.create(BoardFacts(name=f"other-{index}"), actor=BOSS)
    member = await rig.join("me")

    pages = [
        await member.original.ListNodes(pi.ListNodesRequest(page=page, page_size=50)) for page in (1, 2, 3, 4)
    ]

    ids = [node.id for page in pages for node in page.nodes]
    assert [len(page.nodes) for page in pages] == [50, 50, 21, 0]
    assert ids == [member.number, *range(1, 121)]
    assert {page.total_count for page in pages} == {121}


async def test_nodes_are_filtered_by_cluster_and_status(rig: BoardsRig) -> None:
    cluster = await rig.core.clusters.create(ClusterSpec(name="lab"), actor=BOSS)
    await rig.core.boards.create(BoardFacts(name="in", cluster_id=int(cluster.name)), actor=BOSS)
    await rig.core.boards.create(BoardFacts(name="out"), actor=BOSS)
    await rig.join("up")
    admin = await operator(rig)

    async def names(**wanted: Any) -> list[str]:
        return [node.name for node in (await admin.ListNodes(pi.ListNodesRequest(**wanted))).nodes]

    assert await names() == ["in", "out", "up"]
    assert await names(cluster_id=1) == ["in"]
    assert await names(cluster_id=0) == ["out", "up"]
    assert await names(status=pi.NODE_STATUS_READY) == ["up"]


async def test_a_certified_agent_that_creates_itself_exists_already(rig: BoardsRig) -> None:
    member = await rig.join("me")
    request = pi.CreateNodeRequest(name="someone-else")

    assert await refused(member.original.CreateNode(request)) is CODE.ALREADY_EXISTS


async def test_health_over_mtls_is_a_sign_of_life(rig: BoardsRig) -> None:
    member = await rig.join("me")
    await rig.core.boards.silence(member.number, BoardSilence.DEAD, last_seen_at_ns=None)
    assert rig.state(member.number) == BoardState.UNKNOWN

    answer = await member.original.Health(pi.HealthRequest())

    assert answer.status == "ok"
    assert answer.version not in ("", "dev")
    assert rig.state(member.number) == BoardState.READY


async def test_the_server_says_what_it_runs_on(rig: BoardsRig) -> None:
    info = await (await operator(rig, "boards.viewer")).GetSystemInfo(pi.SystemInfoRequest())

    assert info.go_os == "linux"
    assert info.cpu_count > 0
    assert info.memory.alloc > 1 << 20


# Roles.


@pytest.mark.parametrize(
    ("role", "method", "request_", "code"),
    [
        ("boards.viewer", "ListNodes", pi.ListNodesRequest(), None),
        ("boards.viewer", "CreateCluster", pi.CreateClusterRequest(name="x"), CODE.PERMISSION_DENIED),
        ("boards.viewer", "UpdateNode", pi.UpdateNodeRequest(id=1), CODE.PERMISSION_DENIED),
        ("boards.operator", "CreateCluster", pi.CreateClusterRequest(name="x"), None),
        ("boards.operator", "DeleteCluster", pi.DeleteClusterRequest(id=1), CODE.PERMISSION_DENIED),
        ("boards.operator", "DeleteNode", pi.DeleteNodeRequest(id=1), CODE.PERMISSION_DENIED),
        ("boards.admin", "DeleteNode", pi.DeleteNodeRequest(id=1), CODE.NOT_FOUND),
        ("proxies.admin", "ListNodes", pi.ListNodesRequest(), CODE.PERMISSION_DENIED),
    ],
)
async def test_each_role_may_do_its_part(
    rig: BoardsRig, role: str, method: str, request_: Any, code: grpc.StatusCode | None
) -> None:
    call = getattr(await operator(rig, role), method)(request_)

    assert (await refused(call) if code is not None else await call and None) is code


async def test_an_operator_s_certificate_is_as_good_as_a_token(rig: BoardsRig) -> None:
    viewer = await rig.certified(["fleetplane://role/boards.viewer"], name="eve")

    assert (await viewer.original.ListNodes(pi.ListNodesRequest())).total_count == 0
    assert await refused(viewer.control.RegisterNode(pb.NodeRegistration(name="x"))) is CODE.PERMISSION_DENIED


async def test_a_token_for_another_scope_opens_nothing(rig: BoardsRig) -> None:
    for scope, code in (("boards", None), ("tenant/acme", CODE.PERMISSION_DENIED)):
        call = Operator(*await rig.operator(scope=scope)).ListNodes(pi.ListNodesRequest())
        assert (await refused(call) if code is not None else await call and None) is code


async def test_only_controllers_follow_the_state(rig: BoardsRig) -> None:
    member = await rig.join("me")
    admin_like = await rig.certified(["fleetplane://role/boards.admin"])

    for caller in (member, admin_like):
        call = caller.control.SyncClusterState(pb.ClusterStateRequest())
        assert await refused(call) is CODE.PERMISSION_DENIED


# Reports.


async def test_a_report_moves_the_state_and_ends_a_silence(rig: BoardsRig) -> None:
    member = await rig.join("me")

    await member.control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_NOT_READY, sequence=1))
    assert rig.state(member.number) == BoardState.NOT_READY
    await member.control.ReportHealth(pb.HealthReport(sequence=2))  # unspecified keeps it
    assert rig.state(member.number) == BoardState.NOT_READY
    await member.control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_READY, sequence=3))
    assert rig.state(member.number) == BoardState.READY


async def test_a_report_that_was_overtaken_is_ignored_until_the_next_boot(rig: BoardsRig) -> None:
    member = await rig.join("me")
    bad, good = pi.NODE_STATUS_FAILED, pi.NODE_STATUS_READY

    await member.control.ReportHealth(pb.HealthReport(status=good, sequence=5, boot_id="a"))
    await member.control.ReportHealth(pb.HealthReport(status=bad, sequence=5, boot_id="a"))
    await member.control.ReportHealth(pb.HealthReport(status=bad, sequence=4, boot_id="a"))
    assert rig.state(member.number) == BoardState.READY

    await member.control.ReportHealth(pb.HealthReport(status=bad, sequence=1, boot_id="b"))
    assert rig.state(member.number) == BoardState.FAILED


async def test_a_report_that_comes_while_a_later_one_is_taken_in_is_ignored(
    rig: BoardsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, controller = await rig.join("me"), rig.core.controller
    heard, written, go = controller.heard, asyncio.Event(), asyncio.Event()

    async def told_late(number: int, word: Word, *, actor: str) -> Board:
        board = await heard(number, word, actor=actor)
        if word.state is BoardState.MAINTENANCE:
            written.set()
            await go.wait()
        return board

    monkeypatch.setattr(controller, "heard", told_late)
    goodbye = pb.HealthReport(status=pi.NODE_STATUS_MAINTENANCE, sequence=2)
    leaving = asyncio.ensure_future(member.control.ReportHealth(goodbye))
    async with asyncio.timeout(60):
        await written.wait()
    await member.control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_READY, sequence=1))
    go.set()
    await leaving
    assert rig.state(member.number) == BoardState.MAINTENANCE


async def test_a_report_that_could_not_be_taken_in_may_be_sent_again(
    rig: BoardsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await rig.join("me")
    report = pb.HealthReport(status=pi.NODE_STATUS_NOT_READY, sequence=1)

    async def fails(*_given: object, **_named: object) -> NoReturn:
        raise Unavailable("the store is full")

    with monkeypatch.context() as patched:
        patched.setattr(rig.core.controller, "heard", fails)
        assert await refused(member.control.ReportHealth(report)) is CODE.UNAVAILABLE
    await member.control.ReportHealth(report)
    assert rig.state(member.number) == BoardState.NOT_READY


async def test_a_registration_starts_the_count_anew(rig: BoardsRig) -> None:
    member = await rig.join("me")
    await member.control.ReportHealth(pb.HealthReport(sequence=9))
    await member.control.RegisterNode(pb.NodeRegistration())

    await member.control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_FAILED, sequence=1))

    assert rig.state(member.number) == BoardState.FAILED


async def test_what_a_board_checks_is_kept_when_it_changes_and_not_with_each_figure(rig: BoardsRig) -> None:
    member = await rig.join("me")

    async def report(status: str, message: str) -> None:
        check = pb.HealthCheckResult(name="disk", status=status, message=message)
        await member.control.ReportHealth(
            pb.HealthReport(checks=[check], version="2.0", kernel_version="6.6")
        )

    await report("OK", "80 % full")
    revision = rig.store.revision
    await report("OK", "81 % full")
    assert rig.store.revision == revision
    await report("DEGRADED", "95 % full")

    board = rig.board(member.number)
    (condition,) = board.conditions
    assert (condition.type, condition.status, condition.message) == ("disk", "DEGRADED", "95 % full")
    assert (status_of(board).agent_version, board.spec.kernel_version) == ("2.0", "6.6")


async def test_a_service_on_a_board_reports_beside_the_board(rig: BoardsRig) -> None:
    member = await rig.join("me")

    await member.control.ReportHealth(
        pb.HealthReport(source="k3s", status=pi.NODE_STATUS_FAILED, status_text="crash loop")
    )

    (condition,) = rig.board(member.number).conditions
    assert (condition.type, condition.status) == ("k3s", "crash loop")
    assert rig.state(member.number) == BoardState.READY


async def test_reported_metrics_are_kept_but_not_what_could_not_be_read(rig: BoardsRig) -> None:
    member = await rig.join("me")
    telemetry = rig.kernel.telemetry
    assert telemetry is not None
    at_ns = rig.kernel.clock.now_ns()
    metrics = pb.SystemMetrics(
        cpu_usage=15.2,
        disk_usage=40.0,
        unavailable=["temperature"],
        timestamp=Timestamp(seconds=at_ns // 10**9),
        interfaces=[pb.NetworkInterface(name="eth0", bytes_sent=7)],
    )

    await member.control.ReportHealth(pb.HealthReport(metrics=metrics))
    await telemetry.flush()

    async def last(series: str) -> list[float]:
        found = await telemetry.latest(SCOPE, series, from_ns=at_ns - 10**10, to_ns=at_ns + 10**10)
        return [sample.value for sample in found.get(str(member.number), ())]

    assert await last("cpu_usage") == [15.2]
    assert await last("temperature") == []
    assert len(await last("network/eth0/bytes_sent")) == 1


@pytest.mark.parametrize(
    "report",
    [
        pb.HealthReport(checks=[pb.HealthCheckResult(name="x", status="OK")] * 33),
        pb.HealthReport(checks=[pb.HealthCheckResult(status="OK")]),
        pb.HealthReport(version="v" * 300),
        pb.HealthReport(source="s" * 65),
        pb.HealthReport.FromString(b"\x28\x63"),
    ],
)
async def test_a_report_beyond_its_bounds_changes_nothing(rig: BoardsRig, report: pb.HealthReport) -> None:
    member = await rig.join("me")
    revision = rig.store.revision

    assert await refused(member.control.ReportHealth(report)) is CODE.INVALID_ARGUMENT
    assert rig.store.revision == revision


# Metrics of the original agent.


def _sample(node_id: str = "", usage: float = 10.0) -> pi.AgentMetricsRequest:
    metrics = pi_agent.SystemMetrics(cpu=pi_agent.CPUMetrics(usage_percent=usage))
    return pi.AgentMetricsRequest(node_id=node_id, metrics=metrics)


async def test_a_stream_of_metrics_is_taken_to_its_end(rig: BoardsRig) -> None:
    member = await rig.join("me")

    async def samples() -> AsyncIterator[pi.AgentMetricsRequest]:
        for node_id in ("", "1", "me"):
            yield _sample(node_id)

    answer = await member.original.StreamAgentMetrics(samples())

    assert (answer.success, answer.message) == (True, "3 samples")
    telemetry = rig.kernel.telemetry
    assert telemetry is not None
    await telemetry.flush()
    assert telemetry.statistics().written >= 3


async def test_a_stream_for_another_board_is_refused(rig: BoardsRig) -> None:
    member = await rig.join("me")
    await rig.join("other")

    for node_id in ("2", "other", "nobody"):
        call = member.original.StreamAgentMetrics(iter([_sample(node_id)]))
        assert await refused(call) is CODE.PERMISSION_DENIED


async def test_revoking_a_certificate_ends_its_open_stream(rig: BoardsRig) -> None:
    member = await rig.join("me")
    call = member.original.StreamAgentMetrics()
    await call.write(_sample())
    await until(lambda: rig.core.sessions.get(str(member.number), "metrics"))

    await rig.kernel.revocations.revoke(serial=rig.serial_of(member), reason="lost", actor=BOSS)

    async with asyncio.timeout(60):
        assert await call.code() is CODE.UNAUTHENTICATED


async def test_a_newer_stream_of_the_same_board_ends_the_older(rig: BoardsRig) -> None:
    member = await rig.join("me")
    older = member.original.StreamAgentMetrics()
    await older.write(_sample())
    first = await until(lambda: rig.core.sessions.get(str(member.number), "metrics"))
    newer = member.original.StreamAgentMetrics()
    await newer.write(_sample())

    async with asyncio.timeout(60):
        assert await older.code() is CODE.ABORTED
    assert first.superseded
    await newer.done_writing()
    assert (await newer).success


# Provisioning.


class Recorder:
    def __init__(self) -> None:
        self.orders: list[tuple[ProvisioningOrder, str]] = []

    async def request(self, order: ProvisioningOrder, *, actor: str) -> ProvisioningAnswer:
        self.orders.append((order, actor))
        step = ProvisioningStep(name="cgroup", state=ProvisioningState.PREFLIGHT, started_at_ns=10**9)
        return ProvisioningAnswer(success=True, message="accepted", operation_id="op-1", steps=[step])


async def test_provisioning_is_handed_on_under_both_names(tmp_path: Path) -> None:
    recorder = Recorder()
    async with boards_rig(tmp_path, provisioner=recorder) as rig:
        await rig.core.clusters.create(ClusterSpec(name="lab"), actor=BOSS)
        await rig.core.boards.create(BoardFacts(name="pi-1"), actor=BOSS)
        admin = await operator(rig)
        controller = await rig.controller()

        one = await admin.ProvisionNode(pi.ProvisionNodeRequest(id=1, cluster_id=1))
        two = await admin.DeprovisionNode(pi.DeprovisionNodeRequest(id=1))
        three = await controller.control.RequestProvisioning(
            pb.ProvisioningRequest(
                node_id=1,
                cluster_id=1,
                action=pb.ProvisioningRequest.CHECK,
                k3s_config={"disable": "traefik"},
            )
        )
        missing = controller.control.RequestProvisioning(pb.ProvisioningRequest(node_id=9))
        nothing = controller.control.RequestProvisioning(pb.ProvisioningRequest())

        assert await refused(missing) is CODE.NOT_FOUND
        assert await refused(nothing) is CODE.INVALID_ARGUMENT
        assert (one.success, two.success, three.operation_id) == (True, True, "op-1")
        assert three.state == pb.ProvisioningStep.QUEUED
        assert three.steps[0].state == pb.ProvisioningStep.PREFLIGHT
        assert [order.action for order, _ in recorder.orders] == [
            ProvisioningAction.PROVISION,
            ProvisioningAction.DEPROVISION,
            ProvisioningAction.CHECK,
        ]
        assert recorder.orders[0][0].cluster_id == 1
        assert recorder.orders[2] == (
            ProvisioningOrder(
                action=ProvisioningAction.CHECK, board_id=1, cluster_id=1, k3s_config={"disable": "traefik"}
            ),
            "board-controller/second",
        )


async def test_a_board_whose_address_nobody_knows_is_not_provisioned(rig: BoardsRig) -> None:
    await rig.core.boards.create(BoardFacts(name="pi-1"), actor=BOSS)
    call = (await operator(rig)).ProvisionNode(pi.ProvisionNodeRequest(id=1))

    assert await refused(call) is CODE.FAILED_PRECONDITION


async def test_a_service_reports_with_a_controllers_certificate(rig: BoardsRig) -> None:
    member, controller = await rig.join("pi-1"), await rig.controller()
    seen = rig.core.presence.last_seen_ns(rig.board(member.number))
    check = pb.HealthCheckResult(name="disk", status="ok")
    await controller.control.ReportHealth(
        pb.HealthReport(id=member.number, source="backup", status_text="late", checks=[check])
    )
    conditions = {one.type: (one.status, one.writer) for one in rig.board(member.number).conditions}
    assert conditions == {
        "backup": ("late", "board-controller/second"),
        "backup/disk": ("ok", "board-controller/second"),
    }
    assert rig.core.presence.last_seen_ns(rig.board(member.number)) == seen, "no sign of life of the board"

    await controller.control.ReportHealth(pb.HealthReport(source="dns", status=pi.NODE_STATUS_READY))
    (report,) = rig.core.service_reports.all()
    assert (report.service, report.reporter) == ("dns", "board-controller/second")

    agent = controller.control.ReportHealth(pb.HealthReport(id=member.number, status=pi.NODE_STATUS_FAILED))
    assert await refused(agent) is CODE.INVALID_ARGUMENT
    missing = controller.control.ReportHealth(pb.HealthReport(id=99, source="dns"))
    assert await refused(missing) is CODE.NOT_FOUND


# The whole.


async def test_reflection_lists_every_service_on_its_listener(rig: BoardsRig) -> None:
    async def services(channel: Any) -> set[str]:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        async for answer in stub.ServerReflectionInfo(iter(asked)):
            return {service.name for service in answer.list_services_response.service}
        raise AssertionError("no answer")

    secure, plain = await services(await rig.channel()), await services(await rig.plain_channel())

    assert {"ControlPlane", "pi_controller.PiControllerService", "grpc.health.v1.Health"} <= secure
    assert "pi_controller.PiControllerService" in plain
    assert "ControlPlane" not in plain


async def test_reflection_describes_the_service_without_a_package(rig: BoardsRig) -> None:
    channel: Any = await rig.channel()
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol="ControlPlane")]

    async for answer in stub.ServerReflectionInfo(iter(asked)):
        files = answer.file_descriptor_response.file_descriptor_proto

    assert any(b"boards/boards.proto" in one for one in files)


async def test_every_method_of_the_original_service_is_offered(rig: BoardsRig) -> None:
    servicers = [one.servicer for one in rig.domain.services if one.descriptor.name == "PiControllerService"]

    assert [one.missing for one in servicers if isinstance(one, PiControllerService)] == [[], []]


async def test_a_method_that_no_part_has_is_unimplemented_and_two_may_not_quarrel_over_one() -> None:
    class Pins:
        async def GetGPIODevice(
            self, request: pi.GetGPIODeviceRequest, _context: CallContext
        ) -> pi.GPIODevice:
            return pi.GPIODevice(id=request.id, name="lamp")

    service: Any = PiControllerService([Pins()])

    with pytest.raises(Unimplemented, match="GetCAInfo"):
        await service.GetCAInfo(pi.GetCAInfoRequest(), None)
    assert "GetCAInfo" in service.missing
    assert "GetGPIODevice" not in service.missing
    with pytest.raises(SettingsError, match="GetGPIODevice"):
        PiControllerService([Pins(), Pins()])


async def test_who_did_what_is_in_the_audit(rig: BoardsRig) -> None:
    admin = await operator(rig)
    await admin.CreateNode(pi.CreateNodeRequest(name="pi-1"))
    await rig.join("pi-2")

    entries = [row async for row in rig.store.audit()]

    text = repr(entries)
    assert "operator/boss" in text
    assert "boards.create" in text
    assert "boards.register" in text


async def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    async with boards_rig(tmp_path) as rig:
        await rig.core.boards.create(BoardFacts(name="one"), actor=BOSS)
        await rig.core.boards.delete(1, actor=BOSS)
    async with boards_rig(tmp_path) as rig:
        made = await rig.core.boards.create(BoardFacts(name="one"), actor=BOSS)

        assert made.name == "2"
        assert rig.store.get(BOARD, SCOPE, "1") is None
