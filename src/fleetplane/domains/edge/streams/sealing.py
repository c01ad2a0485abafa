"""Commands as daemons accept them: what the server signs, and how that is put around a command.

A tool call carries an inner envelope that proves for whom it is made: a user's token, and the
server's signature over the call. Any command carries an outer one besides, which ties its bytes to
one stream and one moment.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, Protocol

from google.protobuf.struct_pb2 import Struct

from fleetplane.domains.edge.streams.call_encoding import ToolCall, public_id
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire import envelope as userseal
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.documents import check_document

COMMAND_LIMIT_BYTES = 3 * 1024 * 1024
"""Of one command: daemons read messages of up to 4 MiB."""
TOKEN_MARGIN_SECONDS = 60.0
"""How much longer than its command a user's token lives, for clocks that differ."""
MS = 1_000_000


class SealingKey(Protocol):
    """The key by which daemons know this server."""

    def sign(self, payload: bytes) -> bytes: ...


class UserTokens(Protocol):
    def issue_user(
        self, *, subject: str, tenant: str, context: str, command_id: str, life_seconds: float
    ) -> str:
        """A token of three segments that names who wants a command done."""


class StreamSealer:
    def __init__(self, key: SealingKey, users: UserTokens, clock: Clock) -> None:
        self._key = key
        self._users = users
        self._clock = clock

    def seal(self, command: bytes, node_id: str, stream_id: str) -> bytes:
        """A serialized command with the outer envelope; daemons in the field pass over it."""
        payload = envelope.command_payload(self._clock.now_ns() // MS, node_id, stream_id, command)
        proof = pb.SealNodeEnvelope(signature=self._key.sign(payload), payload=payload)
        # The fields of a message may follow each other in any order: appending is adding one.
        return command + pb.EdgeCommand(envelope=proof).SerializeToString()

    def tool_call(self, command: str, call: ToolCall) -> bytes:
        """A whole command of the ledger, serialized: the same for every daemon that gets it."""
        args = decoded_args(call.args_json)
        sealed = Struct()
        sealed.update({"tool_name": call.tool, "args": args})
        seal = pb.SealEnvelope(
            user_security_token=self._user_token(command, call),
            tenant_id=call.tenant,
            security_context_name=call.security_context,
            payload=sealed,
        )
        made = wire.invoke_tool(
            public_id(command),
            tool=call.tool,
            args=args,
            security_context=call.security_context,
            seal=seal,
            deadline_seconds=call.deadline_seconds,
        )
        made.invoke_tool.seal_envelope.signature = self._key.sign(userseal.canonical(made.invoke_tool))
        whole = made.SerializeToString()
        if len(whole) > COMMAND_LIMIT_BYTES:
            raise InvalidArgument(
                f"the command takes {len(whole)} bytes, more than {COMMAND_LIMIT_BYTES}", field="args"
            )
        return whole

    def _user_token(self, command: str, call: ToolCall) -> str:
        """For this command alone, in the name of whom the server itself has authenticated.

        A token that a caller brings along is never vouched for: the server did not verify it.
        """
        return self._users.issue_user(
            subject=call.actor,
            tenant=call.tenant,
            context=call.security_context,
            command_id=public_id(command),
            life_seconds=call.deadline_seconds + TOKEN_MARGIN_SECONDS,
        )


def decoded_args(args_json: bytes) -> dict[str, Any]:
    try:
        args = json.loads(args_json or b"{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the arguments are not JSON: {error}", field="args") from error
    if not isinstance(args, dict):
        raise InvalidArgument("the arguments must be a JSON object", field="args")
    check_document(args, field="args", within=1)  # of the sealed payload
    return args


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
