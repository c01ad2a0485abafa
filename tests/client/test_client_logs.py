"""Logs as clients read them: what is asked, and what events mean."""

from __future__ import annotations

import json

import pytest

from fleetplane.client import watches
from fleetplane.client.watches import LogLine, LogReader
from fleetplane.kernel.errors import IntegrityError, InvalidArgument, Unavailable

LINE = {"at": "2026-11-16T04:00:00Z", "level": "error", "source": "nginx_error", "message": "no"}


def test_what_is_not_asked_for_is_not_sent() -> None:
    made = watches.request("boards", "at/tic", scope="/tenants/acme", follow=True, source="kernel")
    assert made.target == (
        "/apis/v1/boards/at%2Ftic/logs?scope=%2Ftenants%2Facme&tail=100&follow=true&source=kernel"
    )
    assert "follow" not in watches.request("boards", "a").target


def test_events_are_lines_until_the_end() -> None:
    reader = LogReader()
    assert reader.on_event("entry", json.dumps(LINE)) == LogLine(**LINE, dropped=0)
    dropped = reader.on_event("entry", json.dumps({**LINE, "dropped": 3}))
    assert dropped is not None
    assert dropped.dropped == 3
    assert reader.on_event("of a later version", "{}") is None
    with pytest.raises(Unavailable):
        reader.check_over()
    assert reader.on_event("end", "{}") is None
    assert reader.is_over
    reader.check_over()


def test_what_the_server_could_not_go_on_for_is_raised_as_it_was() -> None:
    told = {"message": "is not one of debug", "reason": "InvalidArgument", "status": 400, "field": "level"}
    with pytest.raises(InvalidArgument, match="level: is not one of debug"):
        LogReader().on_event("error", json.dumps(told))


@pytest.mark.parametrize("data", ["{", "[]", "{}", '{"at": 1}', "null"])
@pytest.mark.parametrize("kind", ["entry", "error"])
def test_what_is_no_log_is_refused(kind: str, data: str) -> None:
    with pytest.raises(IntegrityError):
        LogReader().on_event(kind, data)
