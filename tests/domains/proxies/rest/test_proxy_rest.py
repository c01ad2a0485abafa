"""What every REST route has in common, met over the routes of proxies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support.proxies.proxy_api import HOST, UPSTREAM, rest_api

from fleetplane.domains.proxies.agents.ports import (
    AccessLogEntry,
    AgentLogQuery,
    AgentOrder,
    AgentResult,
    AgentSighting,
    AgentTraffic,
    LogPage,
    NobodyThere,
)
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.domains.proxies.kinds.values import AgentHealth
from fleetplane.kernel.clock import SystemClock

MISSING = "00000000-0000-4000-8000-000000000000"


async def test_pages_stay_correct_while_rows_are_added(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = f"/workspaces/{workspace}/agents"
        for number in range(7):
            await api.admin.post(f"{path}/tokens", {"name": f"a{number}"})
        first = await api.admin.get(f"{path}?page=1&per_page=3")
        for number in range(7, 10):
            await api.admin.post(f"{path}/tokens", {"name": f"a{number}"})
        later = [await api.admin.get(f"{path}?page={page}&per_page=3") for page in (2, 3, 4, 5)]

    names = [row["name"] for page in (first, *later) for row in page["data"]]
    assert names == [f"a{number}" for number in range(10)]
    assert (first["meta"]["total"], later[0]["meta"]["total"]) == (7, 10)
    assert later[-1] == {"data": [], "meta": {"page": 5, "per_page": 3, "total": 10}}


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("page=0", {"page"}),
        ("page=x", {"page"}),
        ("per_page=101", {"per_page"}),
        ("per_page=0", {"per_page"}),
        ("page=-1&per_page=1e3", {"page", "per_page"}),
        ("state=sleeping", {"state"}),
        ("label_selector=a b", {"label_selector"}),
        ("page=1&page=2", {"page"}),
        ("page=%C2%B2", {"page"}),
    ],
)
async def test_a_query_out_of_range_names_its_parameters(
    tmp_path: Path, query: str, fields: set[str]
) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        found = await api.admin.faults("GET", f"/workspaces/{workspace}/agents?{query}")
    assert {field for field, _ in found} == fields


async def test_a_parameter_that_a_route_does_not_know_is_refused_by_its_name(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        faults = await api.admin.faults("GET", f"/workspaces/{workspace}/agents?stat=online&page=1&Page=2")
        assert faults == [("Page", "UNKNOWN_FIELD"), ("stat", "UNKNOWN_FIELD")]
        answer = await api.admin.call("GET", f"/workspaces/{workspace}/agents?stat=online")
        assert answer.json()["error"]["details"][0]["message"] == (
            "Unknown parameter; known: label_selector, page, per_page, state"
        )
        path = f"/workspaces/{workspace}/virtual-hosts"
        assert await api.admin.faults("POST", f"{path}?dry_run=true", HOST) == [("dry_run", "UNKNOWN_FIELD")]
        assert (await api.admin.get(path))["data"] == [], "and nothing was made"


async def test_every_route_refuses_a_parameter_that_it_does_not_know(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        names = {"organization_id": organization, "workspace_id": workspace, "version": "1"}
        below = f"/workspaces/{workspace}"
        names["agent_id"] = (await api.admin.post(f"{below}/agents/tokens", {"name": "a"}))["agent_id"]
        tried = 0
        for route in api.rest.table.routes:
            if not all(name in names for name in re.findall(r"\{(\w+)\}", route.path)):
                continue
            path = re.sub(r"\{(\w+)\}", lambda match: names[match[1]], route.path)
            answer = await api.admin.call(route.method, f"{path}?nonsense=1", {})
            found = [one["field"] for one in answer.json()["error"]["details"]]
            assert (answer.status_code, found) == (422, ["nonsense"]), route.name
            tried += 1
        assert tried > 40


async def test_a_change_names_the_version_it_means(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        made = await api.admin.call("POST", f"/workspaces/{workspace}/virtual-hosts", HOST)
        path, tag = f"/virtual-hosts/{made.json()['id']}", made.headers["etag"]
        assert (await api.admin.call("GET", path)).headers["etag"] == tag

        renamed = await api.admin.call("PATCH", path, {"name": "B"}, headers={"if-match": tag})
        assert renamed.status_code == 200
        late = await api.admin.call("PATCH", path, {"name": "C"}, headers={"if-match": tag})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "CONFLICT")
        assert (await api.admin.call("DELETE", path, headers={"if-match": tag})).status_code == 409
        # As if this version had been made after the backup that was restored: it never was here.
        lost = re.sub(r"-(\d+)-", lambda found: f"-{int(found[1]) + 1}-", renamed.headers["etag"])
        answer = await api.admin.call("PATCH", path, {"name": "D"}, headers={"if-match": lost})
        assert (answer.status_code, answer.json()["error"]["code"]) == (412, "PRECONDITION_FAILED")
        current = f"{lost}, {renamed.headers['etag']}"
        assert (await api.admin.call("DELETE", path, headers={"if-match": current})).status_code == 204


async def test_of_two_who_change_the_same_version_one_wins(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, _ = await api.workspace()
        path = f"/organizations/{organization}"
        headers = {"if-match": (await api.admin.call("GET", path)).headers["etag"]}
        answers = await asyncio.gather(
            *(api.admin.call("PATCH", path, {"name": f"N{n}"}, headers=headers) for n in range(5))
        )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 4


async def test_a_post_with_a_key_happens_once(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path, key = f"/workspaces/{workspace}/agents/tokens", {"idempotency-key": "k1"}
        first = await api.admin.call("POST", path, {"name": "a"}, headers=key)
        again = await api.admin.call("POST", path, {"name": "a"}, headers=key)
        other = await api.admin.call("POST", path, {"name": "b"}, headers=key)
        person = await api.person()
        mine = await person.call("POST", "/organizations", {"name": "x", "slug": "x"}, headers=key)
        fresh = await api.admin.call("POST", path, {"name": "a"}, headers={"idempotency-key": "k2"})

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content, "with the token that is shown once"
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert other.status_code == 409
    assert mine.status_code == 201, "keys are each caller's own"
    assert fresh.status_code == 409, "another key is another request"


async def test_a_key_is_remembered_by_the_next_server_and_its_answer_is_sealed(tmp_path: Path) -> None:
    headers = {"idempotency-key": "k1"}
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = f"/workspaces/{workspace}/agents/tokens"
        first = await api.admin.call("POST", path, {"name": "a"}, headers=headers)
    assert first.json()["token"].encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("p.db*"))
    async with rest_api(tmp_path) as api:
        again = await api.admin.call("POST", path, {"name": "a"}, headers=headers)
    assert again.content == first.content


async def test_the_same_key_at_the_same_time_is_done_once(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        body, headers = {"name": "x", "slug": "x"}, {"idempotency-key": "k1"}
        answers = await asyncio.gather(
            *(api.admin.call("POST", "/organizations", body, headers=headers) for _ in range(6))
        )
        total = (await api.admin.get("/organizations"))["meta"]["total"]
    assert total == 1
    assert {answer.status_code for answer in answers} <= {201, 409}


class StandingClock(SystemClock):
    """A moment that does not pass."""

    def __init__(self) -> None:
        self._now_ns = SystemClock().now_ns()

    def now_ns(self) -> int:
        return self._now_ns


async def test_the_1001st_request_of_a_minute_is_one_too_many(tmp_path: Path) -> None:
    async with rest_api(tmp_path, requests_per_minute=1000, clock=StandingClock()) as api:
        for used in range(1, 1001):
            answer = await api.admin.call("GET", "/organizations?per_page=1")
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining"] == str(1000 - used)
        answer = await api.admin.call("GET", "/organizations")
        stranger = await api.http.get("/v1/organizations")
        uncounted = await api.http.get("/openapi.json")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "RATE_LIMITED")
    assert answer.headers["x-ratelimit-limit"] == "1000"
    assert answer.headers["x-ratelimit-remaining"] == "0"
    assert 1 <= int(answer.headers["retry-after"]) <= 61
    assert stranger.status_code == 401, "others have their own"
    assert uncounted.status_code == 200


async def test_what_is_in_use_is_not_deleted_and_its_holders_are_named(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        upstream = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        certificate = await api.admin.post(f"{below}/certificates", {"domain": "a.example.com"})
        agent = (await api.admin.post(f"{below}/agents/tokens", {"name": "a"}))["agent_id"]
        host = await api.admin.post(
            f"{below}/virtual-hosts",
            {
                **HOST,
                "locations": [{"path": "/", "upstream_id": upstream["id"]}],
                "listen_port": 443,
                "ssl_enabled": True,
                "ssl_certificate_id": certificate["id"],
                "target_agents": {"type": "agents", "agent_ids": [agent]},
            },
        )
        for path, count in (
            (f"/upstreams/{upstream['id']}", 1),
            (f"/certificates/{certificate['id']}", 1),
            (f"/agents/{agent}", 1),
            (below, 4),
            (f"/organizations/{organization}", 1),
        ):
            answer = await api.admin.call("DELETE", path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "CONFLICT"), path
            assert len(error["details"]) == count, path
            assert {one["code"] for one in error["details"]} == {"IN_USE"}
            if count == 1 and "organizations" not in path:
                assert host["id"] in error["details"][0]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/organizations", {"name": "x", "slug": "taken"}, "slug"),
        ("{ws}/upstreams", UPSTREAM, "name"),
        ("{ws}/agents/tokens", {"name": "a"}, "name"),
        ("{ws}/certificates", {"domain": "A.example.com"}, "domain"),
    ],
)
async def test_a_taken_name_is_a_conflict_at_its_field(
    tmp_path: Path, path: str, body: dict[str, Any], field: str
) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = path.format(ws=f"/workspaces/{workspace}")
        await api.admin.post(path, body)
        assert await api.admin.faults("POST", path, body) == [(field, "NOT_UNIQUE")]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, ("", "REQUIRED")),
        ({"nmae": "x"}, ("nmae", "UNKNOWN_FIELD")),
        ({"id": MISSING}, ("id", "UNKNOWN_FIELD")),
        ({"workspace_id": MISSING}, ("workspace_id", "UNKNOWN_FIELD")),
        ({"name": None}, ("name", "INVALID_FORMAT")),
        ({"listen_port": "80"}, ("listen_port", "INVALID_FORMAT")),
        ({"listen_port": True}, ("listen_port", "INVALID_FORMAT")),
        ({"locations": [{"root": "/a"}]}, ("locations.0.path", "REQUIRED")),
        ({"locations": [{"path": "/", "root": "/a", "x": 1}]}, ("locations.0.x", "UNKNOWN_FIELD")),
        ({"target_agents": {"type": "some"}}, ("target_agents.type", "INVALID_FORMAT")),
        ([], ("", "INVALID_FORMAT")),
    ],
)
async def test_a_patch_is_read_strictly(tmp_path: Path, body: Any, fault: tuple[str, str]) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        host = await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
        assert await api.admin.faults("PATCH", f"/virtual-hosts/{host['id']}", body) == [fault]


async def test_a_patch_replaces_whole_values_and_leaves_the_rest(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        certificate = await api.admin.post(f"/workspaces/{workspace}/certificates", {"domain": "a.b"})
        host = await api.admin.post(
            f"/workspaces/{workspace}/virtual-hosts",
            {
                **HOST,
                "ssl_certificate_id": certificate["id"],
                "locations": [{"path": "/a", "root": "/a"}, {"path": "/b", "root": "/b"}],
            },
        )
        path = f"/virtual-hosts/{host['id']}"
        patched = await api.admin.patch(path, {"locations": [{"path": "/c", "root": "/c"}]})
        assert patched["locations"] == [{"path": "/c", "root": "/c"}]
        assert {**patched, "locations": 0, "updated_at": 0} == {**host, "locations": 0, "updated_at": 0}
        assert (await api.admin.patch(path, {"ssl_certificate_id": None}))["ssl_certificate_id"] is None


async def test_bodies_that_are_no_json_too_long_or_of_another_type_are_refused(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        headers = {"authorization": f"Bearer {api.admin.token}", "content-type": "application/json"}

        async def fault(content: bytes, **more: str) -> tuple[int, str, str]:
            answer = await api.http.post("/v1/organizations", content=content, headers={**headers, **more})
            error = answer.json()["error"]
            return answer.status_code, error["code"], error["details"][0]["code"]

        assert await fault(b"{") == (422, "VALIDATION_ERROR", "INVALID_FORMAT")
        assert await fault(b"") == (422, "VALIDATION_ERROR", "REQUIRED")
        assert await fault(b"\xff") == (422, "VALIDATION_ERROR", "INVALID_FORMAT")
        assert await fault(b" " * (1024 * 1024 + 1)) == (422, "VALIDATION_ERROR", "TOO_LONG")
        assert await fault(b"a=b", **{"content-type": "text/plain"}) == (
            422,
            "VALIDATION_ERROR",
            "INCOMPATIBLE",
        )
        assert await fault(b"[" * 100_000) == (422, "VALIDATION_ERROR", "INVALID_FORMAT")


async def test_the_request_id_is_echoed_or_made(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        given = await api.http.get("/v1/organizations", headers={"x-request-id": "req-abc-123"})
        bad = await api.http.get("/v1/organizations", headers={"x-request-id": "x" * 65})

    assert given.headers["x-request-id"] == given.json()["error"]["request_id"] == "req-abc-123"
    assert bad.headers["x-request-id"].startswith("req-")


async def test_the_audit_log_tells_who_did_what_from_where(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        other, _ = await api.workspace()
        host = await api.admin.call(
            "POST",
            f"/workspaces/{workspace}/virtual-hosts",
            HOST,
            headers={"x-request-id": "req-1", "user-agent": "curl/8 & co"},
        )
        await api.admin.delete(f"/virtual-hosts/{host.json()['id']}")
        page = await api.admin.get(f"/organizations/{organization}/audit-log?limit=2")
        rest = await api.admin.get(f"/organizations/{organization}/audit-log?cursor={page['meta']['cursor']}")
        only = await api.admin.get(f"/organizations/{organization}/audit-log?action=virtual_host.create")

    deleted, made = page["data"]
    assert [row["action"] for row in rest["data"]] == ["workspace.create", "organization.create"]
    assert rest["meta"]["cursor"] is None
    assert only["data"] == [made]
    assert deleted["action"] == "virtual_host.delete"
    assert made["actor"] == {"type": "user", "id": api.admin.id, "email": "user@example.com"}
    assert (made["request_id"], made["user_agent"], made["ip"]) == ("req-1", "curl/8 & co", "127.0.0.1")
    assert made["resource"] == {"type": "virtual_host", "id": host.json()["id"], "name": "Site"}
    assert (made["organization_id"], made["workspace_id"]) == (organization, workspace)
    assert other not in str(page)


class Fleet(NobodyThere):
    """An agent side that always answers."""

    def __init__(self, *, success: bool = True) -> None:
        self.success = success
        self.orders: list[AgentOrder] = []
        self.gone: list[str] = []
        self.asked: list[AgentLogQuery] = []

    def sighting(self, _agent_id: str) -> AgentSighting:  # type: ignore[override]
        health = AgentHealth(
            nginx_status="running",
            nginx_uptime_seconds=86400,
            active_connections=42,
            requests_per_second=150.5,
            cpu_percent=25.0,
            memory_used_mb=512,
            config_version=42,
        )
        return AgentSighting(last_seen_at_ns=1_772_452_800_000_000_000, health=health)

    def disconnect(self, agent_id: str, *, reason: str) -> None:
        self.gone.append(f"{agent_id} {reason}")

    async def order(self, _agent: Agent, order: AgentOrder, *, actor: str) -> AgentResult:
        self.orders.append(order)
        return AgentResult(success=self.success, message="" if self.success else "no", output="")

    async def traffic(self, workspace: str, agents: Collection[str], **window: int) -> AgentTraffic:
        return AgentTraffic(requests_total=10, status_2xx=9, status_5xx=1, error_rate=0.1, out_bytes=7)

    async def access_log(self, _workspace: str, query: AgentLogQuery) -> LogPage:
        self.asked.append(query)
        entry = AccessLogEntry(
            id="x",
            agent_id="a",
            timestamp="2026-03-02T10:30:00Z",
            remote_addr="192.168.1.100",
            method="GET",
            uri="/",
            protocol="HTTP/1.1",
            host="h",
            status=500,
            body_bytes_sent=1,
            response_time_ms=1.5,
            user_agent="",
            referer="",
            request_id="r",
        )
        return LogPage(entries=[entry], total=67)


async def test_agents_are_shown_commanded_and_measured_through_what_reaches_them(tmp_path: Path) -> None:
    fleet = Fleet()
    async with rest_api(tmp_path, presence=fleet, commander=fleet, records=fleet) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        agent = (await api.admin.post(f"{below}/agents/tokens", {"name": "a"}))["agent_id"]

        shown = await api.admin.get(f"/agents/{agent}")
        assert shown["last_seen_at"] == "2026-03-02T12:00:00Z"
        assert shown["health"] == {
            "nginx_status": "running",
            "nginx_uptime_seconds": 86400,
            "active_connections": 42,
            "requests_per_second": 150.5,
            "cpu_percent": 25.0,
            "memory_used_mb": 512,
            "config_version": 42,
        }
        reloaded = await api.admin.post(f"/agents/{agent}/reload", status=200)
        assert set(reloaded) == {"success", "message", "timestamp"}
        assert (reloaded["success"], reloaded["message"]) == (True, "Nginx reloaded successfully")
        await api.admin.post(f"/agents/{agent}/stop", {"graceful": False, "timeout_seconds": 5}, status=200)
        await api.admin.post(f"/agents/{agent}/restart", status=200)
        assert [(order.verb, order.graceful, order.timeout_seconds) for order in fleet.orders] == [
            ("reload", True, 30),
            ("stop", False, 5),
            ("restart", True, 30),
        ]
        trial = {"config_content": "events {}"}
        tried = await api.admin.post(f"{below}/config/validate?agent_id={agent}", trial, status=200)
        assert tried["valid"] is True
        assert (await api.admin.get(f"{below}/metrics"))["status_codes"] == {
            "2xx": 9,
            "3xx": 0,
            "4xx": 0,
            "5xx": 1,
        }
        logs = await api.admin.get(f"{below}/access-logs?status_code=5xx&limit=1&host=h")
        assert logs["meta"] == {"total": 67, "limit": 1}
        assert (fleet.asked[0].status_low, fleet.asked[0].status_high, fleet.asked[0].host) == (500, 599, "h")
        await api.admin.delete(f"/agents/{agent}")
    assert fleet.gone == [f"{agent} deleted"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("from=2026-03-02T00:00:00Z&to=2026-03-01T00:00:00Z", "from"),
        ("from=2026-01-01T00:00:00Z&to=2026-03-01T00:00:00Z", "from"),
        ("from=yesterday", "from"),
        ("to=2026-03-01T00:00:00", "to"),
        ("to=2026-03-01", "to"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("status_code=6xx", "status_code"),
        ("status_code=50", "status_code"),
    ],
)
async def test_a_question_about_no_time_or_too_much_is_refused(
    tmp_path: Path, query: str, field: str
) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        found = await api.admin.faults("GET", f"/workspaces/{workspace}/access-logs?{query}")
    assert [name for name, _ in found] == [field]
