"""The methods of `pi_controller.PiControllerService` about nodes and clusters, and the identity of callers.

Agents call some of them for themselves, operators all of them for any board. Original agents rely on:
ALREADY_EXISTS for a known board, the board itself on the first page of the list, and an update full of blanks
that changes nothing.

A certificate identifies a calling board. On the listener without TLS a caller is the board that it registered
as over the same connection, and may speak only for boards without a certificate.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.access import PLAIN_AGENT
from fleetplane.domains.boards.inventory.boards import Boards, Came, delete_board, status_of, taken_by
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.inventory.liveness import BoardController, Word
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    AgentDialect,
    Board,
    BoardState,
    BoardStatus,
    Cluster,
    number_of,
)
from fleetplane.domains.boards.ports import Provisioner, ProvisioningAction, ProvisioningOrder
from fleetplane.domains.boards.wire import boards as wire
from fleetplane.domains.boards.wire.message_json import page_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, PermissionDenied, ResourceExhausted
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.store import Draft
from fleetplane.rpc import CallContext


@dataclass(frozen=True, slots=True)
class Callers:
    boards: Boards
    presence: BoardPresence

    def is_agent(self, context: CallContext) -> bool:
        return self.is_plain(context) or credentials.board_of(context.principal) is not None

    def is_plain(self, context: CallContext) -> bool:
        return PLAIN_AGENT in context.principal.roles

    def itself(self, context: CallContext) -> int | None:
        """The board behind a call that does not say; None if there is none, or it may not be trusted."""
        certified = credentials.board_of(context.principal)
        if certified is not None or not self.is_plain(context):
            return certified
        number = self.presence.behind(context.listener, context.peer())
        board = self.boards.get(number) if number is not None else None
        return number if board is not None and not status_of(board).key_digest else None

    def speaking_for(self, context: CallContext, number: int, *, field: str = "id") -> int:
        """The board that an agent's call is about, which must be itself."""
        certified = credentials.board_of(context.principal)
        if certified is not None:
            if number not in (0, certified):
                raise PermissionDenied(f"{field} is not that of the certificate", field=field)
            return certified
        if not number:
            known = self.itself(context)
            if known is None:
                raise InvalidArgument(f"{field} is required", field=field)
            return known
        if status_of(self.boards.require(number, field=field)).key_digest:
            raise PermissionDenied(
                f"board {number} has a certificate, and is spoken for only with it", field=field
            )
        return number

    def bind(self, context: CallContext, board: Board | int) -> None:
        """Remember who is at the other end."""
        number = board if isinstance(board, int) else number_of(board)
        self.presence.bind(context.listener, context.peer(), number)


log = structlog.get_logger(__name__)

NEAR: Final = 0.8
"""The share of the limit of boards without a certificate at which a warning is logged."""

DevicesOf = Callable[[int], Iterable[pi.GPIODevice]]
"""Finds the pins of a board."""


class NodeView:
    """A board as it is shown, with what is known only in memory."""

    def __init__(self, presence: BoardPresence, devices_of: DevicesOf | None = None) -> None:
        self._presence = presence
        self._devices_of: DevicesOf = devices_of or (lambda _board: ())

    def node(self, board: Board, *, with_devices: bool = False) -> pi.Node:
        devices = self._devices_of(number_of(board)) if with_devices else ()
        return wire.node(board, last_seen_ns=self._presence.last_seen_ns(board), devices=devices)


class NodeMethods:
    def __init__(
        self,
        *,
        boards: Boards,
        callers: Callers,
        controller: BoardController,
        view: NodeView,
        provisioner: Provisioner,
        revocations: Revocations,
        agent_port: int,
        plain_limit: int,
    ) -> None:
        self._boards = boards
        self._plain_limit = plain_limit
        self._plain_joining = asyncio.Lock()  # guards: no more boards without a certificate than the limit
        self._callers = callers
        self._controller = controller
        self._view = view
        self._provisioner = provisioner
        self._revocations = revocations
        self._agent_port = agent_port

    async def CreateNode(self, request: pi.CreateNodeRequest, context: CallContext) -> pi.Node:
        certified = credentials.board_of(context.principal)
        if certified is not None:
            raise AlreadyExists(f"this is board {certified}", details={"board": str(certified)})
        facts, actor = wire.created_facts(request), context.principal.name
        if not self._callers.is_plain(context):
            return self._view.node(await self._boards.create(facts, actor=actor))
        try:
            async with self._plain_joining:
                await self._boards.up_to_date()
                self._check_room(facts)
                board = await self._boards.create(
                    facts, actor=actor, came=self._came(facts, context), check=self._check_still_room
                )
        except AlreadyExists as error:
            # It will look for itself in the list next: remember which one it is.
            if (known := error.details.get("board")) is not None:
                self._callers.bind(context, int(known))
            raise
        self._callers.bind(context, board)
        self._controller.came(board)
        return self._view.node(board)

    def _check_room(self, facts: rules.BoardFacts) -> None:
        """Refuse one more board that nobody vouches for; those that are known come in as before."""
        if taken_by(facts, self._boards.holder) is not None:
            return
        count = _plain_boards(self._boards.all())
        if count >= self._plain_limit:
            log.warning("boards.plain_limit_hit", boards=count, limit=self._plain_limit, name=facts.name)
            raise _no_room(count)
        if count + 1 >= self._plain_limit * NEAR:
            log.warning("boards.plain_limit_near", boards=count + 1, limit=self._plain_limit)

    def _check_still_room(self, draft: Draft) -> None:
        """Another server may have let one in meanwhile."""
        count = _plain_boards(draft.list(BOARD, SCOPE))
        if count >= self._plain_limit:
            raise _no_room(count)

    async def GetNode(self, request: pi.GetNodeRequest, _context: CallContext) -> pi.Node:
        await self._boards.up_to_date()
        return self._view.node(self._boards.require(request.id), with_devices=True)

    async def ListNodes(self, request: pi.ListNodesRequest, context: CallContext) -> pi.ListNodesResponse:
        state = wire.state(request.status) if request.HasField("status") else None
        await self._boards.up_to_date()
        found: Sequence[Board] = self._boards.all()
        if request.HasField("cluster_id"):
            found = [board for board in found if (board.spec.cluster_id or 0) == request.cluster_id]
        if state is not None:
            found = [board for board in found if status_of(board).state is state]
        if self._callers.is_agent(context):
            found = self._own_first(found, context)
        page = page_of(found, page=request.page, page_size=request.page_size)
        return pi.ListNodesResponse(nodes=[self._view.node(board) for board in page], total_count=len(found))

    def _own_first(self, found: Sequence[Board], context: CallContext) -> Sequence[Board]:
        """Agents look for themselves on the first page only, by their address."""
        own = credentials.board_of(context.principal) or self._callers.presence.behind(
            context.listener, context.peer()
        )
        address = context.connection.address

        def distance(board: Board) -> int:
            if number_of(board) == own:
                return 0
            return 1 if board.spec.ip_address == address else 2

        return sorted(found, key=distance)  # stable: by number among equals

    async def UpdateNode(self, request: pi.UpdateNodeRequest, context: CallContext) -> pi.Node:
        facts = wire.updated_facts(request)
        state = wire.state(request.status) if request.HasField("status") else None
        actor = context.principal.name
        if not self._callers.is_agent(context):
            _require_id(request.id)
            board = await self._boards.update(request.id, facts, actor=actor, declared=state)
            return self._view.node(board)
        await self._boards.up_to_date()
        number = self._callers.speaking_for(context, request.id)
        self._callers.bind(context, number)
        if wire.is_registration(request) and state in (None, BoardState.READY):
            board = await self._came_again(number, facts, context)
        else:
            word = Word(state=state, facts=facts.of_machine())
            board = await self._controller.heard(number, word, actor=actor)
        return self._view.node(board)

    async def _came_again(self, number: int, facts: rules.BoardFacts, context: CallContext) -> Board:
        came = self._came(facts, context)

        def step(status: BoardStatus, now_ns: int) -> BoardStatus:
            return rules.registered(came.noted(status), now_ns=now_ns)

        board = await self._boards.hear(number, step, facts=facts, actor=context.principal.name)
        self._controller.came(board)
        return board

    def _came(self, facts: rules.BoardFacts, context: CallContext) -> Came:
        """Original agents know no certificates; who has one registered by our own methods before."""
        certified = credentials.board_of(context.principal) is not None
        return Came(
            address=facts.ip_address or context.connection.address,
            port=self._agent_port,
            plaintext=self._callers.is_plain(context),
            dialect=None if certified else AgentDialect.ORIGINAL,
        )

    async def DeleteNode(self, request: pi.DeleteNodeRequest, context: CallContext) -> pi.DeleteNodeResponse:
        _require_id(request.id)
        await delete_board(self._boards, self._revocations, request.id, actor=context.principal.name)
        return pi.DeleteNodeResponse(success=True)

    async def ProvisionNode(
        self, request: pi.ProvisionNodeRequest, context: CallContext
    ) -> pi.ProvisionNodeResponse:
        _require_id(request.id)
        self._boards.require(request.id)
        order = ProvisioningOrder(
            action=ProvisioningAction.PROVISION,
            board_id=request.id,
            cluster_id=request.cluster_id or None,
        )
        answer = await self._provisioner.request(order, actor=context.principal.name)
        return pi.ProvisionNodeResponse(success=answer.success, message=answer.message)

    async def DeprovisionNode(
        self, request: pi.DeprovisionNodeRequest, context: CallContext
    ) -> pi.DeprovisionNodeResponse:
        _require_id(request.id)
        self._boards.require(request.id)
        order = ProvisioningOrder(action=ProvisioningAction.DEPROVISION, board_id=request.id)
        answer = await self._provisioner.request(order, actor=context.principal.name)
        return pi.DeprovisionNodeResponse(success=answer.success, message=answer.message)


def _plain_boards(boards: Iterable[Board]) -> int:
    return sum(status.plaintext and not status.key_digest for status in map(status_of, boards))


def _no_room(count: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{count} boards came without a certificate, and no more may",
        hint="delete some that are gone, or raise boards.plain_boards",
    )


def _require_id(number: int) -> None:
    if not number:
        raise InvalidArgument("id is required", field="id")


ANSWER_LIMIT_BYTES = 4 * 1024 * 1024 - 64 * 1024
"""What the original programs take in one message, with room for its frame."""


class ClusterMethods:
    def __init__(self, *, boards: Boards, clusters: Clusters, view: NodeView) -> None:
        self._boards = boards
        self._clusters = clusters
        self._view = view

    async def CreateCluster(self, request: pi.CreateClusterRequest, context: CallContext) -> pi.Cluster:
        made = await self._clusters.create(wire.cluster_spec(request), actor=context.principal.name)
        return wire.cluster(made, ())

    async def GetCluster(self, request: pi.GetClusterRequest, _context: CallContext) -> pi.Cluster:
        await self._settled()
        return self._shown(self._clusters.require(request.id))

    async def ListClusters(
        self, request: pi.ListClustersRequest, _context: CallContext
    ) -> pi.ListClustersResponse:
        await self._settled()
        found = self._clusters.all()
        members = defaultdict(list)
        for board in self._boards.all():
            members[board.spec.cluster_id].append(board)
        response = pi.ListClustersResponse(total_count=len(found))
        for cluster in page_of(found, page=request.page, page_size=request.page_size):
            nodes = [self._view.node(board) for board in members[number_of(cluster)]]
            response.clusters.append(wire.cluster(cluster, nodes))
        if response.ByteSize() > ANSWER_LIMIT_BYTES:
            raise ResourceExhausted(
                "the page is too large for one message", hint="ask for a smaller page_size"
            )
        return response

    async def UpdateCluster(self, request: pi.UpdateClusterRequest, context: CallContext) -> pi.Cluster:
        _require_id(request.id)
        state = wire.cluster_state(request.status) if request.HasField("status") else None
        changed = await self._clusters.update(
            request.id, actor=context.principal.name, state=state, **wire.cluster_changes(request)
        )
        return self._shown(changed)

    async def DeleteCluster(
        self, request: pi.DeleteClusterRequest, context: CallContext
    ) -> pi.DeleteClusterResponse:
        _require_id(request.id)
        await self._clusters.delete(request.id, actor=context.principal.name)
        return pi.DeleteClusterResponse(success=True)

    def _shown(self, cluster: Cluster) -> pi.Cluster:
        members = self._boards.in_cluster(number_of(cluster))
        return wire.cluster(cluster, [self._view.node(board) for board in members])

    async def _settled(self) -> None:
        await self._clusters.up_to_date()
        await self._boards.up_to_date()
