"""Lines of the access log by column: the same lines as one by one, or a refusal that names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.proxies.proxy_agents import reporting_agent

from fleetplane.domains.proxies.agent.log_shipping import AccessLogLine, access_batch, error_entries
from fleetplane.domains.proxies.traffic.fields import FIELDS, PLACE
from fleetplane.domains.proxies.traffic.lines import BATCH_LIMIT, access_entry, lines_of
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.telemetry import FoundLine
from fleetplane.kernel.telemetry.engine import marks
from fleetplane.node.logs.tail import TailedLine as Tailed

NOW = 1_800_000_000 * 10**9
REQUESTS = [
    AccessLogLine(
        time="1799999999.123",
        remote_addr="192.0.2.1",
        method="GET",
        uri=f'/ü"{number}',
        host="a.test",
        status="200",
        request_time="0.0125",
        upstream_response_time="0.5, 0.25",
        virtual_host_id="h1",
        location="/",
    )
    for number in range(3)
]
IDS = ["one", "two", "three"]
SEQS = ["7", "80", "900"]


def test_lines_by_column_are_the_lines_that_come_one_by_one() -> None:
    agent = reporting_agent("org/o/ws/w", "a1")
    by_line, by_column = (
        lines_of(agent, access_batch(REQUESTS, IDS, SEQS, columns=columns), NOW) for columns in (False, True)
    )
    assert by_column == by_line
    assert [line.detail[PLACE["uri"]] for line in by_line] == [one.uri for one in REQUESTS]
    assert [line.detail[PLACE["upstream_response_time_ms"]] for line in by_line] == ["250"] * 3
    assert by_line[0].at_ns == 1_799_999_999_123_000_000
    shown = [
        access_entry(FoundLine(source=line.source, at_ns=line.at_ns, body=line.body)) for line in by_line
    ]
    assert [(one.id, one.uri, one.response_time_ms) for one in shown] == [
        (identity, one.uri, 12.5) for identity, one in zip(IDS, REQUESTS, strict=True)
    ]


def test_lines_of_one_moment_stay_in_the_order_of_their_log() -> None:
    agent = reporting_agent("org/o/ws/w", "a1")
    places = [f"epoch:{generation}:{offset}" for generation in (1, 2) for offset in range(0, 4000, 40)]
    told = [Tailed(place=place, text=b"2026/11/15 22:53:04 [emerg] 12#12: no") for place in places]
    errors = lines_of(agent, pb.LogBatch(entries=error_entries(told, "a1")), NOW)
    without = [pb.LogEntry(timestamp=7, level="error", message="x") for _ in range(50)]
    foreign = lines_of(agent, pb.LogBatch(entries=without), NOW)
    for lines in (errors, foreign):
        assert len({line.at_ns for line in lines}) == 1
        found = list(marks("a1", lines))
        assert found == sorted(set(found))
        assert 0 < found[0] < found[-1] < 1 << 63
    assert list(marks("a1", errors[3:5])) == list(marks("a1", errors))[3:5], "the same when it comes again"
    for columns in (False, True):
        batch = access_batch(REQUESTS, IDS, SEQS, columns=columns)
        assert [line.sequence for line in lines_of(agent, batch, NOW)] == [7, 80, 900]


def test_lines_that_were_kept_with_names_can_still_be_read() -> None:
    body = msgspec.json.encode({"id": "old", "message": "GET /x HTTP/1.1", "fields": {"uri": "/x"}})
    shown = access_entry(FoundLine(source="a1", at_ns=NOW, body=body))
    assert (shown.id, shown.uri, shown.status) == ("old", "/x", 0)
    short = msgspec.json.encode(("row", ["192.0.2.1", "GET"]))
    assert access_entry(FoundLine(source="a1", at_ns=NOW, body=short)).method == "GET"


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff",
        pytest.param(b"\x84\xa4time\x90\xa2id\x90\xa6fields\x80\xa1x" + b"\x91" * 100_000, id="deep"),
        {"time": [1], "id": ["a"]},
        {"time": [1, 2], "id": ["a"], "fields": {}},
        {"time": [1], "id": ["a"], "fields": {"status": []}},
        {"time": [1], "id": ["a"], "fields": {"status": [200]}},
        {"time": ["x"], "id": ["a"], "fields": {}},
        {"time": [1] * (BATCH_LIMIT + 1), "id": ["a"] * (BATCH_LIMIT + 1), "fields": {}},
    ],
)
def test_columns_that_make_no_sense_are_refused_by_name(said: Any) -> None:
    packed = said if isinstance(said, bytes) else msgspec.msgpack.encode(said)
    with pytest.raises(InvalidArgument) as refused:
        lines_of(reporting_agent("org/o/ws/w", "a1"), pb.LogBatch(columns=packed), NOW)
    assert refused.value.field == "logs.columns"


def test_fields_that_nobody_knows_are_left_out_and_lines_without_an_id_get_one() -> None:
    said = {"time": [1, 1], "id": ["", ""], "fields": {"cookie": ["x", "y"], "method": ["GET", "GET"]}}
    batch = pb.LogBatch(columns=msgspec.msgpack.encode(said))
    first, second = lines_of(reporting_agent("org/o/ws/w", "a1"), batch, NOW)
    assert b"x" not in first.body.partition(b"GET")[2]
    assert len(first.detail) == len(FIELDS)
    assert first.identity != second.identity
    again = lines_of(reporting_agent("org/o/ws/w", "a1"), batch, NOW)
    assert [one.identity for one in again] == [first.identity, second.identity]


COMBINED = '192.0.2.7 - ann [18/Nov/2026:20:00:00 +0000] "GET /a?b HTTP/1.1" 404 153 "-" "curl/8.5"'


@pytest.mark.parametrize(
    ("level", "message", "fields"),
    [
        ("access", COMBINED, {}),
        ("info", COMBINED, {"host": "a.test"}),
        (
            "info",
            "",
            {
                "remote_addr": "192.0.2.7",
                "request_method": "GET",
                "request_uri": "/a?b",
                "status": "404",
                "body_bytes_sent": "153",
                "request_time": "0.25",
            },
        ),
    ],
)
def test_a_plain_entry_of_a_request_is_a_request(level: str, message: str, fields: dict[str, str]) -> None:
    agent = reporting_agent("org/o/ws/w", "a1")
    entry = pb.LogEntry(timestamp=1_799_999_999_123, level=level, message=message, fields=fields)
    (line,) = lines_of(agent, pb.LogBatch(entries=[entry]), NOW)
    assert line.stream == "access"
    shown = access_entry(FoundLine(source=line.source, at_ns=line.at_ns, body=line.body))
    assert (shown.remote_addr, shown.method, shown.uri, shown.status) == ("192.0.2.7", "GET", "/a?b", 404)
    assert (shown.body_bytes_sent, shown.host) == (153, fields.get("host", ""))
    assert shown.response_time_ms == (250 if "request_time" in fields else 0)


def test_a_line_of_the_error_log_is_no_request() -> None:
    entry = pb.LogEntry(level="error", message=f"2026/11/15 22:53:04 [error] 12#12: {COMBINED}")
    (line,) = lines_of(reporting_agent("org/o/ws/w", "a1"), pb.LogBatch(entries=[entry]), NOW)
    assert line.stream == "error"
