"""Which boards an operation is about, and which steps it takes for each. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningOrder
from fleetplane.domains.boards.provisioning import plan
from fleetplane.domains.boards.provisioning.operations import BOARDS_LIMIT, BoardOperation, OperationSpec
from fleetplane.domains.boards.provisioning.plan import API_PORT, BoardHost, CommandedStep
from fleetplane.domains.boards.provisioning.policy import ProvisioningPolicy, confirmed_address
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument


class BoardSurvey:
    def __init__(
        self, boards: Boards, clusters: Clusters, places: BoardPaths, policy: ProvisioningPolicy
    ) -> None:
        self._boards = boards
        self._clusters = clusters
        self._places = places
        self._policy = policy

    def host(self, work: BoardOperation, *, user: str) -> BoardHost:
        """Where the order said that the board is, whatever the board says by now."""
        if not work.address:  # an order that an earlier version of this server accepted
            raise FailedPrecondition(
                f"the address of board {work.board} was never confirmed", hint="ask for it anew"
            )
        return BoardHost(address=work.address, user=user)

    def works(self, order: ProvisioningOrder) -> tuple[BoardOperation, ...]:
        if order.cluster_id is not None:
            self._clusters.require(order.cluster_id, field="cluster_id")
        works: list[BoardOperation] = []
        if order.board_id is not None:
            board = self._boards.require(order.board_id, field="node_id")
            works.append(self._work(order, order.board_id, order.role or board.spec.role))
        elif order.cluster_id is not None:
            members = self._boards.in_cluster(order.cluster_id)
            ordered = sorted(members, key=lambda board: board.spec.role is not BoardRole.MASTER)
            works += [self._work(order, int(board.name), board.spec.role) for board in ordered]
        for number in order.worker_ids:
            self._boards.require(number, field="worker_node_ids")
            if all(work.board != number for work in works):
                works.append(self._work(order, number, BoardRole.WORKER))
        if not 1 <= len(works) <= BOARDS_LIMIT:
            raise InvalidArgument(f"an operation is about 1 to {BOARDS_LIMIT} boards", field="node_id")
        return tuple(works)

    def _work(self, order: ProvisioningOrder, number: int, role: BoardRole) -> BoardOperation:
        spec = self._boards.require(number).spec
        address = confirmed_address(
            number, recorded=spec.confirmed_address, reported=spec.ip_address, given=order.addresses
        )
        return BoardOperation(board=number, role=role, address=address)

    def all_steps(self, spec: OperationSpec, *, user: str) -> Iterator[tuple[BoardOperation, CommandedStep]]:
        for work in spec.works:
            for step in self.steps(spec, work, user=user):
                yield work, step

    def steps(self, spec: OperationSpec, work: BoardOperation, *, user: str) -> tuple[CommandedStep, ...]:
        host = self.host(work, user=user)
        match spec.action:
            case ProvisioningAction.CHECK:
                return plan.check(self._places)
            case ProvisioningAction.DEPROVISION:
                return plan.uninstall(host, spec.options, self._places)
        return plan.install(
            host,
            work.role,
            spec.options,
            self._policy.installer(spec.options),
            server_url=self.server_url(spec),
            places=self._places,
        )

    def server_url(self, spec: OperationSpec) -> str:
        """The k3s server that workers join: this operation's own, or their cluster's."""
        if spec.options.server_url:
            return spec.options.server_url
        servers = [work.address for work in spec.works if work.role is BoardRole.MASTER]
        if not servers and spec.cluster_id is not None:
            members = self._boards.in_cluster(spec.cluster_id)
            servers = [
                board.spec.confirmed_address
                for board in members
                if board.spec.role is BoardRole.MASTER and board.spec.confirmed_address
            ]
        if servers:
            address = servers[0]
            return f"https://{f'[{address}]' if ':' in address else address}:{API_PORT}"
        cluster = self._clusters.get(spec.cluster_id) if spec.cluster_id is not None else None
        if spec.action is not ProvisioningAction.PROVISION:
            return ""
        if cluster is None or not cluster.spec.master_endpoint:
            raise FailedPrecondition("a worker needs a cluster with a server to join")
        self._policy.require_server(cluster.spec.master_endpoint)  # anyone who may edit clusters wrote it
        return cluster.spec.master_endpoint
