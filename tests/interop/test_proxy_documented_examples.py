"""Every documented request, sent by curl to a real server; answers have exactly the printed keys."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.proxies.documented_agent import DEADLINE_SECONDS, documented_agent
from support.shared.server_process import ServerProcess, running_server

TOKEN_PAIR = {"access_token", "refresh_token", "expires_in", "token_type"}
ORGANIZATION = {"id", "name", "slug", "created_at", "updated_at"}
WORKSPACE = {"id", "organization_id", "name", "slug", "created_at"}
AGENT = {
    "id",
    "workspace_id",
    "name",
    "hostname",
    "ip_address",
    "version",
    "state",
    "deployment_mode",
    "last_seen_at",
    "capabilities",
    "labels",
    "created_at",
}
HOST_SUMMARY = {
    "id",
    "workspace_id",
    "name",
    "server_name",
    "listen_port",
    "ssl_enabled",
    "ssl_certificate_id",
    "http2_enabled",
    "target_agents",
    "created_at",
    "updated_at",
}
UPSTREAM = {
    "id",
    "workspace_id",
    "name",
    "algorithm",
    "servers",
    "health_check",
    "created_at",
    "updated_at",
}
SERVER = {"address", "weight", "backup", "max_fails", "fail_timeout"}
HEALTH_CHECK = {"enabled", "path", "interval", "timeout"}
CERTIFICATE = {
    "id",
    "workspace_id",
    "domain",
    "is_wildcard",
    "provider",
    "status",
    "issued_at",
    "expires_at",
    "auto_renew",
    "created_at",
}
METRICS = {
    "requests_total",
    "requests_per_second",
    "error_rate",
    "active_connections",
    "bandwidth",
    "status_codes",
}


@dataclass(slots=True)
class Curl:
    """The real curl, with the token of the last login."""

    server: ServerProcess
    token: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def __call__(self, request: str, body: str | None = None, *, expect: int) -> Any:
        method, path = request.split(" ", 1)
        command = ["curl", "-sS", "-i", "-X", method, f"{self.server.web}/v1{path}"]
        if self.token:
            command += ["-H", f"Authorization: Bearer {self.token}"]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", body]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        head, _, content = output.replace("\r\n", "\n").partition("\n\n")
        lines = head.splitlines()
        status = int(lines[0].split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        assert status == expect, output
        return json.loads(content) if content.strip() else None


@pytest.fixture(scope="module")
def curl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Curl]:
    folder: Path = tmp_path_factory.mktemp("documented")
    settings = (
        "--only",
        "proxies",
        "--set",
        "proxies.admin_email=user@example.com",
    )
    with running_server(folder, *settings, admin_password="secure_password") as server:
        yield Curl(server)


def listed(answer: Any, keys: set[str], total: int) -> list[Any]:
    assert set(answer) == {"data", "meta"}
    assert answer["meta"] == {"page": 1, "per_page": 20, "total": total}
    for row in answer["data"]:
        assert set(row) == keys
    return list(answer["data"])


def test_every_documented_request_works_as_printed(curl: Curl) -> None:
    """One long story, because each request needs what the one before made."""
    _authentication(curl)
    organization = _organizations(curl)
    workspace = _workspaces(curl, organization)
    agent = _agents(curl, workspace)
    upstreams = _upstreams(curl, workspace)
    certificate = _certificates(curl, workspace)
    host = _virtual_hosts(curl, workspace, upstreams, certificate)
    _records(curl, workspace, agent)
    _errors(curl, workspace)
    _deletions(curl, organization, workspace, agent, upstreams, certificate, host)


def _authentication(curl: Curl) -> None:
    login = '{\n"email": "user@example.com",\n"password": "secure_password"\n}'
    pair = curl("POST /auth/login", login, expect=200)
    assert set(pair) == TOKEN_PAIR
    assert (pair["expires_in"], pair["token_type"]) == (3600, "Bearer")
    assert pair["access_token"].startswith("eyJ")
    assert curl.headers["cache-control"] == "no-store"

    refreshed = curl("POST /auth/refresh", json.dumps({"refresh_token": pair["refresh_token"]}), expect=200)
    assert set(refreshed) == TOKEN_PAIR
    assert refreshed["refresh_token"] != pair["refresh_token"]
    curl.token = refreshed["access_token"]


def _organizations(curl: Curl) -> str:
    made = curl("POST /organizations", '{\n"name": "Acme Corp",\n"slug": "acme-corp"\n}', expect=201)
    assert set(made) == ORGANIZATION
    identity: str = made["id"]
    assert curl.headers["location"] == f"/v1/organizations/{identity}"
    listed(curl("GET /organizations?page=1&per_page=20", expect=200), ORGANIZATION, 1)
    assert curl(f"GET /organizations/{identity}", expect=200) == made
    patched = curl(f"PATCH /organizations/{identity}", '{\n"name": "Acme Corporation"\n}', expect=200)
    assert (patched["name"], patched["slug"]) == ("Acme Corporation", "acme-corp")
    return identity


def _workspaces(curl: Curl, organization: str) -> str:
    path = f"/organizations/{organization}/workspaces"
    made = curl(f"POST {path}", '{\n"name": "Staging",\n"slug": "staging"\n}', expect=201)
    assert set(made) == WORKSPACE
    identity: str = made["id"]
    assert listed(curl(f"GET {path}?page=1&per_page=20", expect=200), WORKSPACE, 1) == [made]
    assert curl(f"GET /workspaces/{identity}", expect=200) == made
    patched = curl(f"PATCH /workspaces/{identity}", '{\n"name": "Staging Environment"\n}', expect=200)
    assert patched["name"] == "Staging Environment"
    return identity


def _agents(curl: Curl, workspace: str) -> str:
    body = """{
"name": "web-server-02",
"labels": {
"env": "production",
"region": "us-west-1"
},
"expires_in_hours": 24
}"""
    made = curl(f"POST /workspaces/{workspace}/agents/tokens", body, expect=201)
    assert set(made) == {"token", "agent_id", "expires_at"}
    assert made["token"].startswith("nxmesh_agent_eyJhZ2VudF9pZCI6I")
    identity: str = made["agent_id"]

    path = f"/workspaces/{workspace}/agents"
    listed(curl(f"GET {path}?page=1&per_page=20&state=online", expect=200), AGENT, 0)
    (row,) = listed(curl(f"GET {path}?state=all", expect=200), AGENT, 1)
    assert (row["state"], row["last_seen_at"]) == ("offline", None)
    selector = "label_selector=env=production,region=us-east"
    listed(curl(f"GET {path}?{selector}", expect=200), AGENT, 0)
    listed(curl(f"GET {path}?{selector.replace('us-east', 'us-west-1')}", expect=200), AGENT, 1)

    detail = curl(f"GET /agents/{identity}", expect=200)
    assert set(detail) == AGENT | {"health"}
    body = """{
"name": "web-server-01-renamed",
"labels": {
"env": "production",
"region": "us-east-1",
"tier": "web"
}
}"""
    patched = curl(f"PATCH /agents/{identity}", body, expect=200)
    assert patched["name"] == "web-server-01-renamed"
    assert patched["labels"] == {"env": "production", "region": "us-east-1", "tier": "web"}
    away = curl(f"POST /agents/{identity}/reload", expect=503)
    assert away["error"]["code"] == "SERVICE_UNAVAILABLE"
    with documented_agent(curl.server, made["token"]) as connected:
        _connected_agent(curl, workspace, identity)
    assert connected.commands == ["reload"]
    return identity


def _connected_agent(curl: Curl, workspace: str, identity: str) -> None:
    (row,) = listed(curl(f"GET /workspaces/{workspace}/agents?state=online", expect=200), AGENT, 1)
    detail = _once_reported(curl, identity)
    assert {name: detail[name] for name in detail.keys() & AGENT - {"last_seen_at"}} == {
        **{name: row[name] for name in ("id", "created_at")},
        "workspace_id": workspace,
        "name": "web-server-01-renamed",
        "hostname": "web-01.internal",
        "ip_address": "10.0.1.10",
        "version": "0.1.0",
        "state": "online",
        "deployment_mode": "docker_sidecar",
        "capabilities": ["http2", "websocket"],
        "labels": {"env": "production", "region": "us-east-1", "tier": "web"},
    }
    assert detail["health"] == {
        "nginx_status": "running",
        "nginx_uptime_seconds": 86400,
        "active_connections": 42,
        "requests_per_second": 150.5,
        "cpu_percent": 25.0,
        "memory_used_mb": 512,
        "config_version": 42,
    }
    reloaded = curl(f"POST /agents/{identity}/reload", expect=200)
    moment = reloaded.pop("timestamp")
    assert reloaded == {"success": True, "message": "Nginx reloaded successfully"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment)


def _once_reported(curl: Curl, identity: str) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (detail := curl(f"GET /agents/{identity}", expect=200))["health"] is None:
        assert time.monotonic() < deadline, "the agent's report did not arrive"
        time.sleep(0.02)
    return detail


def _upstreams(curl: Curl, workspace: str) -> tuple[str, str]:
    body = """{
"name": "web-backend",
"algorithm": "least_connections",
"servers": [
{
"address": "10.0.1.30:8080",
"weight": 2,
"backup": false
},
{
"address": "10.0.1.31:8080",
"weight": 1,
"backup": false
},
{
"address": "10.0.1.32:8080",
"weight": 1,
"backup": true
}
],
"health_check": {
"enabled": true,
"path": "/health",
"interval": 10,
"timeout": 5
}
}"""
    path = f"/workspaces/{workspace}/upstreams"
    made = curl(f"POST {path}", body, expect=201)
    assert set(made) == UPSTREAM
    assert all(set(server) == SERVER for server in made["servers"])
    assert (made["servers"][0]["max_fails"], made["servers"][0]["fail_timeout"]) == (3, 30)
    assert set(made["health_check"]) == HEALTH_CHECK
    second = curl(f"POST {path}", body.replace("web-backend", "api-backend"), expect=201)
    listed(curl(f"GET {path}?page=1&per_page=20", expect=200), UPSTREAM, 2)
    identity = made["id"]
    assert curl(f"GET /upstreams/{identity}", expect=200) == made
    body = """{
"servers": [
{
"address": "10.0.1.30:8080",
"weight": 3,
"backup": false
}
]
}"""
    patched = curl(f"PATCH /upstreams/{identity}", body, expect=200)
    assert [server["weight"] for server in patched["servers"]] == [3]
    return identity, second["id"]


def _certificates(curl: Curl, workspace: str) -> str:
    body = """{
"domain": "api.example.com",
"provider": "letsencrypt",
"auto_renew": true
}"""
    path = f"/workspaces/{workspace}/certificates"
    made = curl(f"POST {path}", body, expect=201)
    assert set(made) == CERTIFICATE
    assert made["status"] == "pending"
    # It is being issued meanwhile, which comes to nothing on a server where nobody agreed to any terms.
    page = curl(f"GET {path}?page=1&per_page=20", expect=200)
    listed({**page, "data": [_without_error(one) for one in page["data"]]}, CERTIFICATE, 1)
    found = _without_error(curl(f"GET /certificates/{made['id']}", expect=200))
    assert {**found, "status": "pending"} == made
    return str(made["id"])


def _without_error(certificate: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in certificate.items() if name != "error"}


def _virtual_hosts(curl: Curl, workspace: str, upstreams: tuple[str, str], certificate: str) -> str:
    body = """{
"name": "API Gateway",
"server_name": "api.example.com",
"listen_port": 443,
"ssl_enabled": true,
"ssl_certificate_id": "990e8400-e29b-41d4-a716-446655440005",
"http2_enabled": true,
"locations": [
{
"path": "/api/v1",
"upstream_id": "aa0e8400-e29b-41d4-a716-446655440006",
"custom_headers": [
{
"name": "X-Forwarded-Proto",
"value": "$scheme"
}
]
},
{
"path": "/health",
"proxy_pass": "http://localhost:8080/health"
}
],
"target_agents": {
"type": "selector",
"label_selector": "env=production"
}
}"""
    body = body.replace("990e8400-e29b-41d4-a716-446655440005", certificate)
    body = body.replace("aa0e8400-e29b-41d4-a716-446655440006", upstreams[0])
    path = f"/workspaces/{workspace}/virtual-hosts"
    made = curl(f"POST {path}", body, expect=201)
    assert set(made) == HOST_SUMMARY | {"locations"}
    said = json.loads(body)
    assert {name: made[name] for name in said} == said
    listed(curl(f"GET {path}?page=1&per_page=20", expect=200), HOST_SUMMARY, 1)
    identity: str = made["id"]
    assert curl(f"GET /virtual-hosts/{identity}", expect=200) == made
    body = """{
"name": "API Gateway v2",
"locations": [
{
"path": "/api/v2",
"upstream_id": "aa0e8400-e29b-41d4-a716-446655440007"
}
]
}"""
    body = body.replace("aa0e8400-e29b-41d4-a716-446655440007", upstreams[1])
    patched = curl(f"PATCH /virtual-hosts/{identity}", body, expect=200)
    assert patched["locations"] == [{"path": "/api/v2", "upstream_id": upstreams[1]}]
    return identity


def _records(curl: Curl, workspace: str, agent: str) -> None:
    window = "from=2026-03-01T00:00:00Z&to=2026-03-02T00:00:00Z"
    for path in (f"/workspaces/{workspace}/metrics", f"/agents/{agent}/metrics"):
        metrics = curl(f"GET {path}?{window}", expect=200)
        assert set(metrics) == METRICS
        assert set(metrics["bandwidth"]) == {"in_bytes", "out_bytes"}
        assert set(metrics["status_codes"]) == {"2xx", "3xx", "4xx", "5xx"}
    logs = curl(f"GET /workspaces/{workspace}/access-logs?{window}&status_code=500&limit=100", expect=200)
    assert logs == {"data": [], "meta": {"total": 0, "limit": 100}}


def _errors(curl: Curl, workspace: str) -> None:
    answer = curl(
        f"POST /workspaces/{workspace}/virtual-hosts",
        '{"name": "x", "server_name": "not a_domain!", "listen_port": 80}',
        expect=422,
    )
    error = answer["error"]
    assert set(error) == {"code", "message", "request_id", "details"}
    assert error["code"] == "VALIDATION_ERROR"
    assert error["message"] == "Request validation failed"
    assert error["request_id"] == curl.headers["x-request-id"]
    assert error["details"] == [
        {"field": "server_name", "message": "Invalid domain format", "code": "INVALID_FORMAT"}
    ]


def _deletions(
    curl: Curl,
    organization: str,
    workspace: str,
    agent: str,
    upstreams: tuple[str, str],
    certificate: str,
    host: str,
) -> None:
    curl(f"DELETE /upstreams/{upstreams[1]}", expect=409)
    curl(f"DELETE /certificates/{certificate}", expect=409)
    curl(f"DELETE /workspaces/{workspace}", expect=409)
    curl(f"DELETE /organizations/{organization}", expect=409)
    for path in (
        f"/virtual-hosts/{host}",
        *(f"/upstreams/{upstream}" for upstream in upstreams),
        f"/certificates/{certificate}",
        f"/agents/{agent}",
        f"/workspaces/{workspace}",
        f"/organizations/{organization}",
    ):
        curl(f"DELETE {path}", expect=204)
        assert curl(f"DELETE {path}", expect=404)["error"]["code"] == "NOT_FOUND"
