"""What a command of the ledger carries to a daemon, and what is kept of its answer."""

from __future__ import annotations

import uuid

import msgspec

from fleetplane.kernel.commands import Command

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
