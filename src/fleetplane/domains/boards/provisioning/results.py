"""What provisioning makes of boards and clusters: their states, versions and secrets."""

from __future__ import annotations

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole, BoardState, ClusterState
from fleetplane.domains.boards.ports import ProvisioningAction
from fleetplane.domains.boards.provisioning.operations import (
    BoardOperation,
    Operation,
    OperationSpec,
    StepState,
    status_of,
)
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets
from fleetplane.domains.boards.provisioning.steps import BoardWork
from fleetplane.domains.boards.rules import BoardFacts

ACTOR = "system/provisioning"


class Aftermath:
    def __init__(self, boards: Boards, clusters: Clusters, secrets: ClusterSecrets) -> None:
        self._boards = boards
        self._clusters = clusters
        self._secrets = secrets

    async def began(self, spec: OperationSpec) -> None:
        if spec.action is ProvisioningAction.CHECK:
            return
        for work in spec.works:
            await self._boards.declare(work.board, BoardState.PROVISIONING, actor=ACTOR)
        await self._cluster(spec, ClusterState.PROVISIONING)

    async def board_done(
        self, spec: OperationSpec, work: BoardOperation, hands: BoardWork, server_url: str
    ) -> None:
        if spec.action is ProvisioningAction.DEPROVISION:
            await self._boards.depart(work.board, actor=ACTOR)
        if spec.action is not ProvisioningAction.PROVISION:
            return
        if work.role is BoardRole.MASTER and spec.cluster_id is not None:
            if hands.collected:
                token, kubeconfig = hands.collected
                await self._secrets.keep(
                    spec.cluster_id, token=token.strip(), kubeconfig=kubeconfig, actor=ACTOR
                )
            await self._clusters.update(
                spec.cluster_id, actor=ACTOR, version=hands.version, master_endpoint=server_url
            )
        hostname = hands.findings.hostname if hands.findings is not None else ""
        facts = BoardFacts(
            role=work.role, cluster_id=spec.cluster_id, kube_version=hands.version, node_name=hostname
        )
        await self._boards.declare(work.board, BoardState.READY, actor=ACTOR, facts=facts)

    async def worked(self, spec: OperationSpec, *, completely: bool) -> None:
        await self._cluster(spec, ClusterState.ACTIVE if completely else ClusterState.DEGRADED)

    async def failed(self, operation: Operation) -> None:
        """A board whose steps were not all taken is not what was wanted."""
        spec = operation.spec
        if spec.action is ProvisioningAction.CHECK:
            return
        unfinished = {step.board for step in status_of(operation).steps if step.state is not StepState.DONE}
        for board in unfinished:
            await self._boards.declare(board, BoardState.FAILED, actor=ACTOR)
        if spec.works[0].board in unfinished:
            await self._cluster(spec, ClusterState.FAILED)

    async def _cluster(self, spec: OperationSpec, state: ClusterState) -> None:
        if spec.cluster_id is not None and spec.action is ProvisioningAction.PROVISION:
            await self._clusters.update(spec.cluster_id, actor=ACTOR, state=state)
