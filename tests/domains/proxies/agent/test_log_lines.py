"""Lines of NGINX's logs as entries, and what they add up to."""

from __future__ import annotations

import json

import msgspec

from fleetplane.domains.proxies.agent.log_shipping import (
    LoggedTraffic,
    access_entry,
    entry_id,
    error_entry,
    parse_request,
    read_traffic,
)

LINE = {
    "time": "1794783182.314",
    "remote_addr": "127.0.0.1",
    "method": "GET",
    "uri": "/a?b=%22",
    "protocol": "HTTP/1.1",
    "host": "a.test",
    "status": "502",
    "body_bytes_sent": "1",
    "bytes_sent": "155",
    "request_length": "134",
    "request_time": "0.150",
    "upstream_response_time": "0.001, 0.149",
    "user_agent": 'curl "8" \\ é',
    "referer": "",
    "request_id": "9f71",
    "virtual_host_id": "h1",
}


def test_a_line_of_the_access_log_becomes_an_entry() -> None:
    request = parse_request(json.dumps(LINE).encode())
    assert request is not None
    entry = access_entry(request, identity="i")
    assert entry.timestamp == 1794783182314
    assert (entry.level, entry.message) == ("access", "GET /a?b=%22 HTTP/1.1")
    assert entry.fields["response_time_ms"] == "150"
    assert entry.fields["upstream_response_time_ms"] == "149"
    assert entry.fields["user_agent"] == LINE["user_agent"]
    assert "referer" not in entry.fields


def test_bytes_that_are_not_text_do_not_lose_the_line() -> None:
    request = parse_request(b'{"uri":"/\xff\xfe","status":"400"}')
    assert request is not None
    assert request.uri == "/\ufffd\ufffd"
    assert parse_request(b'{"uri":"/') is None


def test_a_line_of_the_error_log_becomes_an_entry() -> None:
    entry = error_entry(b"2026/11/15 22:53:04 [emerg] 12#12: bind() failed", identity="i")
    assert entry is not None
    assert (entry.level, entry.message, entry.fields["source"]) == ("emerg", "bind() failed", "nginx_error")
    assert error_entry(b"garbage", identity="i") is None


def test_a_line_has_the_same_id_whenever_it_is_sent() -> None:
    assert entry_id("agent", "e:1:0") == entry_id("agent", "e:1:0")
    assert len({entry_id("a", "e:1:0"), entry_id("b", "e:1:0"), entry_id("a", "e:1:1")}) == 3


def test_requests_add_up() -> None:
    traffic = LoggedTraffic()
    for status in ("200", "204", "502", "-"):
        request = parse_request(json.dumps({**LINE, "status": status}).encode())
        assert request is not None
        traffic.count(request)
    assert traffic.responses == {"2xx h1": 2, "5xx h1": 1, "other h1": 1}
    assert (traffic.request_bytes, traffic.response_bytes, sum(traffic.durations)) == (536, 620, 4)
    assert read_traffic(msgspec.json.encode(traffic).decode()) == traffic
    assert read_traffic("") == LoggedTraffic()
