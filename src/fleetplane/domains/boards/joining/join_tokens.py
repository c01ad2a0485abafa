"""Join tokens, and approvals of keys that ask to take a known board's place.

A token is made for a board, shown once, stored as a digest, and good once and for a short time.

A machine that comes back without its certificate may be the board after its card was replaced, or
someone who read its serial number off a label. An operator decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import (
    APPROVAL,
    BOARD,
    CLUSTER,
    JOIN_TOKEN,
    SCOPE,
    Approval,
    ApprovalSpec,
    ApprovalState,
    ApprovalStatus,
    BoardRole,
    JoinToken,
    JoinTokenSpec,
    JoinTokenStatus,
    TokenPurpose,
)
from fleetplane.domains.boards.rules import NAME_LIMIT, BoardFacts
from fleetplane.domains.boards.wire import join_token
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.enrolment import Redemption, digest, redeem
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

PER_BOARD_LIMIT = 8
"""Waiting for one board: more is an attack, not a mistake."""


class Approvals:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Approvals {len(self._store.list(APPROVAL, SCOPE))}>"

    def all(self) -> Sequence[Approval]:
        return self._store.list(APPROVAL, SCOPE)

    async def approve(self, name: str, *, actor: str) -> Approval:
        """Let the key in when it asks next; the board's present key is good no more from then on."""
        return await self._decide(name, ApprovalState.APPROVED, actor=actor)

    async def reject(self, name: str, *, actor: str) -> Approval:
        return await self._decide(name, ApprovalState.REJECTED, actor=actor)

    async def _decide(self, name: str, state: ApprovalState, *, actor: str) -> Approval:
        def change(draft: Draft) -> Approval:
            found = draft.get(APPROVAL, SCOPE, name)
            if found is None:
                raise NotFound(f"nothing named {name!r} waits for approval", field="name")
            if _state(found) not in (ApprovalState.PENDING, state):
                raise FailedPrecondition(f"{name} was {_state(found)} already")
            status = ApprovalStatus(state=state, decided_by=actor, decided_at_ns=draft.now_ns)
            return draft.put(APPROVAL, SCOPE, name, spec=found.spec, status=status)

        done = await self._store.transact(
            change, actor=actor, action=f"boards.{state.value}", touches=[APPROVAL.key(SCOPE, name)]
        )
        return done.value

    async def forget(self, board: int, *, actor: str) -> None:
        """Whatever waits for a board that is gone."""
        keys = [APPROVAL.key(SCOPE, one.name) for one in self.all() if one.spec.board == board]

        def change(draft: Draft) -> None:
            for key in keys:
                if draft.get(APPROVAL, SCOPE, key.name) is not None:
                    draft.delete(APPROVAL, SCOPE, key.name)

        if keys:
            await self._store.transact(change, actor=actor, action="boards.forget_approvals", touches=keys)


# Parts of the transaction that registers a board.


def approval_key(board: int, key_digest: str) -> Key:
    return APPROVAL.key(SCOPE, f"{board}-{key_digest[:32]}")


def ask(draft: Draft, spec: ApprovalSpec) -> ApprovalState:
    """How the request of this key stands; made if there is none."""
    name = approval_key(spec.board, spec.key_digest).name
    found = draft.get(APPROVAL, SCOPE, name)
    if found is not None:
        return _state(found)
    waiting = sum(
        one.spec.board == spec.board and _state(one) is ApprovalState.PENDING
        for one in draft.list(APPROVAL, SCOPE)
    )
    if waiting >= PER_BOARD_LIMIT:
        raise ResourceExhausted(f"{waiting} keys already wait to take the place of board {spec.board}")
    draft.put(APPROVAL, SCOPE, name, spec=spec, status=ApprovalStatus(state=ApprovalState.PENDING))
    return ApprovalState.PENDING


def used(draft: Draft, board: int, key_digest: str) -> None:
    """Forget an approval that has been made use of."""
    name = approval_key(board, key_digest).name
    if draft.get(APPROVAL, SCOPE, name) is not None:
        draft.delete(APPROVAL, SCOPE, name)


def _state(found: Approval) -> ApprovalState:
    return found.status.state if found.status is not None else ApprovalState.PENDING


DEFAULT_LIFE_SECONDS = 3600.0
LIFE_LIMIT_SECONDS = 7 * 86_400.0
"""A card that is written on Monday may be put in on Friday; not next month."""
NAME_BYTES = 8
PURPOSE = "boards/join"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeToken:
    """The only time that the text can be read."""

    token: JoinToken
    text: str


class JoinTokens:
    def __init__(self, store: Store, authority: Authority, clock: Clock) -> None:
        self._store = store
        self._authority = authority
        self._clock = clock

    def __repr__(self) -> str:
        return f"<JoinTokens {len(self._store.list(JOIN_TOKEN, SCOPE))}>"

    def all(self) -> Sequence[JoinToken]:
        return self._store.list(JOIN_TOKEN, SCOPE)

    async def create(
        self,
        *,
        actor: str,
        board_name: str = "",
        role: BoardRole | None = None,
        cluster_id: int | None = None,
        replaces: int | None = None,
        purpose: TokenPurpose = TokenPurpose.BOARD,
        life_seconds: float = DEFAULT_LIFE_SECONDS,
    ) -> MadeToken:
        """What is left out, the board may choose. A controller's token needs its name."""
        if not 0 < life_seconds <= LIFE_LIMIT_SECONDS:
            raise InvalidArgument(
                f"life_seconds must be above 0 and at most {LIFE_LIMIT_SECONDS:g}", field="life_seconds"
            )
        if len(board_name) > NAME_LIMIT or not board_name.isprintable():
            raise InvalidArgument(f"name must have at most {NAME_LIMIT} characters", field="name")
        if purpose is TokenPurpose.CONTROLLER and not board_name:
            raise InvalidArgument("a controller's token needs the controller's name", field="name")
        random = self._clock.token_bytes(join_token.SECRET_BYTES)
        text = str(join_token.make(random, credentials.fingerprint(self._authority)))
        name = self._clock.token_bytes(NAME_BYTES).hex()
        spec = JoinTokenSpec(
            digest=digest(text),
            expires_at_ns=self._clock.now_ns() + round(life_seconds * 1e9),
            created_by=actor,
            purpose=purpose,
            board_name=board_name,
            role=role,
            cluster_id=cluster_id,
            replaces=replaces,
        )

        def change(draft: Draft) -> JoinToken:
            if cluster_id is not None and draft.get(CLUSTER, SCOPE, str(cluster_id)) is None:
                raise NotFound(f"cluster {cluster_id} is not known", field="cluster_id")
            if replaces is not None and draft.get(BOARD, SCOPE, str(replaces)) is None:
                raise NotFound(f"board {replaces} is not known", field="replaces")
            draft.claim(JOIN_TOKEN, SCOPE, "digest", spec.digest, name)
            return draft.put(JOIN_TOKEN, SCOPE, name, spec=spec, expect=ABSENT)

        done = await self._store.transact(
            change, actor=actor, action="boards.create_token", touches=[token_key(name)]
        )
        return MadeToken(token=done.value, text=text)

    async def revoke(self, name: str, *, actor: str) -> None:
        await self._remove([name], actor=actor, action="boards.revoke_token", must_exist=True)

    async def sweep(self, *, actor: str) -> int:
        """Forget tokens that nobody would accept any more; how many there were."""
        now_ns = self._clock.now_ns()
        ended = [token.name for token in self.all() if token.spec.expires_at_ns <= now_ns]
        if ended:
            await self._remove(ended, actor=actor, action="boards.sweep_tokens", must_exist=False)
        return len(ended)

    async def _remove(self, names: Sequence[str], *, actor: str, action: str, must_exist: bool) -> None:
        def change(draft: Draft) -> None:
            for name in names:
                found = draft.get(JOIN_TOKEN, SCOPE, name)
                if found is not None:
                    draft.release(JOIN_TOKEN, SCOPE, "digest", found.spec.digest, name)
                    draft.delete(JOIN_TOKEN, SCOPE, name)
                elif must_exist:
                    raise NotFound(f"there is no join token {name!r}", field="name")

        await self._store.transact(
            change, actor=actor, action=action, touches=[token_key(name) for name in names]
        )

    def find(self, text: str) -> JoinToken:
        """The token that somebody presents, whatever its age; Unauthenticated if there is none."""
        try:
            join_token.parse(text)
        except InvalidArgument as error:
            raise Unauthenticated(error.message, details={"cause": "malformed"}) from error
        name = self._store.claimed_by(JOIN_TOKEN, SCOPE, "digest", digest(text.strip()))
        found = self._store.get(JOIN_TOKEN, SCOPE, name) if name is not None else None
        if found is None:
            raise _unknown()
        return found


# Parts of the transaction that registers a board.


def token_key(name: str) -> Key:
    return JOIN_TOKEN.key(SCOPE, name)


def use(draft: Draft, name: str, *, key_digest: str) -> JoinToken:
    """Use a token up for one key; that key may use it again, if the answer was lost."""
    token = draft.get(JOIN_TOKEN, SCOPE, name)
    if token is None:
        raise _unknown()
    spec = token.spec
    redemption = redeem(
        draft,
        purpose=PURPOSE,
        token_digest=spec.digest,
        key_digest=key_digest,
        expires_at_ns=spec.expires_at_ns,
    )
    if redemption is Redemption.FIRST and draft.now_ns >= spec.expires_at_ns:
        raise Unauthenticated(
            "the join token has expired", hint="have a new one made", details={"cause": "expired"}
        )
    return token


def mark_used(draft: Draft, token: JoinToken, principal: str) -> None:
    status = token.status or JoinTokenStatus(used_at_ns=draft.now_ns, used_by=principal)
    draft.put(JOIN_TOKEN, SCOPE, token.name, spec=token.spec, status=status)


def bound(spec: JoinTokenSpec, facts: BoardFacts) -> BoardFacts:
    """The facts with what the token decides; refuses those that say otherwise."""
    for field, decided, said in (
        ("name", spec.board_name, facts.name),
        ("role", spec.role, facts.role),
        ("cluster_id", spec.cluster_id, facts.cluster_id),
    ):
        if decided and said and decided != said:
            raise PermissionDenied(
                f"the join token is for {field} {decided!s}, not {said!s}",
                field=field,
                details={"cause": "bound"},
            )
    return msgspec.structs.replace(
        facts,
        name=spec.board_name or facts.name,
        role=spec.role or facts.role,
        cluster_id=spec.cluster_id or facts.cluster_id,
    )


def _unknown() -> Unauthenticated:
    return Unauthenticated(
        "the join token is not known", hint="have a new one made", details={"cause": "unknown"}
    )
