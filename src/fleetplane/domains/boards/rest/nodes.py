"""REST: boards, which the wire calls nodes, their join tokens and the approvals of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.inventory.boards import Boards, delete_board, status_of
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.joining.join_tokens import DEFAULT_LIFE_SECONDS, Approvals, JoinTokens
from fleetplane.domains.boards.kinds import Board, BoardRole, BoardState, TokenPurpose, number_of
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.rest import views
from fleetplane.domains.boards.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    actor,
    changes,
    choice,
    flag,
    listed,
    number_in,
    reference,
)
from fleetplane.domains.boards.rest.views import (
    AdoptedNode,
    ApprovalData,
    ApprovalRows,
    IssuedJoinToken,
    JoinTokenRows,
    NodeData,
    NodeRows,
    ShownNode,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.web.rest.bodies import given
from fleetplane.web.rest.routes import Answer, Gate, Query, Route, RouteGroup

_JOINING_ROUTES = RouteGroup("Joining")


class TokenBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    """Which the board must have; any when empty."""
    role: BoardRole | None = None
    cluster_id: int | None = None
    replaces: int | None = None
    """The board whose lost key may be replaced."""
    purpose: TokenPurpose = TokenPurpose.BOARD
    ttl_seconds: float = DEFAULT_LIFE_SECONDS


class DecisionBody(msgspec.Struct, forbid_unknown_fields=True):
    approve: bool


class JoiningRoutes:
    def __init__(self, *, tokens: JoinTokens, approvals: Approvals, gate: Gate[Any], clock: Clock) -> None:
        self._tokens = tokens
        self._approvals = approvals
        self._gate = gate
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (
            _JOINING_ROUTES.post(
                "/join-tokens", self.create, OPERATE, body=TokenBody, body_optional=True, status=CREATED
            ),
            _JOINING_ROUTES.get("/join-tokens", self.list, OPERATE, query=PAGING),
            _JOINING_ROUTES.delete("/join-tokens/{token}", self.revoke, OPERATE, status=NO_CONTENT),
            _JOINING_ROUTES.get("/approvals", self.waiting, READ, query=PAGING),
            _JOINING_ROUTES.post("/approvals/{approval}", self.decide, ADMINISTER, body=DecisionBody),
        )

    async def create(self, call: BoardCall) -> Answer[IssuedJoinToken]:
        """Create a single-use join token."""
        body: TokenBody = call.body or TokenBody()
        if body.purpose is TokenPurpose.CONTROLLER or body.replaces is not None:
            self._require_admin(call)
        made = await self._tokens.create(
            actor=actor(call),
            board_name=body.name,
            role=body.role,
            cluster_id=body.cluster_id,
            replaces=body.replaces,
            purpose=body.purpose,
            life_seconds=body.ttl_seconds,
        )
        told = views.join_token(made.token, now_ns=self._clock.now_ns())
        return Answer(content=IssuedJoinToken(token=made.text, **asdict(told)))

    def _require_admin(self, call: BoardCall) -> None:
        """Another server sees everything, and a board's place is its identity: not for every operator."""
        try:
            self._gate.admit(call.caller, ADMINISTER, call.path)
        except PermissionDenied as error:
            raise PermissionDenied(
                "tokens for servers, and for another key of a known board, are made by administrators"
            ) from error

    async def list(self, call: BoardCall) -> Answer[JoinTokenRows]:
        """List join tokens, without their text."""
        now_ns = self._clock.now_ns()
        found = sorted(self._tokens.all(), key=lambda one: -one.created_revision)
        return Answer(
            content=listed(call, found, lambda one: views.join_token(one, now_ns=now_ns), JoinTokenRows)
        )

    async def revoke(self, call: BoardCall) -> Answer[None]:
        """Revoke a join token."""
        await self._tokens.revoke(call.path["token"], actor=actor(call))
        return Answer(content=None)

    async def waiting(self, call: BoardCall) -> Answer[ApprovalRows]:
        """List keys that wait for approval to replace a known board's key."""
        return Answer(content=listed(call, self._approvals.all(), views.approval, ApprovalRows))

    async def decide(self, call: BoardCall) -> Answer[ApprovalData]:
        """Approve or reject a waiting key."""
        body: DecisionBody = call.body
        name, by = call.path["approval"], actor(call)
        view = call.answering(lambda decided: Answer(content=ApprovalData(data=views.approval(decided))))
        decide = self._approvals.approve if body.approve else self._approvals.reject
        return view(await decide(name, actor=by))


_ONE = "/nodes/{id}"
_ROUTES = RouteGroup("Nodes")


class NodeBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    ip_address: str = ""
    mac_address: str = ""
    role: BoardRole | None = None
    cluster_id: int | None = None
    architecture: str = ""
    model: str = ""
    serial_number: str = ""
    cpu_cores: int = 0
    memory: int = 0


class NodePatch(msgspec.Struct, forbid_unknown_fields=True):
    """Blank and zero leave things as they are; a `cluster_id` of 0 takes the board out of its cluster."""

    name: str | UnsetType | None = UNSET
    ip_address: str | UnsetType | None = UNSET
    mac_address: str | UnsetType | None = UNSET
    role: BoardRole | UnsetType | None = UNSET
    status: BoardState | UnsetType | None = UNSET
    cluster_id: int | UnsetType | None = UNSET
    architecture: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    serial_number: str | UnsetType | None = UNSET
    cpu_cores: int | UnsetType | None = UNSET
    memory: int | UnsetType | None = UNSET
    kube_version: str | UnsetType | None = UNSET
    node_name: str | UnsetType | None = UNSET
    os_version: str | UnsetType | None = UNSET
    kernel_version: str | UnsetType | None = UNSET


class AdoptBody(msgspec.Struct, forbid_unknown_fields=True):
    trust_token: str = ""
    """Some clients send one; who may adopt is known from who asks."""
    cluster_id: int | None = None


class NodeShow:
    """A board as REST shows it, with what is known only in memory."""

    def __init__(self, presence: BoardPresence, devices: Devices) -> None:
        self._presence = presence
        self._devices = devices

    def __call__(self, board: Board, *, with_devices: bool = False) -> ShownNode:
        seen = self._presence.last_seen_ns(board)
        if not with_devices:
            return views.node(board, last_seen_ns=seen)
        pins = [one for one in self._devices.of_board(number_of(board)) if not one.spec.removing]
        return views.node(board, last_seen_ns=seen, devices=map(views.gpio_device, pins))


class NodeRoutes:
    def __init__(self, *, boards: Boards, revocations: Revocations, show: NodeShow) -> None:
        self._boards = boards
        self._revocations = revocations
        self._show = show

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/nodes",
                self.list,
                READ,
                query=(
                    Query(name="cluster_id", summary="Only of this cluster", kind="integer", low=1),
                    Query(name="status", summary="Only in this state", choices=tuple(BoardState)),
                    Query(name="role", summary="Only with this role", choices=tuple(BoardRole)),
                    Query(name="name", summary="Only with this name"),
                    Query(name="label", summary="Only with this label, as key=value", many=True),
                    Query(name="include_gpio", summary="Include the pins of each board", kind="boolean"),
                    *PAGING,
                ),
            ),
            _ROUTES.post("/nodes", self.create, OPERATE, body=NodeBody, status=CREATED),
            _ROUTES.get(_ONE, self.show, READ),
            _ROUTES.put(_ONE, self.change, OPERATE, body=NodePatch),
            _ROUTES.delete(_ONE, self.delete, ADMINISTER, status=NO_CONTENT),
            _ROUTES.post(f"{_ONE}/adopt", self.adopt, OPERATE, body=AdoptBody, body_optional=True),
        )

    async def list(self, call: BoardCall) -> Answer[NodeRows]:
        """List boards."""
        state, role = choice(call, "status", BoardState), choice(call, "role", BoardRole)
        cluster, name = reference(call, "cluster_id"), call.query.get("name")
        labels = [_label(text) for text in call.many["label"]]
        with_devices = flag(call, "include_gpio")
        found = [
            board
            for board in self._boards.all()
            if state in (None, status_of(board).state)
            and role in (None, board.spec.role)
            and cluster in (None, board.spec.cluster_id)
            and name in (None, board.spec.name)
            and all(board.labels.get(key) == value for key, value in labels)
        ]
        return Answer(
            content=listed(call, found, lambda one: self._show(one, with_devices=with_devices), NodeRows)
        )

    async def create(self, call: BoardCall) -> Answer[NodeData]:
        """Register a board before it joins."""
        view = call.answering(lambda made: Answer(content=NodeData(data=self._show(made))))
        return view(await self._boards.create(_facts(given(call.body)), actor=actor(call)))

    async def show(self, call: BoardCall) -> Answer[NodeData]:
        """Get a board, with its pins."""
        board = self._boards.require(number_in(call))
        return Answer(content=NodeData(data=self._show(board, with_devices=True)))

    async def change(self, call: BoardCall) -> Answer[NodeData]:
        """Change a board's record."""
        said = changes(call.body)
        declared = said.pop("status", None)
        board = await self._boards.update(number_in(call), _facts(said), actor=actor(call), declared=declared)
        return Answer(content=NodeData(data=self._show(board)))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete a board and revoke its certificate."""
        await delete_board(self._boards, self._revocations, number_in(call), actor=actor(call))
        return Answer(content=None)

    async def adopt(self, call: BoardCall) -> Answer[AdoptedNode]:
        """Mark a discovered board as ready."""
        body: AdoptBody = call.body or AdoptBody()
        number = number_in(call)
        state = status_of(self._boards.require(number)).state
        if state is not BoardState.DISCOVERED:
            raise InvalidArgument(f"board {number} is {state}, and only discovered ones are adopted")
        facts = BoardFacts(cluster_id=body.cluster_id)
        board = await self._boards.declare(number, BoardState.READY, actor=actor(call), facts=facts)
        return Answer(content=AdoptedNode(data=self._show(board), message=f"{board.spec.name} was adopted"))


def _facts(said: dict[str, Any]) -> BoardFacts:
    memory = said.pop("memory", 0)
    return BoardFacts(memory_bytes=memory, **said)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidArgument("must be key=value", field="label")
    return key, value
