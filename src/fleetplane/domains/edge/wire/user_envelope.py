"""What the server signs of a tool call on behalf of a user: the inner seal of a command. Pure.

The bytes are compact JSON with its keys in order. They are made from the message itself, so that
whoever verifies needs nothing but what arrived; its numbers are doubles by then on both sides.
Shared by the server and the node side.
"""

from __future__ import annotations

import json

from google.protobuf import json_format

from fleetplane.domains.edge.wire.protobuf_types import mapping_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument


def canonical(call: pb.InvokeTool) -> bytes:
    """The bytes that `call.seal_envelope.signature` is over."""
    seal = call.seal_envelope
    try:
        document = {
            "args": mapping_of(call.args),
            "command_id": call.command_id,
            "security_context_name": seal.security_context_name,
            "tenant_id": seal.tenant_id,
            "tool_name": call.tool_name,
            "user_security_token": seal.user_security_token,
        }
        text = json.dumps(
            document, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (json_format.Error, ValueError) as error:
        raise InvalidArgument(f"the call cannot be signed: {error}", field="args") from error
