"""The boards, as records in the store: each change of one is one transaction.

Knows the store and the rules; knows no protobuf and no connections. What other transactions must do together
with theirs is offered as functions of a draft. Deleting a board also revokes its certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import (
    BOARD,
    CLUSTER,
    SCOPE,
    AgentDialect,
    Board,
    BoardRole,
    BoardSilence,
    BoardSpec,
    BoardState,
    BoardStatus,
    number_of,
)
from fleetplane.domains.boards.rules import KEYS, BoardFacts
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, NotFound
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.resources import Condition, Key
from fleetplane.kernel.store import ABSENT, Draft, Store

SERVER = "system/boards"
"""The actor of what the domain does by itself."""
UNHEARD_BATCH = 256
"""Boards of one transaction, about 1 KB each."""

Step = Callable[[BoardStatus, int], BoardStatus]
"""From a status and the time to the next status."""


DeletionGuard = Callable[[Draft, int], None]
"""Raises `FailedPrecondition` for a board that must not be deleted yet; part of the transaction, pure."""


class Boards:
    def __init__(self, store: Store, *, deletion_guards: Sequence[DeletionGuard] = ()) -> None:
        """`deletion_guards` are asked before a board is forgotten: for those whose things hang on it."""
        self._store = store
        self.numbers = Numbers(store, "board")
        self._deletion_guards = deletion_guards
        self._listed: tuple[Sequence[Board], Sequence[Board]] = ((), ())

    def __repr__(self) -> str:
        return f"<Boards {len(self._store.list(BOARD, SCOPE))}>"

    # Reading.

    def get(self, number: int) -> Board | None:
        return self._store.get(BOARD, SCOPE, str(number))

    def require(self, number: int, *, field: str = "id") -> Board:
        return _present(self.get(number), number, field)

    def all(self) -> Sequence[Board]:
        """By number. The same object until one changes."""
        kept = self._store.list(BOARD, SCOPE)
        if self._listed[0] is not kept:
            self._listed = (kept, sorted(kept, key=number_of))
        return self._listed[1]

    def in_cluster(self, cluster: int) -> list[Board]:
        return [board for board in self.all() if board.spec.cluster_id == cluster]

    def holder(self, key: str, value: str) -> Board | None:
        """Whose name, hardware address or serial this is."""
        owner = self._store.claimed_by(BOARD, SCOPE, key, value)
        return self.get(int(owner)) if owner is not None else None

    def recognise(self, facts: BoardFacts) -> Board | None:
        return rules.recognise(facts, self.holder)

    async def up_to_date(self) -> None:
        """Wait for what is being written, so that what is read next includes it."""
        await self._store.settled(BOARD)

    # Writing.

    async def create(
        self,
        facts: BoardFacts,
        *,
        actor: str,
        came: Came | None = None,
        check: Callable[[Draft], None] = lambda _: None,
    ) -> Board:
        """A new board; AlreadyExists if its name, hardware address or serial is taken.

        `came` is given if an agent is there itself; otherwise somebody writes down a board that
        nobody has heard from. `check` refuses, inside the transaction, a board for which there is no room.
        """
        facts = rules.checked(facts)
        require_name(facts)
        if (known := taken_by(facts, self.holder)) is not None:
            raise known  # without using up a number
        number = await self.numbers.take()

        def change(draft: Draft) -> Board:
            if (known := taken_by(facts, _finder(draft))) is not None:
                raise known
            check(draft)
            return add(draft, self.numbers, number, facts, came)

        done = await self._store.transact(
            change, actor=actor, action="boards.create", touches=[board_key(number), self.numbers.key]
        )
        return done.value

    async def update(
        self, number: int, facts: BoardFacts, *, actor: str, declared: BoardState | None = None
    ) -> Board:
        """What an operator says about a board; blanks leave things as they are."""
        facts = rules.checked(facts)

        def change(draft: Draft) -> Board:
            board = _present(draft.get(BOARD, SCOPE, str(number)), number, "id")
            status = status_of(board)
            if declared is not None:
                status = msgspec.structs.replace(status, declared=declared)
            spec = board.spec
            if facts.ip_address:
                if facts.ip_address != spec.ip_address and status.port:
                    status = msgspec.structs.replace(status, address=facts.ip_address)
                spec = msgspec.structs.replace(spec, confirmed_address=facts.ip_address)
            return rewrite(draft, board, spec=spec, facts=facts, status=status)

        return await self._write(number, change, actor=actor, action="boards.update")

    async def declare(
        self, number: int, state: BoardState, *, actor: str, facts: BoardFacts | None = None
    ) -> Board:
        """What provisioning makes of a board, with what it found out on the way."""
        return await self.update(number, facts or BoardFacts(), actor=actor, declared=state)

    async def depart(self, number: int, *, actor: str) -> Board:
        """Out of its cluster and back to being discovered, as after provisioning was undone."""

        def change(draft: Draft) -> Board:
            board = _present(draft.get(BOARD, SCOPE, str(number)), number, "id")
            spec = msgspec.structs.replace(
                board.spec, cluster_id=None, node_name="", kube_version="", role=BoardRole.WORKER
            )
            status = msgspec.structs.replace(status_of(board), declared=BoardState.DISCOVERED)
            return rewrite(draft, board, spec=spec, status=status)

        return await self._write(number, change, actor=actor, action="boards.depart")

    async def hear(
        self,
        number: int,
        step: Step,
        *,
        facts: BoardFacts | None = None,
        merge: Callable[[Board, int], Sequence[Condition]] | None = None,
        actor: str,
    ) -> Board:
        """What a board says about itself. Nothing is written if that is nothing new.

        `merge` makes its conditions of those that it has, at the time that it is given.
        """
        facts = rules.checked(facts).of_machine() if facts is not None else BoardFacts()

        def change(draft: Draft) -> Board:
            board = _present(draft.get(BOARD, SCOPE, str(number)), number, "id")
            status = step(status_of(board), draft.now_ns)
            conditions = None if merge is None else merge(board, draft.now_ns)
            return rewrite(draft, board, facts=facts, status=status, conditions=conditions)

        return await self._write(number, change, actor=actor, action="boards.report")

    async def silence(
        self, number: int, silence: BoardSilence, *, last_seen_at_ns: int | None, judged: int | None = None
    ) -> Board | None:
        """Note that nothing was heard; None if the board is gone.

        `judged` is the revision of the board that was found silent: one that was written since may have
        been heard, and stays as it is.
        """

        def change(draft: Draft) -> Board | None:
            board = draft.get(BOARD, SCOPE, str(number))
            if board is None or judged not in (None, board.revision):
                return board
            status = status_of(board)
            seen = max(status.last_seen_at_ns or 0, last_seen_at_ns or 0) or None
            status = msgspec.structs.replace(status, silence=silence, last_seen_at_ns=seen)
            return rewrite(draft, board, status=status)

        done = await self._store.transact(
            change, actor=SERVER, action="boards.silence", touches=[board_key(number)]
        )
        return done.value

    async def mark_unheard(self, names: Sequence[str]) -> None:
        """Note that what is known of these boards is from before this server judged."""

        def change(draft: Draft, batch: Sequence[str]) -> None:
            for board in filter(None, (draft.get(BOARD, SCOPE, name) for name in batch)):
                status = status_of(board)
                if status.silence is BoardSilence.NONE:
                    rewrite(draft, board, status=msgspec.structs.replace(status, unheard=True))

        for at in range(0, len(names), UNHEARD_BATCH):
            batch = names[at : at + UNHEARD_BATCH]
            await self._store.transact(
                partial(change, batch=batch),
                actor=SERVER,
                action="boards.unheard",
                touches=[board_key(int(name)) for name in batch],
            )

    async def delete(self, number: int, *, actor: str) -> Board:
        """Forget a board; its name, hardware address and serial are free again."""

        def change(draft: Draft) -> Board:
            board = _present(draft.get(BOARD, SCOPE, str(number)), number, "id")
            for guard in self._deletion_guards:
                guard(draft, number)
            for key, value in _claims(board.spec):
                draft.release(BOARD, SCOPE, key, value, board.name)
            return draft.delete(BOARD, SCOPE, board.name)

        return await self._write(number, change, actor=actor, action="boards.delete")

    async def _write(
        self, number: int, change: Callable[[Draft], Board], *, actor: str, action: str
    ) -> Board:
        done = await self._store.transact(change, actor=actor, action=action, touches=[board_key(number)])
        return done.value


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an agent that is there itself, beside what it says of its machine."""

    address: str
    port: int
    plaintext: bool = False
    dialect: AgentDialect | None = None
    """None where the connection does not show the dialect."""
    agent_version: str = ""
    capabilities: tuple[str, ...] = ()
    boot_id: str = ""
    labels: dict[str, str] = {}

    def noted(self, status: BoardStatus) -> BoardStatus:
        """Blanks leave things as they are; a new boot starts the count of reports anew."""
        return msgspec.structs.replace(
            status,
            address=self.address or status.address,
            port=self.port or status.port,
            plaintext=self.plaintext,
            dialect=self.dialect or status.dialect,
            agent_version=self.agent_version or status.agent_version,
            capabilities=self.capabilities or status.capabilities,
            boot_id=self.boot_id or status.boot_id,
            sequence=0,
        )


# Parts of transactions.


def board_key(number: int) -> Key:
    return BOARD.key(SCOPE, str(number))


def add(draft: Draft, numbers: Numbers, number: int, facts: BoardFacts, came: Came | None) -> Board:
    """Put a board that nobody knows yet; its number was taken, its facts are checked."""
    spec = rules.merged(BoardSpec(name=facts.name), facts)
    if came is None:
        spec = msgspec.structs.replace(spec, confirmed_address=spec.ip_address)
        status = BoardStatus(state=BoardState.DISCOVERED, declared=BoardState.DISCOVERED)
    else:
        status = rules.registered(came.noted(BoardStatus(state=BoardState.READY)), now_ns=draft.now_ns)
    status = msgspec.structs.replace(status, state_changed_at_ns=draft.now_ns)
    _check_cluster(draft, spec)
    numbers.record(draft, number)
    for key, value in _claims(spec):
        draft.claim(BOARD, SCOPE, key, value, str(number))
    labels = came.labels if came is not None else None
    return draft.put(BOARD, SCOPE, str(number), spec=spec, status=status, labels=labels, expect=ABSENT)


def rewrite(
    draft: Draft,
    board: Board,
    *,
    status: BoardStatus,
    spec: BoardSpec | None = None,
    facts: BoardFacts | None = None,
    conditions: Iterable[Condition] | None = None,
    labels: dict[str, str] | None = None,
) -> Board:
    """Put a changed board: its claims follow its facts, its state follows from its status."""
    spec = rules.merged(spec or board.spec, facts or BoardFacts())
    if spec.cluster_id != board.spec.cluster_id:
        _check_cluster(draft, spec)
    before, after = dict(_claims(board.spec)), dict(_claims(spec))
    for key, value in before.items():
        if after.get(key) != value:
            draft.release(BOARD, SCOPE, key, value, board.name)
    for key, value in after.items():
        draft.claim(BOARD, SCOPE, key, value, board.name)
    return draft.put(
        BOARD,
        SCOPE,
        board.name,
        spec=spec,
        status=rules.settled(status, now_ns=draft.now_ns),
        conditions=board.conditions if conditions is None else conditions,
        labels=labels or None,
    )


def found_in(draft: Draft, facts: BoardFacts) -> Board | None:
    """The board that these facts are about, as the transaction sees it."""
    return rules.recognise(facts, _finder(draft))


def taken_by(facts: BoardFacts, find: Callable[[str, str], Board | None]) -> AlreadyExists | None:
    """Why a board with these facts cannot be new."""
    for key, value_of in KEYS.items():
        value = value_of(facts)
        if value and (board := find(key, value)) is not None:
            return AlreadyExists(
                f"{key} {value!r} is that of board {board.name}", field=key, details={"board": board.name}
            )
    return None


def require_name(facts: BoardFacts) -> None:
    if not facts.name:
        raise InvalidArgument("name must not be empty", field="name")


def status_of(board: Board) -> BoardStatus:
    assert board.status is not None, "a board is never put without a status"
    return board.status


def _present(board: Board | None, number: int, field: str) -> Board:
    if board is None:
        raise NotFound(f"board {number} is not known", field=field)
    return board


def _finder(draft: Draft) -> Callable[[str, str], Board | None]:
    def find(key: str, value: str) -> Board | None:
        owner = draft.claimed_by(BOARD, SCOPE, key, value)
        return draft.get(BOARD, SCOPE, owner) if owner is not None else None

    return find


def _claims(spec: BoardSpec) -> list[tuple[str, str]]:
    return [(key, value) for key, value_of in KEYS.items() if (value := value_of(spec))]


def _check_cluster(draft: Draft, spec: BoardSpec) -> None:
    if spec.cluster_id is not None and draft.get(CLUSTER, SCOPE, str(spec.cluster_id)) is None:
        raise NotFound(f"cluster {spec.cluster_id} is not known", field="cluster_id")


async def delete_board(boards: Boards, revocations: Revocations, number: int, *, actor: str) -> None:
    board = await boards.delete(number, actor=actor)
    # Its certificate is refused already, because the board is gone; this ends what is open with it.
    await revocations.revoke(
        principal=credentials.principal_of(number),
        reason="the board was deleted",
        actor=actor,
        expires_at_ns=status_of(board).certificate_expires_at_ns,
    )
