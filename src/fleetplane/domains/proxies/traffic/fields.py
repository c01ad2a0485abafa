"""The fields of a line of the access log, as a row of texts.

Lines of the access log, from agents to the database and back. Pure.

A line is a row of texts in the order of `FIELDS`, and lies so in the file: without names, which would be half
of it. Agents send batches by column where they can, which spares both sides a map for every line; from others
a row is read out of each line's map. What is in no field is not kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

COMBINED_LIMIT: Final = 16_384
"""Characters of a line in the combined format: the longest request that NGINX takes, and some."""
_SECONDS: Final = re.compile(r"\d{1,9}(?:\.\d{1,9})?")
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


_COMBINED: Final = re.compile(
    r'(?P<remote_addr>\S+) \S+ \S+ \[[^\]]*\] "(?P<method>[A-Z]+) (?P<uri>\S+)(?: (?P<protocol>[^" ]+))?"'
    r' (?P<status>\d{3}) (?P<body_bytes_sent>\d+|-)(?: "(?P<referer>[^"]*)" "(?P<user_agent>[^"]*)")?'
)
_VARIABLES: Final = {
    "request_method": "method",
    "request_uri": "uri",
    "path": "uri",
    "server_protocol": "protocol",
    "http_host": "host",
    "client_ip": "remote_addr",
    "http_user_agent": "user_agent",
    "http_referer": "referer",
}
"""Names that NGINX and other agents have for our fields."""
_OF_REQUESTS: Final = ("method", "request_method", "uri", "request_uri")


def plain_fields(message: str, fields: Mapping[str, str]) -> Mapping[str, str] | None:
    """The fields of a request as an agent of another make writes it; None for a line that is none.

    That is the combined format of NGINX in the message, or fields by the names of NGINX's variables.
    """
    if "status" in fields and not fields.keys().isdisjoint(_OF_REQUESTS):
        said = dict(fields)
        for theirs, ours in _VARIABLES.items():
            if theirs in said:
                said.setdefault(ours, said[theirs])
        if "response_time_ms" not in said and (seconds := _SECONDS.fullmatch(said.get("request_time", ""))):
            said["response_time_ms"] = f"{float(seconds[0]) * 1000:g}"
        return said
    found = _COMBINED.match(message) if len(message) <= COMBINED_LIMIT else None
    if found is None:
        return None
    return {**{name: text or "" for name, text in found.groupdict().items()}, **fields}


# Back.
