"""By which checksum an agent says what it serves."""

from __future__ import annotations

import hashlib
import json

from google.protobuf.json_format import MessageToDict

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


def checksum(update: pb.ConfigUpdate) -> str:
    """SHA-256 of the content as JSON: the contract's field names, keys sorted, no blanks, UTF-8.

    Not of protobuf bytes, which differ between languages for the same content; and without the
    id and version, since the same content under another number is the same configuration.
    """
    content = MessageToDict(update, preserving_proto_field_name=True)
    content.pop("config_id", None)
    content.pop("version", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
