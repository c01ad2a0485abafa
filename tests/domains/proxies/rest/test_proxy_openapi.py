"""The OpenAPI document is valid, and the server keeps what it promises to whatever anyone sends."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.proxies.proxy_api import rest_api
from support.shared.server_process import running_server

EXAMPLES = 12
"""Per operation: some 70 of them, at a few milliseconds a request."""
OF_OWN_SESSION = ("/auth/password", "/auth/logout")
"""What ends the session that tries it, or waits for a hash: tried by a user of its own."""
EMAIL, PASSWORD = "user@example.com", "secure_password"
OTHER_PASSWORD = "long enough pw"
Ids = dict[str, str]


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


@dataclass(slots=True)
class Furnished:
    """A real server with one of everything, and a way to have one more."""

    web: str
    http: httpx.Client
    token: str = ""
    ids: Ids = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def login(self, email: str, password: str) -> dict[str, Any]:
        answer = self.http.post("/auth/login", json={"email": email, "password": password})
        pair: dict[str, Any] = answer.raise_for_status().json()
        return pair

    def made(self, path: str, key: str = "id", **body: object) -> str:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()[key])

    # One more of each thing that can be deleted, in the order of the fields of its path.

    def organization(self) -> Ids:
        slug = f"s{next(self.numbers)}"
        return {"organization_id": self.made("/organizations", name="a", slug=slug)}

    def workspace(self) -> Ids:
        path = f"/organizations/{self.ids['organization_id']}/workspaces"
        return {"workspace_id": self.made(path, name="a", slug=f"w{next(self.numbers)}")}

    def of_workspace(self, what: str, parameter: str, key: str = "id", **body: object) -> Ids:
        return {parameter: self.made(f"/workspaces/{self.ids['workspace_id']}/{what}", key, **body)}

    def agent(self) -> Ids:
        return self.of_workspace("agents/tokens", "agent_id", "agent_id", name=f"a{next(self.numbers)}")

    def upstream(self) -> Ids:
        name = f"u{next(self.numbers)}"
        return self.of_workspace("upstreams", "upstream_id", name=name, servers=[{"address": "a:1"}])

    def access_list(self) -> Ids:
        return self.of_workspace("access-lists", "access_list_id", name=f"l{next(self.numbers)}")

    def dns_zone(self) -> Ids:
        zone = f"z{next(self.numbers)}.test"
        credentials = {"auth_token": "x"}
        return self.of_workspace(
            "dns-zones", "dns_zone_id", zone=zone, provider="hetzner", credentials=credentials
        )

    def stream(self) -> Ids:
        number = next(self.numbers)
        return self.of_workspace(
            "streams",
            "stream_id",
            name=f"s{number}",
            listen_port=20_000 + number,
            upstream_id=self.upstream()["upstream_id"],
        )

    def host(self) -> Ids:
        name = f"h{next(self.numbers)}.example"
        return self.of_workspace("virtual-hosts", "virtual_host_id", name=name, server_name=name)

    def certificate(self) -> Ids:
        return self.of_workspace("certificates", "certificate_id", domain=f"c{next(self.numbers)}.example")

    def api_token(self) -> Ids:
        body = {"organization_id": self.ids["organization_id"], "name": "t"}
        return {"api_token_id": self.made("/api-tokens", **body)}

    def user(self) -> Ids:
        email = f"u{next(self.numbers)}@example.com"
        return {"user_id": self.made("/users", email=email, password=OTHER_PASSWORD)}

    def member(self) -> Ids:
        email = f"m{next(self.numbers)}@example.com"
        found = {"user_id": self.made("/users", email=email, password=OTHER_PASSWORD)}
        path = f"/organizations/{self.ids['organization_id']}/members"
        assert self.http.post(path, json={"email": email, "role": "viewer"}).status_code == 201
        return found


VICTIMS: dict[str, Callable[[Furnished], Ids]] = {
    "/organizations/{organization_id}": Furnished.organization,
    "/organizations/{organization_id}/members/{user_id}": Furnished.member,
    "/workspaces/{workspace_id}": Furnished.workspace,
    "/agents/{agent_id}": Furnished.agent,
    "/agents/{agent_id}/rollback": lambda _: {},
    "/virtual-hosts/{virtual_host_id}": Furnished.host,
    "/upstreams/{upstream_id}": Furnished.upstream,
    "/access-lists/{access_list_id}": Furnished.access_list,
    "/dns-zones/{dns_zone_id}": Furnished.dns_zone,
    "/streams/{stream_id}": Furnished.stream,
    "/certificates/{certificate_id}": Furnished.certificate,
    "/api-tokens/{api_token_id}": Furnished.api_token,
    "/users/{user_id}": Furnished.user,
}
"""What is deleted by each path; a release of an agent can be asked for again and again."""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Furnished]:
    folder = tmp_path_factory.mktemp("fuzzed")
    chosen = (
        "--only",
        "proxies",
        "--set",
        f"proxies.admin_email={EMAIL}",
        "--set",
        "proxies.requests_per_minute=10000000",
        "--set",
        "listeners.proxy-agents.addresses=127.0.0.1:0",
    )
    with (
        running_server(folder, *chosen, admin_password=PASSWORD) as server,
        httpx.Client(base_url=f"{server.web}/v1") as http,
    ):
        made = Furnished(server.web, http)
        made.token = made.login(EMAIL, PASSWORD)["access_token"]
        http.headers["authorization"] = f"Bearer {made.token}"
        made.ids = {"version": "1", **made.organization()}
        made.ids |= made.workspace()
        made.ids |= {**made.agent(), **made.upstream(), **made.host(), **made.certificate()}
        made.ids |= made.access_list()
        made.ids |= made.stream()
        made.ids |= made.dns_zone()
        made.ids |= {"user_id": made.made("/users", email="x@example.com", password=OTHER_PASSWORD)}
        made.ids |= made.api_token()
        made.ids |= {"run_id": "0" * 32}  # without an agent there is none
        yield made


class Fuzz:
    """Whatever the document allows, and much that it does not, sent to the routes of one server."""

    CHECKS = (
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    )

    def __init__(self, furnished: Furnished) -> None:
        logging.getLogger("urllib3").setLevel(logging.WARNING)
        schema = schemathesis.openapi.from_dict(httpx.get(f"{furnished.web}/openapi.json").json())
        self._furnished = furnished
        self.answers: list[int] = []
        self.operations = []
        for operation in schema.get_all_operations():
            assert isinstance(operation, Ok), operation
            self.operations.append(operation.ok())

    def send(self, case: Any, *, ids: Ids, token: str | None = None) -> int:
        """Checked against the document; the status."""
        for name in case.path_parameters or {}:
            case.path_parameters[name] = ids[name]
        headers = {"authorization": f"Bearer {token or self._furnished.token}"}
        answer = case.call(base_url=f"{self._furnished.web}/v1", headers=headers, timeout=60)
        self.answers.append(answer.status_code)
        if answer.status_code != 503 or "not connected" not in json.dumps(answer.json()):
            case.validate_response(answer, checks=list(self.CHECKS))
        return int(answer.status_code)

    def each(self, operation: Any, attempt: Callable[[Any], object], *, examples: int = EXAMPLES) -> None:
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=_anything(operation))
        def attempts(case: schemathesis.Case[Any]) -> None:
            attempt(case)

        attempts()


def _anything(operation: Any) -> Any:
    """What the document allows, and where it forbids something, what it forbids."""
    allowed = operation.as_strategy()
    if not operation.body and not operation.query:
        return allowed
    return strategies.one_of(allowed, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))


@pytest.mark.timeout(400)  # hundreds of requests to each route: half a minute of work, on a machine alone
def test_whatever_is_sent_the_answer_is_one_that_the_document_promises(furnished: Furnished) -> None:
    fuzz = Fuzz(furnished)
    for operation in fuzz.operations:
        if operation.method != "delete" and not operation.path.startswith("/auth/"):
            fuzz.each(operation, lambda case: fuzz.send(case, ids=furnished.ids))
    assert len(fuzz.answers) > 500
    assert {200, 201, 422} <= {*fuzz.answers}


def test_whatever_is_deleted_is_gone_or_there_as_the_answer_says(furnished: Furnished) -> None:
    fuzz = Fuzz(furnished)
    deleting = [operation for operation in fuzz.operations if operation.method == "delete"]
    assert {operation.path for operation in deleting} == VICTIMS.keys()
    gone = 0

    for operation in deleting:
        victim = VICTIMS[operation.path]

        def attempt(case: Any, *, operation: Any = operation, victim: Any = victim) -> None:
            nonlocal gone
            ids = furnished.ids | victim(furnished)
            status = fuzz.send(case, ids=ids)
            if status == 204:
                gone += 1
                again = operation.Case(path_parameters=dict.fromkeys(case.path_parameters, ""))
                assert fuzz.send(again, ids=ids) == 404

        fuzz.each(operation, attempt, examples=5)
        plain = operation.Case(
            path_parameters={name: "" for name in furnished.ids if f"{{{name}}}" in operation.path}
        )
        attempt(plain)
    assert gone >= len(deleting) - 1, "each was deleted at least once, and was gone then"


def test_whoever_tries_to_get_in_is_answered_as_the_document_promises(furnished: Furnished) -> None:
    """Good attempts first: a minute takes only ten from one address."""
    fuzz = Fuzz(furnished)
    routes = {operation.path: operation for operation in fuzz.operations if operation.method == "post"}
    email = f"l{next(furnished.numbers)}@example.com"
    furnished.made("/users", email=email, password=OTHER_PASSWORD)
    mine, spare = (furnished.login(email, OTHER_PASSWORD) for _ in range(2))

    def case(path: str, **body: Any) -> Any:
        return routes[path].Case(body=body, media_type="application/json")

    login = case("/auth/login", email=email, password=OTHER_PASSWORD)
    refresh = {"refresh_token": spare["refresh_token"]}
    assert fuzz.send(login, ids={}) == 200
    assert [fuzz.send(case("/auth/refresh", **refresh), ids={}) for _ in range(2)] == [200, 401]

    for path in ("/auth/login", "/auth/refresh", *OF_OWN_SESSION):
        fuzz.each(routes[path], lambda case: fuzz.send(case, ids={}, token=mine["access_token"]))
    me = next(one for one in fuzz.operations if one.path == "/auth/me")
    assert fuzz.send(me.Case(), ids={}) == 200
    assert fuzz.send(me.Case(), ids={}, token=mine["access_token"]) == 401, "its session was ended"
    # The attempts above may be spread over minutes on a busy machine; these follow each other.
    wrong = case("/auth/login", email=email, password="wrong")
    assert any(fuzz.send(wrong, ids={}) == 429 for _ in range(100))
    assert {204, 401, 422, 429} <= {*fuzz.answers}
