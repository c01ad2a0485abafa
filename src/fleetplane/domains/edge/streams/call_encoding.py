"""What a command carries to a daemon, what is kept of its answer, and how outcomes are counted.

Tools and reasons are words of operators and daemons, so `Tallies` counts only a bounded number of them by
name: the first tools that come, and the reasons that the protocol knows. The rest is counted together.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict

import msgspec

from fleetplane.fleet.runs.records import TargetOutcome, outcome_of
from fleetplane.kernel.commands import Command, CommandTarget

CHANNEL = "edge"
SECURITY_CONTEXT = "zaru-free"
"""In which tools run, unless their caller names another."""
TAIL_BYTES = 4096
"""Kept of each output stream with the outcome: its end, which is where errors are."""
ANSWER_GRACE_SECONDS = 5.0
"""A daemon reports a time-out a little after the time has passed."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a command."""

    tool: str
    args_json: bytes
    """A JSON object."""
    security_context: str
    tenant: str
    actor: str
    deadline_seconds: float


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept with a target's outcome."""

    code: str = ""
    """The error code of the protocol; empty for success."""
    exit_code: int | None = None
    duration_seconds: float | None = None
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    structured_json: bytes = b""
    """What the tool answered as a document, if that is small."""


def encode_call(call: ToolCall) -> bytes:
    return msgspec.msgpack.encode(call)


def decode_call(payload: bytes) -> ToolCall:
    return msgspec.msgpack.decode(payload, type=ToolCall)


def encode_outcome(outcome: ToolOutcome) -> bytes:
    return msgspec.msgpack.encode(outcome)


def decode_outcome(result: bytes) -> ToolOutcome:
    """The outcome of a target, also of one that never answered."""
    return msgspec.msgpack.decode(result, type=ToolOutcome) if result else ToolOutcome()


def public_id(command: Command | str) -> str:
    """A command's id as it stands on the wire and in REST: the same bits, written as a UUID."""
    return str(uuid.UUID(hex=command if isinstance(command, str) else command.name))


def ledger_id(public: str) -> str | None:
    """The other way round; None for what is no such id."""
    try:
        return uuid.UUID(public).hex
    except ValueError:
        return None


TOOLS_LIMIT = 32
OTHER = "other"
REASONS = frozenset(
    {
        "envelope_invalid",
        "security_context_not_found",
        "policy_violation",
        "tool_not_locally_supported",
        "tool_not_found",
        "invalid_arguments",
        "internal",
        "nonzero_exit",
        "draining",
        "busy",
        "interrupted",
        "timeout",
        "cancelled",
        "protocol_error",
        "result_cut",
        "edge_disconnected",
    }
)


class Tallies:
    def __init__(self) -> None:
        self.commands: Counter[tuple[str, str, str]] = Counter()
        """By tool, outcome and reason."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Durations of commands by tool, as reported by daemons."""
        self.skipped: Counter[str] = Counter()
        """Daemons that were meant and left out, by reason."""
        self._tools: set[str] = set()

    def __repr__(self) -> str:
        return f"<Tallies {self.commands.total()} commands>"

    def ended(self, tool: str, target: CommandTarget, kept: ToolOutcome) -> None:
        """One target of a run has its outcome."""
        name, outcome = self._tool(tool), outcome_of(target)
        detail = target.status.detail if target.status is not None else ""
        self.commands[name, outcome, reason_of(outcome, kept.code or detail)] += 1
        if kept.duration_seconds:
            self.seconds[name] += kept.duration_seconds

    def _tool(self, tool: str) -> str:
        if tool not in self._tools and len(self._tools) < TOOLS_LIMIT:
            self._tools.add(tool)
        return tool if tool in self._tools else OTHER


def reason_of(outcome: TargetOutcome, code: str) -> str:
    """Why, in a word that the protocol knows; empty where nothing failed. Pure."""
    if outcome is TargetOutcome.OK:
        return ""
    return code if code in REASONS else OTHER
