"""`ControlPlane`: how nodes register and report, servers follow each other, and provisioning is asked for.

RegisterNode is the one method that may be called without a certificate. Everywhere else the
certificate says who is calling, and a number in the request may only repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetplane.domains.boards.access import CONTROLLER
from fleetplane.domains.boards.grpc.nodes import NodeView
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.inventory.last_seen import BoardPresence, ServiceReport, ServiceReports
from fleetplane.domains.boards.inventory.liveness import BoardController, Word
from fleetplane.domains.boards.inventory.sync import Question, Synchronisation, SyncPage
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.joining.enrolment import BoardEnrolment, RegisteredBoard
from fleetplane.domains.boards.kinds import Board, number_of
from fleetplane.domains.boards.metrics import history
from fleetplane.domains.boards.ports import MetricsIntake, Provisioner
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.domains.boards.sets.delivery import BoardSets
from fleetplane.domains.boards.wire import boards as wire
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

AHEAD_NS = 300 * NS
"""How far a board's clock may run ahead of ours; what is later than that happened now."""


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class ControlService:
    boards: Boards
    clusters: Clusters
    presence: BoardPresence
    enrolment: BoardEnrolment
    synchronisation: Synchronisation
    controller: BoardController
    provisioner: Provisioner
    intake: MetricsIntake
    authority: Authority
    view: NodeView
    clock: Clock
    controller_id: str
    heartbeat_seconds: float
    agent_port: int
    revocation_lists: RevocationLists
    service_reports: ServiceReports
    sets: BoardSets

    # Registration.

    async def RegisterNode(
        self, request: pb.NodeRegistration, context: CallContext
    ) -> pb.RegistrationResponse:
        done = await self._register(request, context)
        if done.board is not None:
            self.controller.came(done.board, boot_id=request.boot_id)
        return wire.registration_response(
            done,
            node=self.view.node(done.board) if done.board is not None else None,
            trust_pem=self.authority.trust_pem,
            heartbeat_seconds=self.heartbeat_seconds,
        )

    async def _register(self, request: pb.NodeRegistration, context: CallContext) -> RegisteredBoard:
        registration = wire.registration(
            request, peer_address=context.connection.address, default_port=self.agent_port
        )
        identity = credentials.presented(context.connection)
        if identity is None:
            return await self.enrolment.register(registration)
        number = credentials.board_of(context.principal)
        if number is not None:
            return await self.enrolment.register_again(number, identity.public_key_digest, registration)
        if CONTROLLER in context.principal.roles:
            return await self.enrolment.renew_controller(context.principal.name, registration)
        raise PermissionDenied("an operator's certificate is not a board's")

    # Synchronisation.

    async def SyncClusterState(
        self, request: pb.ClusterStateRequest, _context: CallContext
    ) -> pb.ClusterStateResponse:
        page = await self.synchronisation.page(
            Question(
                known_revision=request.known_revision,
                full=request.full,
                cluster=request.cluster_id if request.HasField("cluster_id") else None,
                page_size=request.page_size,
                token=request.page_token,
            )
        )
        return pb.ClusterStateResponse(
            clusters=self._clusters_of(page),
            total_count=len(self.clusters.all()),
            revision=page.revision,
            full=page.full,
            deleted_cluster_ids=page.deleted_clusters,
            deleted_node_ids=page.deleted_boards,
            leader_id=self.controller_id,
            timestamp=timestamp(self.clock.now_ns()),
            has_more=page.has_more,
            unassigned_nodes=[
                self.view.node(board) for board in page.boards if self._cluster_of(board) is None
            ],
            next_page_token=page.token,
            reason=page.reason,
        )

    def _clusters_of(self, page: SyncPage) -> list[pi.Cluster]:
        """The clusters of a page, and those that its boards are in, each with those boards."""
        found = {number_of(cluster): cluster for cluster in page.clusters}
        nodes: dict[int, list[pi.Node]] = {number: [] for number in found}
        for board in page.boards:
            number = self._cluster_of(board)
            if number is None:
                continue
            nodes.setdefault(number, []).append(self.view.node(board))
            if number not in found:
                found[number] = self.clusters.require(number)
        return [wire.cluster(found[number], nodes[number]) for number in sorted(found)]

    def _cluster_of(self, board: Board) -> int | None:
        """None as well for a cluster that is gone by now: its deletion follows."""
        number = board.spec.cluster_id
        return number if number is not None and self.clusters.get(number) is not None else None

    # Provisioning.

    async def RequestProvisioning(
        self, request: pb.ProvisioningRequest, context: CallContext
    ) -> pb.ProvisioningResponse:
        order = wire.order(request)
        if order.board_id is not None:
            self.boards.require(order.board_id, field="node_id")
        if order.cluster_id is not None:
            self.clusters.require(order.cluster_id, field="cluster_id")
        for worker in order.worker_ids:
            self.boards.require(worker, field="worker_node_ids")
        answer = await self.provisioner.request(order, actor=context.principal.name)
        return wire.provisioning_response(answer)

    # Health.

    async def ReportHealth(self, report: pb.HealthReport, context: CallContext) -> pb.Empty:
        number = credentials.board_of(context.principal)
        if number is None and CONTROLLER in context.principal.roles:
            return await self._service_reported(report, context.principal.name)
        if number is None or report.id not in (0, number):
            raise PermissionDenied("id is not that of the certificate", field="id")
        board = self.boards.require(number)
        state = wire.state(report.status)
        is_agent = report.source in ("", "agent")
        boot_id, sequence = wire.text("boot_id", report.boot_id), report.sequence if is_agent else 0
        word = Word(
            state=state if is_agent else None,
            facts=BoardFacts(os_version=report.os_version, kernel_version=report.kernel_version),
            agent_version=wire.text("version", report.version) if is_agent else "",
            conditions=wire.checks(report, writer=context.principal.name),
            boot_id=boot_id,
            sequence=sequence,
        )
        answer = self._told_of_revocations(context.principal.name, report) if is_agent else pb.Empty()
        if not self.presence.is_newer(board, boot_id=boot_id, sequence=sequence):
            return answer
        with self.presence.counting(number, boot_id=boot_id, sequence=sequence, now_ns=self.clock.now_ns()):
            await self.controller.heard(number, word, actor=context.principal.name)
        if is_agent and report.HasField("applied"):
            desired = await self.sets.heard(self.boards.require(number), report.applied)
            if desired is not None:
                answer.desired.CopyFrom(desired)
        if report.HasField("metrics"):
            self.intake.metrics(number, history.of_flat(report.metrics, at_ns=self._moment_of(report)))
        return answer

    async def _service_reported(self, report: pb.HealthReport, reporter: str) -> pb.Empty:
        """A service, by a controller's certificate: on the board that it names, or of the controller itself.

        That says nothing about whether the board is there: only its own word does.
        """
        if report.source in ("", "agent"):
            raise InvalidArgument(
                "a controller reports for services, and not for boards' agents",
                field="source",
                hint="name the service",
            )
        conditions = wire.checks(report, writer=reporter)
        if report.id:
            await self.controller.noted(report.id, conditions, actor=reporter)
        else:
            await self.service_reports.heard(
                ServiceReport(
                    reporter=reporter,
                    service=report.source,
                    conditions=tuple(conditions),
                    at_ns=self.clock.now_ns(),
                )
            )
        return pb.Empty()

    def _told_of_revocations(self, agent: str, report: pb.HealthReport) -> pb.Empty:
        """The list of those who may no longer come in, for an agent that does not have it."""
        news = self.revocation_lists.heard(agent, report.revocation_list)
        return pb.Empty(revocation_list=news) if news is not None else pb.Empty()

    def _moment_of(self, report: pb.HealthReport) -> int:
        now_ns = self.clock.now_ns()
        said = wire.moment_ns(report.metrics.timestamp) or wire.moment_ns(report.timestamp)
        return now_ns if said is None or said > now_ns + AHEAD_NS else said
