"""The fields of a line of the access log, as a row of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ACCESS: Final = "access"
"""The stream of these lines."""
FIELDS: Final = (
    "remote_addr",
    "method",
    "uri",
    "protocol",
    "host",
    "status",
    "body_bytes_sent",
    "bytes_sent",
    "request_length",
    "response_time_ms",
    "upstream_response_time_ms",
    "user_agent",
    "referer",
    "request_id",
    "virtual_host_id",
    "stream_id",
    "cache_status",
    "upstream_statuses",
    "location",
    "upstream_id",
)
"""Of a row, in this order for ever: new ones go to the end."""
PLACE: Final = {name: number for number, name in enumerate(FIELDS)}

Row = tuple[str, ...]
"""A request's fields, in the order of `FIELDS`."""


def row_of(fields: Mapping[str, str]) -> Row:
    said = fields.get
    return tuple([said(name, "") for name in FIELDS])
