"""REST: letting boards in, with tokens that are made for them or by saying yes to one that asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetplane.domains.boards import views
from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.approvals import Approvals
from fleetplane.domains.boards.kinds import BoardRole, TokenPurpose
from fleetplane.domains.boards.rest import CREATED, NO_CONTENT, PAGING, BoardCall, Json, actor, listed
from fleetplane.domains.boards.tokens import DEFAULT_LIFE_SECONDS, JoinTokens
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.web.routes import Answer, Gate, Route

_TAG = "Joining"


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
            Route(
                method="POST", path="/join-tokens", handler=self.create, tag=_TAG, permission=OPERATE,
                summary="A token with which one board joins, once", body=TokenBody, body_optional=True,
                answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="GET", path="/join-tokens", handler=self.list, tag=_TAG, permission=OPERATE,
                summary="Tokens that were made, without their text", answer=dict[str, Any], query=PAGING,
            ),
            Route(
                method="DELETE", path="/join-tokens/{token}", handler=self.revoke, tag=_TAG,
                permission=OPERATE, summary="Refuse a token from now on", status=NO_CONTENT,
            ),
            Route(
                method="GET", path="/approvals", handler=self.waiting, tag=_TAG, permission=READ,
                summary="Keys that ask to take a known board's place", answer=dict[str, Any], query=PAGING,
            ),
            Route(
                method="POST", path="/approvals/{approval}", handler=self.decide, tag=_TAG,
                permission=ADMINISTER, summary="Say yes or no to one", body=DecisionBody,
                answer=dict[str, Any],
            ),
        )  # fmt: skip

    async def create(self, call: BoardCall) -> Answer[Json]:
        body: TokenBody = call.body or TokenBody()
        if body.purpose is TokenPurpose.CONTROLLER or body.replaces is not None:
            self._require_admin(call)
        made = await self._tokens.create(
            actor=actor(call), board_name=body.name, role=body.role, cluster_id=body.cluster_id,
            replaces=body.replaces, purpose=body.purpose, life_seconds=body.ttl_seconds,
        )  # fmt: skip
        told = views.join_token(made.token, now_ns=self._clock.now_ns())
        return Answer(content={"token": made.text, **told})

    def _require_admin(self, call: BoardCall) -> None:
        """Another server sees everything, and a board's place is its identity: not for every operator."""
        try:
            self._gate.admit(call.caller, ADMINISTER, call.path)
        except PermissionDenied as error:
            raise PermissionDenied(
                "tokens for servers, and for another key of a known board, are made by administrators"
            ) from error

    async def list(self, call: BoardCall) -> Answer[Json]:
        now_ns = self._clock.now_ns()
        found = sorted(self._tokens.all(), key=lambda one: -one.created_revision)
        return Answer(content=listed(call, found, lambda one: views.join_token(one, now_ns=now_ns)))

    async def revoke(self, call: BoardCall) -> Answer[None]:
        await self._tokens.revoke(call.path["token"], actor=actor(call))
        return Answer(content=None)

    async def waiting(self, call: BoardCall) -> Answer[Json]:
        return Answer(content=listed(call, self._approvals.all(), views.approval))

    async def decide(self, call: BoardCall) -> Answer[Json]:
        body: DecisionBody = call.body
        name, by = call.path["approval"], actor(call)
        view = call.answering(lambda decided: Answer(content={"data": views.approval(decided)}))
        decide = self._approvals.approve if body.approve else self._approvals.reject
        return view(await decide(name, actor=by))
