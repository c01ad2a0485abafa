"""What a command of the ledger carries to a daemon, and what is kept of its answer."""

from __future__ import annotations

import uuid

import msgspec

from fleetplane.kernel.commands import Command

CHANNEL = "edge"
TAIL_BYTES = 4096
"""Kept of each output stream with the outcome: its end, which is where errors are."""
ANSWER_GRACE_SECONDS = 5.0
"""A daemon's own word that the time is over comes a little after the time is over."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a command."""

    tool: str
    args_json: bytes
    """A JSON object."""
    security_context: str
    tenant: str
    actor: str
    deadline_seconds: float
    user_security_token: str = ""
    """The caller's own, for daemons that want to see one; made by the server when empty."""


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept with a target's outcome."""

    code: str = ""
    """Why it failed, in one word of the protocol; empty if it did not."""
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
    """Of a target that never answered, too."""
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
