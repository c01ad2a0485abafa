"""Tool calls on their way to daemons, and what daemons say to them.

Writes commands for the streams that the channel's courier puts them on, within what a daemon can have at
once, and takes them back. Output and results of a command are entered in the ledger, with the end of the
output. Who may call what, and which daemons are meant, is decided before; what a daemon makes of a call
is its own decision.

A result that is larger than the limit is read from its beginning: daemons in the field repeat all of a
command's output in it. The outcome and the envelope stand before the output; what stands after it, such
as why something failed, is lost. The output itself was streamed before, and its end is kept from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import structlog
from google.protobuf.message import DecodeError

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.nodes.registry import found_node
from fleetplane.domains.edge.streams.call_encoding import (
    ANSWER_GRACE_SECONDS,
    CHANNEL,
    TAIL_BYTES,
    ToolCall,
    ToolOutcome,
    decode_call,
    encode_outcome,
    ledger_id,
    public_id,
)
from fleetplane.domains.edge.streams.live import DaemonPresences, LiveDaemon, ToolFlight
from fleetplane.domains.edge.streams.sealing import StreamSealer, decoded_args
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.messages import CommandProgress, OutputChannel, ResultOutcome, ToolResult
from fleetplane.fleet.streams.courier import StreamCourier
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, CommandLimits, Commands, CommandState
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

CUT = "result_cut"
_VARINT, _LEN = 0, 2
_EVENT_RESULT, _ENVELOPE, _COMMAND_ID, _RESULT = 3, 1, 2, 3
_ARMS = {1: ResultOutcome.OK, 2: ResultOutcome.ERROR, 3: ResultOutcome.TIMED_OUT, 4: ResultOutcome.CANCELLED}
"""The documented dialect's, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    event: tolerant_pb2.CommandResult
    """Envelope and command, without a result."""
    said: ToolResult
    dialect: PayloadDialect


@dataclass(frozen=True, slots=True)
class _WireField:
    number: int
    kind: int
    value: int
    """Of a number; else where the content begins."""
    end: int
    """Where the content ends, which may be beyond what is there."""


def read(head: bytes, size: int) -> CutResult | None:
    """What the beginning of an event says; None if it is not a result, or breaks off before it says how."""
    outer = next(_fields(head, 0, size), None)
    if outer is None or (outer.number, outer.kind) != (_EVENT_RESULT, _LEN):
        return None
    event = tolerant_pb2.CommandResult()
    for found in _fields(head, outer.value, outer.end):
        content = head[found.value : found.end]
        whole = found.end <= len(head)
        try:
            match found.number:
                case 1 if whole:
                    event.envelope.ParseFromString(content)
                case 2 if whole:
                    event.command_id = content.decode()
                case 3 if event.command_id and event.HasField("envelope"):
                    said, dialect = _outcome(head, found, size)
                    return CutResult(event=event, said=said, dialect=dialect)
                case _:
                    return None
        except (DecodeError, UnicodeDecodeError):
            return None
    return None


def _outcome(head: bytes, result: _WireField, size: int) -> tuple[ToolResult, PayloadDialect]:
    mark = f"the result had {size} bytes and was cut"
    ok, exit_code = False, 0
    for found in _fields(head, result.value, result.end):
        if found.kind == _LEN and found.number in _ARMS and not (ok or exit_code):
            # Output before any number: of the documented dialect, or of one in the field that failed.
            code = next((one.value for one in _fields(head, found.value, found.end) if _is_code(one)), None)
            outcome = _ARMS[found.number] if found.number in (1, 2) else ResultOutcome.ERROR
            if found.number in (1, 2):
                said = ToolResult(
                    outcome=outcome,
                    exit_code=code or 0,
                    message=mark,
                    code="" if outcome is ResultOutcome.OK else CUT,
                )
                return said, PayloadDialect.DOCUMENTED
            break
        if found.kind != _VARINT:
            break
        if found.number == 1:
            ok = bool(found.value)
        elif found.number == 2:
            exit_code = found.value - (1 << 64) if found.value >= 1 << 63 else found.value
    if ok:
        return ToolResult(outcome=ResultOutcome.OK, exit_code=exit_code, message=mark), PayloadDialect.LEGACY
    why = "nonzero_exit" if exit_code else CUT
    said = ToolResult(outcome=ResultOutcome.ERROR, exit_code=exit_code or None, code=why, message=mark)
    return said, PayloadDialect.LEGACY


def _is_code(field: _WireField) -> bool:
    return (field.number, field.kind) == (1, _VARINT)


def _fields(data: bytes, at: int, end: int) -> Iterator[_WireField]:
    """The fields of a message that may break off; ends where nothing more can be read."""
    end = min(end, 1 << 62)
    while at < min(end, len(data)):
        tag, at = _varint(data, at)
        if tag is None:
            return
        number, kind = tag >> 3, tag & 7
        value, after = _varint(data, at) if kind in (_VARINT, _LEN) else (None, at)
        if value is None:
            return
        if kind == _VARINT:
            yield _WireField(number, kind, value, after)
            at = after
        else:
            yield _WireField(number, kind, after, after + value)
            at = after + value


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return None, at


log = structlog.get_logger(__name__)

CALLS_LIMIT = 128
CALLS_LIMIT_BYTES = 32 * 1024 * 1024
"""Commands kept ready to be sent: a call to thousands of daemons is made and signed once."""
STRUCTURED_LIMIT_BYTES = 4096
"""Of a structured answer that is kept with the outcome; with both tails it stays below 16 KiB."""
DEADLINE_LIMIT_SECONDS = 23 * 3600.0
"""Of a call; with its grace it stays below what the ledger waits for."""
PROTOCOL_ERROR = "protocol_error"
DISCONNECTED = "edge_disconnected"

Onlooker = Callable[[str, str, CommandProgress], None]
"""Called with the node's id, the command's id in the ledger, and the output."""

_STATES = {
    ResultOutcome.OK: CommandState.OK,
    ResultOutcome.ERROR: CommandState.FAILED,
    ResultOutcome.TIMED_OUT: CommandState.TIMED_OUT,
    ResultOutcome.CANCELLED: CommandState.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPolicy:
    in_flight: int = 16
    """Commands that a daemon has at once."""
    legacy_in_flight: int = 1
    """Daemons in the field work on one at a time, and do not read while they do."""
    grace_seconds: float = ANSWER_GRACE_SECONDS
    live_bytes: int = 8 * 1024 * 1024
    """Of one command's output, passed on while it runs; beyond that only its end is kept."""

    def room(self, dialect: PayloadDialect) -> int:
        return self.legacy_in_flight if dialect is PayloadDialect.LEGACY else self.in_flight

    def run_for_seconds(self, deadline_seconds: float) -> float:
        """How long the ledger should wait for a daemon's word."""
        return deadline_seconds + self.grace_seconds


class Dispatcher:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        presences: DaemonPresences,
        sealer: StreamSealer,
        policy: DispatchPolicy,
        limits: CommandLimits | None = None,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._presences = presences
        self._sealer = sealer
        self.policy = policy
        self._calls: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        """By command: serialized, and its deadline in seconds."""
        self._calls_bytes = 0
        self._onlookers: list[Onlooker] = []
        self.courier: StreamCourier[bytes, LiveDaemon, ToolFlight] = StreamCourier(
            presences, self, clock, channel=CHANNEL
        )
        self.ledger = Commands(
            store,
            clock,
            channel=CHANNEL,
            courier=self.courier,
            limits=limits,
            stops=self.stops,
            whereabouts=whereabouts,
        )
        self.ignored = 0
        """Messages about commands that the daemon does not have any more."""

    def __repr__(self) -> str:
        return f"<Dispatcher {self.ledger!r} ignored={self.ignored}>"

    def watch(self, onlooker: Onlooker) -> Callable[[], None]:
        """Have all output told while it comes; returns how to stop that.

        Called in the event loop for every chunk: it must not block, nor raise.
        """
        self._onlookers.append(onlooker)
        return lambda: self._onlookers.remove(onlooker)

    @staticmethod
    def check(call: ToolCall) -> None:
        """Refuse a call that could not be sent, before it is written down."""
        for name in ("tool", "security_context", "tenant"):
            if not getattr(call, name):
                raise InvalidArgument(f"a call needs a {name}", field=name)
        if not 0 < call.deadline_seconds <= DEADLINE_LIMIT_SECONDS:
            raise InvalidArgument(
                f"a call has between 0 and {DEADLINE_LIMIT_SECONDS:g} seconds", field="deadline_seconds"
            )
        decoded_args(call.args_json)

    # For the ledger and its courier.

    def stops(self, target: str) -> bool:
        """Whether a daemon can stop a running command; the first generation reads the request too late."""
        return self._dialect(target) is not PayloadDialect.LEGACY

    def _dialect(self, node_id: str) -> PayloadDialect | None:
        """By its stream, if that is here, else by what is written down of the last one."""
        here = self._presences.dialect(node_id)
        if here is not None or not self._store.shared:
            return here
        node = found_node(self._store, node_id)
        return node.status.dialect if node is not None and node.status is not None else None

    def takes_work(self, live: LiveDaemon) -> bool:
        return live.takes_work

    def room(self, live: LiveDaemon) -> int:
        return self.policy.room(live.dialect)

    def encode(self, live: LiveDaemon, command: Command) -> tuple[bytes, ToolFlight]:
        serialized, deadline_seconds = self._call(command)
        now_ns = self._clock.now_ns()
        over_ns = now_ns + round(self.policy.run_for_seconds(deadline_seconds) * NS)
        return self._presences.sealed(live, serialized), ToolFlight(sent_at_ns=now_ns, over_at_ns=over_ns)

    def encode_recall(self, live: LiveDaemon, command: str, reason: str) -> bytes:
        cancel = wire.cancel(public_id(command), reason)
        return self._presences.sealed(live, cancel.SerializeToString())

    def _call(self, command: Command) -> tuple[bytes, float]:
        found = self._calls.get(command.name)
        if found is None:
            call = decode_call(command.spec.payload)
            found = (self._sealer.tool_call(command.name, call), call.deadline_seconds)
            self._calls[command.name] = found
            self._calls_bytes += len(found[0])
            while len(self._calls) > CALLS_LIMIT or self._calls_bytes > CALLS_LIMIT_BYTES:
                _, (oldest, _) = self._calls.popitem(last=False)
                self._calls_bytes -= len(oldest)
        return found

    # Streams that open and end.

    async def settle(self, node_id: str, dialect: PayloadDialect) -> None:
        """Before a stream is open: what an earlier one, or an earlier server, had sent is not on this one.

        It waits to be sent again to those who would recognise it. What cannot be repeated, and was sent by a
        server that died with its stream, is lost by now: nobody else would say so.
        """
        if dialect is PayloadDialect.LEGACY or self.ledger.shared:
            await self.lost(node_id, dialect)
        await self.ledger.renewed(node_id)

    async def arrived(self, live: LiveDaemon) -> None:
        """Send what waits."""
        await self.ledger.room(live.node_id)

    async def lost(self, node_id: str, dialect: PayloadDialect, *, session: int | None = None) -> None:
        """Daemons in the field would do twice what they are sent twice, so they are not."""
        recognises = dialect is not PayloadDialect.LEGACY
        await self.ledger.lost(node_id, session=session, detail=DISCONNECTED, recognises=recognises)

    async def ended_elsewhere(self, node_id: str, session: int) -> None:
        """The server that had this session of a daemon is gone."""
        await self.lost(node_id, self._dialect(node_id) or PayloadDialect.DOCUMENTED, session=session)

    # What daemons say.

    async def result(
        self, live: LiveDaemon, event: tolerant_pb2.CommandResult, *, cut: CutResult | None = None
    ) -> PayloadDialect | None:
        """Take a result; which dialect it was in, if that could be told. `cut`: all that is there of it."""
        command = ledger_id(event.command_id)
        if command is None:
            self.ignored += 1
            return None
        dialect: PayloadDialect | None = None
        try:
            said, dialect = (cut.said, cut.dialect) if cut is not None else wire.decode_result(event.result)
        except InvalidArgument as error:
            said = ToolResult(outcome=ResultOutcome.ERROR, code=PROTOCOL_ERROR, message=error.message)
        flight = self.courier.landed(live, command)
        self.ignored += flight is None
        outcome = encode_outcome(kept(said, flight, now_ns=self._clock.now_ns()))
        node_id = live.node_id
        await self.ledger.ended(node_id, command, _STATES[said.outcome], detail=said.message, result=outcome)
        if flight is not None:
            await self.ledger.room(node_id)
        return dialect

    def progress(self, live: LiveDaemon, command_id: str, said: CommandProgress) -> None:
        command: str | None = command_id.replace("-", "")
        if command not in live.flights:  # not as we write it
            command = ledger_id(command_id)
        flight = live.flights.get(command) if command is not None else None
        if command is None or flight is None:
            self.ignored += 1
            return
        if said.stream is OutputChannel.STDOUT:
            flight.stdout.add(said.data)
        elif said.stream is OutputChannel.STDERR:
            flight.stderr.add(said.data)
        flight.live_bytes += len(said.data)
        if flight.live_bytes <= self.policy.live_bytes:
            for onlooker in tuple(self._onlookers):
                onlooker(live.node_id, command, said)


def kept(said: ToolResult, flight: ToolFlight | None, *, now_ns: int) -> ToolOutcome:
    """What is stored of a result: the end of its output, from the result or from what came before it."""
    seconds = said.duration_seconds
    if seconds is None and flight is not None:
        seconds = (now_ns - flight.sent_at_ns) / NS
    structured = b"" if said.structured is None else msgspec.json.encode(said.structured)
    return ToolOutcome(
        code=said.code,
        exit_code=said.exit_code,
        duration_seconds=seconds,
        stdout_tail=said.stdout[-TAIL_BYTES:] or (bytes(flight.stdout) if flight else b""),
        stderr_tail=said.stderr[-TAIL_BYTES:] or (bytes(flight.stderr) if flight else b""),
        structured_json=structured if len(structured) <= STRUCTURED_LIMIT_BYTES else b"",
    )
