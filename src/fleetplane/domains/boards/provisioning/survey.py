"""Which boards an operation is about, and which steps it takes for each. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.boards.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningOrder
from fleetplane.domains.boards.provisioning import plan
from fleetplane.domains.boards.provisioning.operations import BOARDS_LIMIT, OperationSpec, Work
from fleetplane.domains.boards.provisioning.plan import API_PORT, Host, Step
from fleetplane.domains.boards.provisioning.preflight import Places
from fleetplane.domains.boards.registry import Boards
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument


class Survey:
    def __init__(self, boards: Boards, clusters: Clusters, places: Places) -> None:
        self._boards = boards
        self._clusters = clusters
        self._places = places

    def host(self, board: int, *, user: str) -> Host:
        return Host(address=self._boards.require(board).spec.ip_address, user=user)

    def works(self, order: ProvisioningOrder) -> tuple[Work, ...]:
        if order.cluster_id is not None:
            self._clusters.require(order.cluster_id, field="cluster_id")
        works: list[Work] = []
        if order.board_id is not None:
            board = self._boards.require(order.board_id, field="node_id")
            works.append(Work(board=order.board_id, role=order.role or board.spec.role))
        elif order.cluster_id is not None:
            members = self._boards.in_cluster(order.cluster_id)
            ordered = sorted(members, key=lambda board: board.spec.role is not BoardRole.MASTER)
            works += [Work(board=int(board.name), role=board.spec.role) for board in ordered]
        for number in order.worker_ids:
            self._boards.require(number, field="worker_node_ids")
            if all(work.board != number for work in works):
                works.append(Work(board=number, role=BoardRole.WORKER))
        if not 1 <= len(works) <= BOARDS_LIMIT:
            raise InvalidArgument(f"an operation is about 1 to {BOARDS_LIMIT} boards", field="node_id")
        for work in works:
            if not self._boards.require(work.board).spec.ip_address:
                raise FailedPrecondition(f"the address of board {work.board} is not known")
        return tuple(works)

    def all_steps(self, spec: OperationSpec, *, user: str) -> Iterator[tuple[Work, Step]]:
        for work in spec.works:
            for step in self.steps(spec, work, user=user):
                yield work, step

    def steps(self, spec: OperationSpec, work: Work, *, user: str) -> tuple[Step, ...]:
        host = self.host(work.board, user=user)
        match spec.action:
            case ProvisioningAction.CHECK:
                return plan.check(self._places)
            case ProvisioningAction.DEPROVISION:
                return plan.uninstall(host, spec.options, self._places)
        return plan.install(
            host, work.role, spec.options, server_url=self.server_url(spec), places=self._places
        )

    def server_url(self, spec: OperationSpec) -> str:
        """Whom workers join: this operation's server, or the one that their cluster has."""
        if spec.options.server_url:
            return spec.options.server_url
        servers = [work.board for work in spec.works if work.role is BoardRole.MASTER]
        if servers:
            address = self._boards.require(servers[0]).spec.ip_address
            return f"https://{f'[{address}]' if ':' in address else address}:{API_PORT}"
        cluster = self._clusters.get(spec.cluster_id) if spec.cluster_id is not None else None
        if cluster is None or not cluster.spec.master_endpoint:
            if spec.action is ProvisioningAction.PROVISION:
                raise FailedPrecondition("a worker needs a cluster with a server to join")
            return ""
        return cluster.spec.master_endpoint
