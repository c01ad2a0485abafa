"""The OpenAPI document is valid, and the server keeps what it promises to whatever anyone sends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from proxy_api import rest_api
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_process import running_server

EXAMPLES = 12
"""Per operation: some 70 of them, at a few milliseconds a request."""
UNTOUCHED = ("/auth/logout", "/auth/password", "/auth/login", "/auth/refresh")
"""What would end the session that tries the others, or waits for a hash."""


async def test_the_document_is_valid_and_has_every_route(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        document = (await api.http.get("/openapi.json")).json()
        routes = {(route.path, route.method.lower()) for route in api.rest.table.routes}
        page = await api.http.get("/docs")
        script = await api.http.get("/docs/docs.js")

    OpenAPIV31SpecValidator(document).validate()
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == routes
    identifiers = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(identifiers)) == len(identifiers)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "://" not in page.text, "everything comes from our own origin"
    assert script.status_code == 200


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, dict[str, str]]]:
    """A real server with one of everything: its address, a token, and the ids that paths name."""
    folder = tmp_path_factory.mktemp("fuzzed")
    chosen = (
        "--only", "proxies", "--set", "proxies.admin_email=user@example.com",
        "--set", "proxies.admin_password=secure_password", "--set", "proxies.requests_per_minute=10000000",
        "--set", "listeners.proxy-agents.addresses=127.0.0.1:0",
    )  # fmt: skip
    with running_server(folder, *chosen) as server, httpx.Client(base_url=f"{server.web}/v1") as http:
        login = {"email": "user@example.com", "password": "secure_password"}
        token = http.post("/auth/login", json=login).json()["access_token"]
        http.headers["authorization"] = f"Bearer {token}"

        def made(path: str, key: str = "id", **body: object) -> str:
            return str(http.post(path, json=body).json()[key])

        organization = made("/organizations", name="a", slug="a")
        workspace = made(f"/organizations/{organization}/workspaces", name="a", slug="a")
        below = f"/workspaces/{workspace}"
        yield server.web, token, {
            "organization_id": organization, "workspace_id": workspace, "version": "1",
            "agent_id": made(f"{below}/agents/tokens", "agent_id", name="a"),
            "upstream_id": made(f"{below}/upstreams", name="u", servers=[{"address": "a:1"}]),
            "virtual_host_id": made(f"{below}/virtual-hosts", name="v", server_name="a.b"),
            "certificate_id": made(f"{below}/certificates", domain="a.b"),
            "user_id": made("/users", email="x@example.com", password="long enough pw"),
            "api_token_id": made("/api-tokens", organization_id=organization, name="t"),
        }  # fmt: skip


def test_whatever_is_sent_the_answer_is_one_that_the_document_promises(
    furnished: tuple[str, str, dict[str, str]],
) -> None:
    web, token, ids = furnished
    logging.getLogger("urllib3").setLevel(logging.WARNING)
    schema = schemathesis.openapi.from_dict(httpx.get(f"{web}/openapi.json").json())
    tried = 0

    for operation in schema.get_all_operations():
        assert isinstance(operation, Ok), operation
        found = operation.ok()
        if found.path in UNTOUCHED or found.method == "delete":
            continue

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=found.as_strategy())
        def attempt(case: schemathesis.Case[Any]) -> None:
            nonlocal tried
            for name in case.path_parameters or {}:
                case.path_parameters[name] = ids[name]
            answer = case.call(base_url=f"{web}/v1", headers={"authorization": f"Bearer {token}"})
            tried += 1
            if answer.status_code == 503 and "not connected" in json.dumps(answer.json()):
                return
            case.validate_response(
                answer,
                checks=[
                    not_a_server_error, status_code_conformance, content_type_conformance,
                    response_schema_conformance,
                ],
            )  # fmt: skip

        attempt()
    assert tried > 500
