"""This server as a client of the boards' agents: one channel a board, opened when it is needed.

A board is called at the address that it registered with. Its certificate, by our authority, must name it; the
address proves nothing. Boards without TLS are called in plain text only if they registered through the
listener for such. A lost board costs its callers an error within their deadline and affects no other board.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.calls.errors import AWAY, BoardAway, BoardUnreachable, translated
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import Board, number_of
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_agent import pi_agent_pb2_grpc
from fleetplane.kernel.access import Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, PermissionDenied, ResourceExhausted, Unavailable
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.revocation import Revocations

CHANNELS_LIMIT: Final = 4096
"""Open at once, about 100 KB each while connected. The one unused for longest is closed for the next."""
IN_FLIGHT_LIMIT: Final = 32
"""Calls and streams of one board at once."""
CALL_SECONDS: Final = 5.0
"""For a call that touches no more than memory or a pin at the other end."""
MESSAGE_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""What the original programs take, and twice what a command may print."""
CERTIFICATE_DAYS: Final = 7.0
"""Of our own certificate; a new one is made when a third of that is left."""
ACTOR_FIELD: Final = "fleetplane-actor"
ROLE_FIELD: Final = "fleetplane-role"
LEASE_FIELD: Final = "fleetplane-lease-seconds"
FENCE_FIELD: Final = "fleetplane-order"
ACTOR_LIMIT: Final = 256

_OPTIONS: Final = (
    # A board that comes back is tried at once, not when an older channel's patience allows.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A board that vanished without a word while it owes us something is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Otherwise a window grows to megabytes, and a log that nobody reads piles up here, not at the board.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
)

_CLOSED: Final = (grpc.aio.UsageError, grpc.aio.InternalError)
"""What the library raises about a channel that is being closed, as at the server's end."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    """On whose behalf a board is called; it writes that down beside our own name."""

    actor: str
    role: Role = VIEWER

    def metadata(self) -> list[tuple[str, str]]:
        # A header takes printable ASCII only.
        actor = self.actor[:ACTOR_LIMIT].encode("ascii", "backslashreplace").decode()
        printable = "".join(character if character.isprintable() else "?" for character in actor)
        return [(ACTOR_FIELD, printable), (ROLE_FIELD, str(self.role))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    channels: int
    calls: int
    """Under way, streams among them."""
    made: int
    lost: int
    """Calls that failed to connect or got no answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """Everything that makes a channel what it is: if any of it changes, another is needed."""

    host: str
    port: int
    plaintext: bool
    generation: int
    """The generation of our own certificate and of the trusted authorities."""

    @property
    def target(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"dns:///{host}:{self.port}"


@dataclass(slots=True, kw_only=True, eq=False)
class BoardLink:
    """An open channel, and the calls on it."""

    board: int
    address: ChannelAddress
    channel: grpc.aio.Channel
    calls: int = 0
    node: Any = field(init=False)
    """A stub for `NodeAgent`; the generated stubs have no types."""
    original: Any = field(init=False)
    """A stub for `pi_agent.PiAgentService`."""

    def __post_init__(self) -> None:
        self.node = boards_pb2_grpc.NodeAgentStub(self.channel)
        self.original = pi_agent_pb2_grpc.PiAgentServiceStub(self.channel)


Method = Callable[[BoardLink], Any]
"""Picks what to call, such as `lambda link: link.node.ControlGPIO`."""


class NodeLinks:
    def __init__(
        self,
        *,
        boards: Boards,
        authority: Authority,
        revocations: Revocations,
        clock: Clock,
        own_name: str,
        plain: bool = False,
        channels_limit: int = CHANNELS_LIMIT,
    ) -> None:
        self._boards = boards
        self._authority = authority
        self._revocations = revocations
        self._clock = clock
        self._own_name = own_name
        self._plain = plain
        self._limit = channels_limit
        self._links: OrderedDict[int, BoardLink] = OrderedDict()
        self._discarded: set[BoardLink] = set()
        """No longer for new calls; each is closed with its last one."""
        self._identity: tuple[int, float, grpc.ChannelCredentials] | None = None
        """Generation, when to make another, credentials."""
        self._generation = 0
        self._made = self._lost = 0
        self._closing: set[asyncio.Task[None]] = set()
        authority.subscribe(self._forget_identity)

    def __repr__(self) -> str:
        calls = sum(link.calls for link in self._links.values())
        return f"<NodeLinks {len(self._links)}/{self._limit} calls={calls}>"

    def statistics(self) -> LinkStatistics:
        links = (*self._links.values(), *self._discarded)
        calls = sum(link.calls for link in links)
        return LinkStatistics(channels=len(links), calls=calls, made=self._made, lost=self._lost)

    # Calling.

    async def call(
        self,
        board: int,
        method: Method,
        request: Message,
        answer: type[M],
        *,
        asked: CallOrigin,
        seconds: float = CALL_SECONDS,
        more: list[tuple[str, str]] | None = None,
    ) -> M:
        """A board's answer, or the error that its refusal or absence stands for."""
        metadata = [*asked.metadata(), *(more or ())]
        async with self._link(board) as link:
            try:
                said = await method(link)(request, timeout=seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise self._failed(error, board) from error
            except _CLOSED as error:
                raise BoardUnreachable(f"board {board}: {error}") from error
        assert isinstance(said, answer)
        return said

    async def reach(self, board: int, *, seconds: float) -> None:
        """Connect, or raise: then nothing was sent, which after a failed call nobody knows."""
        async with self._link(board) as link:
            try:
                async with asyncio.timeout(seconds):
                    await link.channel.channel_ready()
            except (TimeoutError, *_CLOSED):
                self._lost += 1
                raise BoardUnreachable(
                    f"board {board} could not be reached within {seconds:g} s; nothing was sent"
                ) from None

    async def stream(
        self, board: int, method: Method, request: Message, answer: type[M], *, asked: CallOrigin
    ) -> AsyncGenerator[M, None]:
        """Messages at the reader's pace: a slow reader makes the board wait, and nothing is buffered here."""
        async with self._link(board) as link:
            call = None
            try:
                call = method(link)(request, metadata=asked.metadata())
                async for said in call:
                    assert isinstance(said, answer)
                    yield said
            except grpc.aio.AioRpcError as error:
                raise self._failed(error, board) from error
            except _CLOSED as error:
                raise BoardUnreachable(f"board {board}: {error}") from error
            finally:
                if call is not None:
                    call.cancel()

    def _failed(self, error: grpc.aio.AioRpcError, board: int) -> FleetplaneError:
        meaning = translated(error, board=board)
        self._lost += isinstance(meaning, AWAY)
        return meaning

    # Links.

    def is_callable(self, board: Board) -> bool:
        """Whether anyone knows where it is."""
        status = status_of(board)
        return bool(status.address and status.port) and (self._plain or not status.plaintext)

    def drop(self, board: int) -> None:
        """Open a new channel for the next call: the board was restarted, or has moved, or is gone."""
        link = self._links.pop(board, None)
        if link is not None:
            self._discard(link)

    async def close(self) -> None:
        for board in tuple(self._links):
            self.drop(board)
        for link in tuple(self._discarded):
            await link.channel.close()
        self._discarded.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    @asynccontextmanager
    async def _link(self, board: int) -> AsyncIterator[BoardLink]:
        with self._using(self._open(self._boards.require(board))) as link:
            yield link

    @contextmanager
    def _using(self, link: BoardLink) -> Iterator[BoardLink]:
        if link.calls >= IN_FLIGHT_LIMIT:
            raise ResourceExhausted(f"board {link.board} has {link.calls} calls under way, the most it may")
        link.calls += 1
        self._made += 1
        try:
            yield link
        finally:
            link.calls -= 1
            if link in self._discarded and not link.calls:
                self._end(link)

    def _open(self, board: Board) -> BoardLink:
        number = number_of(board)
        address = self._address(board)
        link = self._links.get(number)
        if link is not None and link.address == address:
            self._links.move_to_end(number)
            return link
        self.drop(number)
        self._make_room()
        link = BoardLink(board=number, address=address, channel=self._channel(number, address))
        self._links[number] = link
        return link

    def _address(self, board: Board) -> ChannelAddress:
        number, status = number_of(board), status_of(board)
        if not status.address or not status.port:
            raise BoardAway(f"board {number} has not reported its agent's address yet")
        if status.plaintext:
            if not self._plain:
                raise PermissionDenied(
                    f"board {number} was registered without TLS; this server calls no board in plain text",
                    details={"cause": "plaintext"},
                )
            return ChannelAddress(host=status.address, port=status.port, plaintext=True, generation=0)
        serial = int(status.certificate_serial, 16) if status.certificate_serial else None
        revoked = self._revocations.find(serial=serial, principal=credentials.principal_of(number))
        if revoked is not None:
            raise PermissionDenied(
                f"board {number} is revoked: {revoked.reason}", details={"cause": "revoked"}
            )
        generation, _ = self._credentials()
        return ChannelAddress(host=status.address, port=status.port, plaintext=False, generation=generation)

    def _channel(self, board: int, address: ChannelAddress) -> grpc.aio.Channel:
        if address.plaintext:
            return grpc.aio.insecure_channel(address.target, options=_OPTIONS)
        _, own = self._credentials()
        named = ("grpc.ssl_target_name_override", credentials.host_of(board))
        return grpc.aio.secure_channel(address.target, own, options=(*_OPTIONS, named))

    def _make_room(self) -> None:
        if len(self._links) < self._limit:
            return
        idle = next((number for number, link in self._links.items() if not link.calls), None)
        if idle is None:
            raise Unavailable(
                f"{len(self._links)} connections to boards are open, the most at once",
                retry_after_seconds=1.0,
            )
        self.drop(idle)

    # Ends of channels. Closing one takes turns of the loop, which nobody who drops it waits for.

    def _discard(self, link: BoardLink) -> None:
        self._discarded.add(link)
        if not link.calls:
            self._end(link)

    def _end(self, link: BoardLink) -> None:
        self._discarded.discard(link)
        task = asyncio.get_running_loop().create_task(link.channel.close(), name=f"boards/close/{link.board}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Who we are.

    def _credentials(self) -> tuple[int, grpc.ChannelCredentials]:
        now = self._clock.monotonic()
        if self._identity is None or now >= self._identity[1]:
            certificate, key = credentials.issue_to_self(
                self._authority, self._own_name, days=CERTIFICATE_DAYS
            )
            self._generation += 1
            made = grpc.ssl_channel_credentials(self._authority.trust_pem, key, certificate)
            self._identity = (self._generation, now + CERTIFICATE_DAYS * 86_400 * 2 / 3, made)
        return self._identity[0], self._identity[2]

    def _forget_identity(self) -> None:
        self._identity = None


def asked_by(principal: Principal) -> CallOrigin:
    """With the widest of the roles that a board tells apart; another server may only look."""
    role = next((role for role in (ADMIN, OPERATOR) if role in principal.roles), VIEWER)
    return CallOrigin(actor=principal.name, role=role)
