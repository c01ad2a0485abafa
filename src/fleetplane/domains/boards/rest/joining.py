"""REST: letting boards in, with tokens that are made for them or by saying yes to one that asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.joining.approvals import Approvals
from fleetplane.domains.boards.joining.join_tokens import DEFAULT_LIFE_SECONDS, JoinTokens
from fleetplane.domains.boards.kinds import BoardRole, TokenPurpose
from fleetplane.domains.boards.rest import views
from fleetplane.domains.boards.rest.common import CREATED, NO_CONTENT, PAGING, BoardCall, actor, listed
from fleetplane.domains.boards.rest.shapes.inventory import (
    ApprovalData,
    ApprovalRows,
    IssuedJoinToken,
    JoinTokenRows,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.web.rest.routes import Answer, Gate, Route, RouteGroup

_ROUTES = RouteGroup("Joining")


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
            _ROUTES.post(
                "/join-tokens", self.create, OPERATE, body=TokenBody, body_optional=True, status=CREATED
            ),
            _ROUTES.get("/join-tokens", self.list, OPERATE, query=PAGING),
            _ROUTES.delete("/join-tokens/{token}", self.revoke, OPERATE, status=NO_CONTENT),
            _ROUTES.get("/approvals", self.waiting, READ, query=PAGING),
            _ROUTES.post("/approvals/{approval}", self.decide, ADMINISTER, body=DecisionBody),
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
