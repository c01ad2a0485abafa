"""Values in answers whose content is not ours: documents that somebody else wrote."""

from __future__ import annotations

from typing import Annotated

import msgspec

_OBJECT = {"type": "object", "additionalProperties": {}}

JsonObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_OBJECT)]
"""A JSON object of any content."""
JsonObjectOrNull = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"anyOf": [_OBJECT, {"type": "null"}]})
]
Number = int | float
"""A number that is written without a fraction where it is whole."""
NULL = msgspec.Raw(b"null")


def foreign(content: bytes) -> msgspec.Raw:
    """A JSON document that is kept as bytes, written the way all answers are."""
    return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(content)))
