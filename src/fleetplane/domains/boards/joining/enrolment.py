"""How a board comes to have an identity here, keeps it and gets it back.

    it shows                                   it is                        it gets
    its certificate                            the board in it              an update; a certificate if asked
    a join token, unknown hardware             a new board                  a record and a certificate
    a join token, hardware without a key       written down before          that record and a certificate
    a join token, hardware with another key    perhaps the board            a place in the queue for approval
    a token made to replace that board         the board                    that record and a certificate
    the key of a board, no certificate         perhaps the board            a place in the queue for approval
    nothing                                    nobody                       UNAUTHENTICATED

Checking the token, using it up, writing the board down and recording its certificate are one
transaction: of any number who present one token one key gets in, and that key may ask again if the
answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.ca import issued as certificates
from fleetplane.domains.boards.ca.issued import IssuedCertificates
from fleetplane.domains.boards.inventory import boards as registry
from fleetplane.domains.boards.inventory.boards import Boards, Came
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.joining import join_tokens as approvals
from fleetplane.domains.boards.joining import join_tokens as tokens
from fleetplane.domains.boards.joining.join_tokens import JoinTokens
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    ApprovalSpec,
    ApprovalState,
    Board,
    BoardCertificateSpec,
    BoardStatus,
    JoinToken,
    TokenPurpose,
    number_of,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.kernel.identity import Authority, IssuedCertificate
from fleetplane.kernel.identity.enrolment import ProvenKey, proven_key
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

ATTEMPTS = 3
"""Whether a board is known is looked up before its transaction, which may find it otherwise."""
CERTIFICATE_DAYS = 30.0
JOINING = "system/boards/join"
"""The actor of a registration by a board without an identity."""

R = TypeVar("R")


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a registration; only the CSR and the token prove anything."""

    facts: BoardFacts
    came: Came
    join_token: str = ""
    csr_pem: str = ""
    claimed_id: str = ""
    ssh_host_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBoard:
    board: Board | None
    """None for a controller, and for someone who has to wait."""
    issued: IssuedCertificate | None = None
    already_registered: bool = False
    approval: ApprovalState | None = None
    """Set if someone has to decide first, or has decided against it."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What a registration needs to have ready before its transaction."""

    registration: Registration
    facts: BoardFacts
    key: ProvenKey
    number: int
    is_new: bool
    issued: IssuedCertificate
    spec: BoardCertificateSpec
    certificate: int
    touches: list[Key] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class BoardEnrolment:
    store: Store
    boards: Boards
    authority: Authority
    join_tokens: JoinTokens
    issued: IssuedCertificates
    certificate_days: float = field(kw_only=True, default=CERTIFICATE_DAYS)

    def __repr__(self) -> str:
        return f"<Enrolment certificates={self.certificate_days:g}d>"

    # Those who have shown who they are.

    async def register_again(
        self, number: int, presented: str, registration: Registration
    ) -> RegisteredBoard:
        """A board with its certificate, whose key has the digest `presented`."""
        if registration.claimed_id not in ("", str(number)):
            raise PermissionDenied("node_id is not that of the certificate", field="node_id")
        # Its name was chosen when it joined, or by an operator since: that of its machine does not count.
        facts = msgspec.structs.replace(rules.checked(registration.facts).of_machine(), name="")
        self.boards.require(number)
        attempt = None
        if registration.csr_pem:
            key = proven_key(registration.csr_pem)
            attempt = await self._prepare(registration, facts, key, number, is_new=False)

        def change(draft: Draft) -> Board:
            board = _present(draft, number)
            if attempt is None:
                return _came_again(draft, board, facts, registration.came)
            _check_succession(registry.status_of(board), presented=presented, wanted=attempt.key.digest)
            return self._admit(draft, attempt, board)

        board = await self._transact(
            change,
            actor=credentials.principal_of(number),
            touches=attempt.touches if attempt is not None else [registry.board_key(number)],
        )
        return RegisteredBoard(
            board=board, issued=attempt.issued if attempt is not None else None, already_registered=True
        )

    async def renew_controller(self, principal: str, registration: Registration) -> RegisteredBoard:
        """Another server, with its certificate: a new one for the same name."""
        name = principal.partition("/")[2]
        return await self._issue_to_controller(name, registration, actor=principal, token=None)

    # Those who have not.

    async def register(self, registration: Registration) -> RegisteredBoard:
        if not registration.join_token:
            return await self._come_back(registration)
        token = self.join_tokens.find(registration.join_token)
        if token.spec.purpose is TokenPurpose.CONTROLLER:
            return await self._issue_to_controller(
                token.spec.board_name, registration, actor=JOINING, token=token
            )
        facts = tokens.bound(token.spec, rules.checked(registration.facts))
        registry.require_name(facts)
        key = proven_key(registration.csr_pem)
        for attempt in range(ATTEMPTS):
            try:
                return await self._join(token, registration, facts, key)
            except _Otherwise:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _join(
        self, token: JoinToken, registration: Registration, facts: BoardFacts, key: ProvenKey
    ) -> RegisteredBoard:
        await self.boards.up_to_date()
        known = self.boards.recognise(facts)
        number = number_of(known) if known is not None else await self.boards.numbers.take()
        attempt = await self._prepare(registration, facts, key, number, is_new=known is None)

        def change(draft: Draft) -> RegisteredBoard:
            used = tokens.use(draft, token.name, key_digest=key.digest)
            board = registry.found_in(draft, facts)
            if (board is None) is not attempt.is_new or (board is not None and number_of(board) != number):
                raise _Otherwise("the board was registered by someone else meanwhile")
            if board is not None and (state := self._standing(draft, board, attempt, used)) is not None:
                return RegisteredBoard(board=None, approval=state)
            tokens.mark_used(draft, used, credentials.principal_of(number))
            made = self._admit(draft, attempt, board)
            return RegisteredBoard(board=made, issued=attempt.issued, already_registered=board is not None)

        done = await self._transact(
            change, actor=JOINING, touches=[*attempt.touches, tokens.token_key(token.name)]
        )
        await self._retire_older(done, attempt, known)
        return done

    def _standing(
        self, draft: Draft, board: Board, attempt: _Attempt, token: JoinToken
    ) -> ApprovalState | None:
        """None if this key may be the board's; otherwise how its request to be so stands."""
        status = registry.status_of(board)
        if status.key_digest in ("", attempt.key.digest) or token.spec.replaces == attempt.number:
            return None
        return self._ask(draft, board, attempt)

    def _ask(self, draft: Draft, board: Board, attempt: _Attempt) -> ApprovalState | None:
        state = approvals.ask(
            draft,
            ApprovalSpec(
                board=attempt.number,
                key_digest=attempt.key.digest,
                board_name=board.spec.name,
                serial_number=attempt.facts.serial_number,
                mac_address=attempt.facts.mac_address,
                address=attempt.registration.came.address,
                requested_at_ns=draft.now_ns,
            ),
        )
        return None if state is ApprovalState.APPROVED else state

    async def _come_back(self, registration: Registration) -> RegisteredBoard:
        """Without certificate and token: only a key that a known board had is listened to."""
        if not registration.csr_pem:
            raise _nobody()
        key = proven_key(registration.csr_pem)
        facts = rules.checked(registration.facts).of_machine()
        await self.boards.up_to_date()
        known = self.boards.recognise(facts)
        if known is None or registry.status_of(known).key_digest != key.digest:
            raise _nobody()
        number = number_of(known)
        facts = msgspec.structs.replace(facts, name="")
        attempt = await self._prepare(registration, facts, key, number, is_new=False)

        def change(draft: Draft) -> RegisteredBoard:
            board = _present(draft, number)
            if (state := self._ask(draft, board, attempt)) is not None:
                return RegisteredBoard(board=None, approval=state)
            made = self._admit(draft, attempt, board)
            return RegisteredBoard(board=made, issued=attempt.issued, already_registered=True)

        return await self._transact(change, actor=JOINING, touches=attempt.touches)

    async def _issue_to_controller(
        self, name: str, registration: Registration, *, actor: str, token: JoinToken | None
    ) -> RegisteredBoard:
        key = proven_key(registration.csr_pem)
        if registration.facts.name not in ("", name):
            raise PermissionDenied(f"the certificate is for controller {name}", field="name")
        issued = credentials.issue_to_controller(self.authority, key.key, name, days=self.certificate_days)
        spec = certificates.described(issued, auto_renew=True)
        number = await self.issued.numbers.take()
        touches = self.issued.touches(number)

        def change(draft: Draft) -> None:
            if token is not None:
                used = tokens.use(draft, token.name, key_digest=key.digest)
                tokens.mark_used(draft, used, f"board-controller/{name}")
            self.issued.record(draft, number, spec)

        if token is not None:
            touches.append(tokens.token_key(token.name))
        await self._transact(change, actor=actor, touches=touches)
        return RegisteredBoard(board=None, issued=issued, already_registered=token is None)

    # What they have in common.

    async def _prepare(
        self, registration: Registration, facts: BoardFacts, key: ProvenKey, number: int, *, is_new: bool
    ) -> _Attempt:
        issued = credentials.issue_to_board(self.authority, key.key, number, days=self.certificate_days)
        certificate = await self.issued.numbers.take()
        attempt = _Attempt(
            registration=registration,
            facts=facts,
            key=key,
            number=number,
            is_new=is_new,
            issued=issued,
            spec=certificates.described(issued, board=number, auto_renew=True),
            certificate=certificate,
        )
        attempt.touches = [
            registry.board_key(number),
            *self.issued.touches(certificate),
            approvals.approval_key(number, key.digest),
        ]
        if is_new:
            attempt.touches.append(self.boards.numbers.key)
        return attempt

    def _admit(self, draft: Draft, attempt: _Attempt, board: Board | None) -> Board:
        came = attempt.registration.came
        if board is None:
            board = registry.add(draft, self.boards.numbers, attempt.number, attempt.facts, came)
        else:
            # A board that was written down before may get its place from the token; later, operators decide.
            is_first = registry.status_of(board).registered_at_ns is None
            facts = attempt.facts if is_first else attempt.facts.of_machine()
            board = _came_again(draft, board, facts, came)
        approvals.used(draft, attempt.number, attempt.key.digest)
        self.issued.record(draft, attempt.certificate, attempt.spec)
        status = msgspec.structs.replace(
            registry.status_of(board),
            key_digest=attempt.key.digest,
            certificate_serial=attempt.spec.serial,
            certificate_expires_at_ns=attempt.spec.not_after_ns,
        )
        spec = board.spec
        if attempt.key.digest != registry.status_of(board).key_digest:  # joining, not renewing
            spec = msgspec.structs.replace(spec, ssh_host_keys=attempt.registration.ssh_host_keys)
        return registry.rewrite(draft, board, spec=spec, status=status)

    async def _retire_older(self, done: RegisteredBoard, attempt: _Attempt, known: Board | None) -> None:
        """A key that was replaced, because it was lost, is refused although its certificate looks good."""
        if done.board is None or known is None:
            return
        if registry.status_of(known).key_digest not in ("", attempt.key.digest):
            await self.issued.revoke_of_board(
                attempt.number, but=attempt.spec.serial, reason="replaced by another key", actor=JOINING
            )

    async def _transact(self, change: Callable[[Draft], R], *, actor: str, touches: Sequence[Key]) -> R:
        done = await self.store.transact(change, actor=actor, action="boards.register", touches=touches)
        return done.value


class _Otherwise(Conflict):
    """What was looked up before the transaction is not so any more."""


def _came_again(draft: Draft, board: Board, facts: BoardFacts, came: Came) -> Board:
    status = rules.registered(came.noted(registry.status_of(board)), now_ns=draft.now_ns)
    return registry.rewrite(draft, board, facts=facts, status=status, labels=came.labels)


def _present(draft: Draft, number: int) -> Board:
    board = draft.get(BOARD, SCOPE, str(number))
    if board is None:
        raise NotFound(f"board {number} is not known", field="node_id")
    return board


def _check_succession(status: BoardStatus, *, presented: str, wanted: str) -> None:
    """A key that was replaced renews nothing any more, however long its last certificate runs.

    But whoever replaced it and lost the answer still has only the old one, and asks for the same
    new one again.
    """
    if status.key_digest not in ("", presented, wanted):
        raise PermissionDenied(
            "another key has taken the place of the one that was presented", details={"cause": "replaced"}
        )


def _nobody() -> Unauthenticated:
    return Unauthenticated(
        "a join token or a certificate is needed",
        hint="have a join token made for this board",
        details={"cause": "no credentials"},
    )


def require_agent_port(port: int) -> int:
    if not 0 <= port <= rules.PORT_LIMIT:
        raise InvalidArgument(f"agent_port must be 0 to {rules.PORT_LIMIT}", field="agent_port")
    return port
