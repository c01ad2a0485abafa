"""Encoding of commands and their output between the wire, the ledger and REST. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fleetplane.domains.boards.wire.boards import moment_ns
from fleetplane.domains.boards.wire.message_json import filled
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.commands import CommandState
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS

TIMEOUT_SECONDS: Final = 30.0
TIMEOUT_LIMIT_SECONDS: Final = 300.0
COMMAND_LIMIT: Final = 4096
ARGUMENTS_LIMIT: Final = 256
ARGUMENT_LIMIT: Final = 4096
ENVIRONMENT_LIMIT: Final = 64
STDIN_LIMIT_BYTES: Final = 64 * 1024
OUTPUT_BYTES: Final = 256 * 1024
OUTPUT_LIMIT_BYTES: Final = 1024 * 1024
KEPT_BYTES: Final = 7 * 1024
"""Of each stream, with the outcome: both fit into what a ledger keeps, with room for the rest."""
GAP: Final = b"\n[...]\n"


class BoardProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run: a program and its arguments, without a shell."""

    command: str
    args: tuple[str, ...] = ()
    timeout_seconds: float = TIMEOUT_SECONDS
    working_dir: str = ""
    environment: Mapping[str, str] = {}
    stdin: bytes = b""
    max_output_bytes: int = 0
    """Of each stream; 0 for what the board usually sends."""
    profile: str = ""

    def checked(self) -> BoardProgram:
        """The order, or the error that names its field."""
        _check("command", self.command, COMMAND_LIMIT, required=True)
        _check("working_dir", self.working_dir, COMMAND_LIMIT)
        _check("profile", self.profile, 64)
        if len(self.args) > ARGUMENTS_LIMIT:
            raise InvalidArgument(f"more than {ARGUMENTS_LIMIT} arguments", field="args")
        for argument in self.args:
            _check("args", argument, ARGUMENT_LIMIT)
        if len(self.environment) > ENVIRONMENT_LIMIT:
            raise InvalidArgument(f"more than {ENVIRONMENT_LIMIT} variables", field="environment")
        for name, value in self.environment.items():
            _check("environment", name, 256, required=True)
            _check("environment", value, ARGUMENT_LIMIT)
        if len(self.stdin) > STDIN_LIMIT_BYTES:
            raise InvalidArgument(f"stdin has at most {STDIN_LIMIT_BYTES} bytes", field="stdin")
        if not 0 < self.timeout_seconds <= TIMEOUT_LIMIT_SECONDS:
            raise InvalidArgument(
                f"timeout_seconds must be more than 0 and at most {TIMEOUT_LIMIT_SECONDS:g}",
                field="timeout_seconds",
            )
        if not 0 <= self.max_output_bytes <= OUTPUT_LIMIT_BYTES:
            raise InvalidArgument(
                f"max_output_bytes must be 0 to {OUTPUT_LIMIT_BYTES}", field="max_output_bytes"
            )
        return self

    def request(self, *, request_id: str) -> pb.CommandRequest:
        timeout_seconds = max(1, round(self.timeout_seconds))
        return filled(pb.CommandRequest, self, timeout_seconds=timeout_seconds, request_id=request_id)


class ProgramAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a board says of a program that it ran."""

    success: bool
    message: str = ""
    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    started_at_ns: int | None = None
    duration_seconds: float = 0.0
    timed_out: bool = False
    signal: int = 0
    reason: str = ""

    @property
    def state(self) -> CommandState:
        if self.timed_out:
            return CommandState.TIMED_OUT
        return CommandState.OK if self.success else CommandState.FAILED

    @property
    def size(self) -> int:
        return len(self.stdout) + len(self.stderr) + 512


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    order: BoardProgram
    role: str


_PAYLOADS: Final = msgspec.msgpack.Decoder(_Payload)
_ANSWERS: Final = msgspec.msgpack.Decoder(ProgramAnswer)


def encoded_order(order: BoardProgram, role: str) -> bytes:
    return msgspec.msgpack.encode(_Payload(order, role))


def decoded_order(payload: bytes) -> tuple[BoardProgram, str]:
    found = _PAYLOADS.decode(payload)
    return found.order, found.role


def answer_of(said: pb.CommandResponse) -> ProgramAnswer:
    message = said.message or ("" if said.success else f"exit code {said.exit_code}")
    return ProgramAnswer(
        success=said.success,
        message=message[:1024],
        exit_code=said.exit_code,
        stdout=said.stdout[:OUTPUT_LIMIT_BYTES],
        stderr=said.stderr[:OUTPUT_LIMIT_BYTES],
        stdout_truncated=said.stdout_truncated or len(said.stdout) > OUTPUT_LIMIT_BYTES,
        stderr_truncated=said.stderr_truncated or len(said.stderr) > OUTPUT_LIMIT_BYTES,
        started_at_ns=moment_ns(said.started_at),
        duration_seconds=said.duration.seconds + said.duration.nanos / NS,
        timed_out=said.timed_out,
        signal=said.signal,
        reason=said.reason[:64],
    )


def encoded_result(answer: ProgramAnswer) -> bytes:
    """What the ledger keeps: the beginning and the end of each stream."""
    stdout, cut_out = _shortened(answer.stdout)
    stderr, cut_err = _shortened(answer.stderr)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            answer,
            message="",  # kept beside it
            stdout=stdout,
            stderr=stderr,
            stdout_truncated=answer.stdout_truncated or cut_out,
            stderr_truncated=answer.stderr_truncated or cut_err,
        )
    )


def stored_answer(result: bytes) -> ProgramAnswer | None:
    """None if there is none: the command never ran, or nobody heard how."""
    try:
        return _ANSWERS.decode(result) if result else None
    except msgspec.MsgspecError:
        return None


def _shortened(output: bytes) -> tuple[bytes, bool]:
    if len(output) <= KEPT_BYTES:
        return output, False
    half = (KEPT_BYTES - len(GAP)) // 2
    return output[:half] + GAP + output[-half:], True


def _check(field: str, text: str, limit: int, *, required: bool = False) -> None:
    if required and not text.strip():
        raise InvalidArgument(f"{field} must not be empty", field=field)
    if len(text) > limit or "\0" in text:
        raise InvalidArgument(f"{field} has at most {limit} characters, and no NUL", field=field)
